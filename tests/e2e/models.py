"""Small models for the engine under test, written to a directory: nothing is downloaded.

A directory holds config.json, a tokenizer of one word a token (the HTTP server wants one) and
seeded weights. These are of ordinary size on purpose: with the engine's own dummy weights (all
within 0.001 of zero, norms included) attention adds nothing, so a KV block full of zeros gives the
same answer to the bit and no test of a KV cache can fail.

    llama       full attention in every layer                          1 kind of KV group
    gemma3      three sliding-window layers (100 tokens) and a full    2 kinds
    qwen3next   three recurrent (gated delta net) layers and a full    2 kinds, bfloat16

The window of gemma3 is smaller than the prompts and no multiple of the block of 32 tokens. The
attention of qwen3next is wide, its state small: the engine makes a block as large as a state, and
this keeps it at few tokens.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 512
FIRST_WORD = 3  # 0, 1 and 2 are padding, beginning and end
HIDDEN = 128
WEIGHTS_SEED = 7
WINDOW_TOKENS = 100
ADAPTER_RANK = 8

Config = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model and how the engine is to run it."""

    name: str
    config: Config
    engine: dict[str, Any] = field(default_factory=dict)  # arguments of vllm.LLM beside the usual


COMMON: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SMALL_HEADS: Config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

LLAMA: Config = (
    COMMON
    | SMALL_HEADS
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
)
GEMMA3: Config = (
    COMMON
    | SMALL_HEADS
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "attention_bias": False,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    }
)
QWEN3NEXT: Config = COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,  # in the last layer only: the engine refuses a model without any
    "num_experts_per_tok": 2,  # all: a choice would make last bits into another answer
    "moe_intermediate_size": HIDDEN // 2,
    "shared_expert_intermediate_size": HIDDEN // 2,
    "mlp_only_layers": [0, 1, 2],
    "torch_dtype": "bfloat16",
}

FLOAT32 = {"dtype": "float32", "block_size": 32}
MODELS: dict[str, Model] = {
    "llama": Model("llama", LLAMA, FLOAT32),
    "gemma3": Model("gemma3", GEMMA3, FLOAT32),
    "qwen3next": Model("qwen3next", QWEN3NEXT, {"dtype": "bfloat16", "mamba_cache_mode": "align"}),
}

Shape = tuple[int, ...]


def attention_shapes(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one attention layer, as checkpoints have them."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, hidden = config["head_dim"], config["hidden_size"]
    is_gated = config["model_type"] == "qwen3_next"  # each query head has a gate beside it
    yield prefix + "q_proj.weight", (heads * size * (2 if is_gated else 1), hidden)
    yield prefix + "k_proj.weight", (kv_heads * size, hidden)
    yield prefix + "v_proj.weight", (kv_heads * size, hidden)
    yield prefix + "o_proj.weight", (hidden, heads * size)
    if config["model_type"] != "llama":
        yield prefix + "q_norm.weight", (size,)
        yield prefix + "k_norm.weight", (size,)


def recurrent_shapes(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one gated-delta-net layer."""
    hidden, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    yield prefix + "in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
    yield prefix + "in_proj_ba.weight", (2 * value_heads, hidden)
    yield prefix + "conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield prefix + "A_log", (value_heads,)
    yield prefix + "dt_bias", (value_heads,)
    yield prefix + "norm.weight", (config["linear_value_head_dim"],)
    yield prefix + "out_proj.weight", (hidden, values)


def mlp_shapes(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one gated MLP."""
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)


def expert_shapes(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one layer of experts with a shared one."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield prefix + "gate.weight", (experts, hidden)
    yield prefix + "shared_expert_gate.weight", (1, hidden)
    yield from mlp_shapes(
        prefix + "shared_expert.", hidden, config["shared_expert_intermediate_size"]
    )
    for idx in range(experts):
        yield from mlp_shapes(f"{prefix}experts.{idx}.", hidden, config["moe_intermediate_size"])


def weight_shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of all weights of a model."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    for idx, kind in enumerate(kinds):
        layer = f"model.layers.{idx}."
        if kind == "linear_attention":
            yield from recurrent_shapes(config, layer + "linear_attn.")
        else:
            yield from attention_shapes(config, layer + "self_attn.")
        if config.get("num_experts", 0) and idx not in config["mlp_only_layers"]:
            yield from expert_shapes(config, layer + "mlp.")
        else:
            yield from mlp_shapes(layer + "mlp.", hidden, inner)
        for norm in norms:
            yield f"{layer}{norm}.weight", (hidden,)


def weight(config: Config, name: str, shape: Shape, draw: np.random.Generator) -> np.ndarray:
    """One weight, float32. Matrices keep the size of what they are multiplied with, about."""
    family = config["model_type"]
    if name.endswith("A_log"):  # how fast a state forgets; exp(this) is well below 1
        return np.full(shape, -3.0, dtype=np.float32)
    if name.endswith("dt_bias"):
        return np.full(shape, 0.5, dtype=np.float32)
    if len(shape) == 1:  # norms; these two families scale by 1 + weight, but for the gated one
        is_offset = family in ("gemma3_text", "qwen3_next") and "linear_attn" not in name
        return np.full(shape, 0.0 if is_offset else 1.0, dtype=np.float32)
    size = 1.5 / math.sqrt(math.prod(shape[1:]))
    if "embed_tokens" in name and family == "gemma3_text":
        # It is scaled by sqrt(hidden) and used for the output too: larger, and the model would
        # repeat its last token whatever attention says.
        size = 0.2 / math.sqrt(shape[1])
    return (draw.standard_normal(shape) * size).astype(np.float32)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, as uint16, rounded to nearest (halves to even)."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_weights(path: pathlib.Path, config: Config, seed: int) -> None:
    """The weights of a model, in its own type."""
    draw = np.random.default_rng(seed)
    weights = {name: weight(config, name, shape, draw) for name, shape in weight_shapes(config)}
    if config["torch_dtype"] == "bfloat16":
        halves = {name: as_bfloat16(values) for name, values in weights.items()}
        write_safetensors(path, halves, "BF16")
    else:
        write_safetensors(path, weights, "F32")


def write_safetensors(path: pathlib.Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    """A safetensors file: length of the header, header as JSON, raw little-endian data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    at = 0
    for name, values in weights.items():
        raw = values.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [at, at + len(raw)],
        }
        at += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def write_adapter(directory: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """Writes a LoRA adapter for the query projections of model @name."""
    config = MODELS[name].config
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": 2 * ADAPTER_RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    rows, hidden = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    draw = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for idx in range(config["num_hidden_layers"]):
        layer = f"base_model.model.model.layers.{idx}.self_attn.q_proj."
        for part, shape in (("A", (ADAPTER_RANK, hidden)), ("B", (rows, ADAPTER_RANK))):
            values = draw.standard_normal(shape) * 0.3
            weights[f"{layer}lora_{part}.weight"] = values.astype(np.float32)
    write_safetensors(directory / "adapter_model.safetensors", weights, "F32")
    return directory


def write_tokenizer(directory: pathlib.Path) -> None:
    """One word a token: "w3" is token 3."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{token}": token for token in range(FIRST_WORD, VOCAB)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 8192,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(directory: pathlib.Path, name: str, seed: int = WEIGHTS_SEED) -> pathlib.Path:
    """Writes model @name into @directory; another seed gives other weights of the same shape."""
    directory.mkdir(parents=True, exist_ok=True)
    config = MODELS[name].config
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tokenizer(directory)
    write_weights(directory / "model.safetensors", config, seed)
    return directory
