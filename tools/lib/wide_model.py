"""A model of random weights that is wide enough for computing to be ordinary work: 24 million
weights, so that a CPU needs a second or two for a prompt of 2,000 tokens. Nothing is downloaded.

    wide_model.py DIRECTORY      in vLLM's virtual environment, which has numpy"""

import os
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/e2e"))
import models  # noqa: E402

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 8,
}


def write(directory: pathlib.Path) -> pathlib.Path:
    models.MODELS["wide"] = models.Model("wide", models.LLAMA | WIDE)
    return models.write_model(directory, "wide")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
