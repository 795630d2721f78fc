"""Which weights an engine has loaded: the part of a namespace that no configuration tells.

A hub's name with a commit names its weights. A directory does not: two fine-tuned models
of one shape differ in nothing but the bytes of their tensors, and a directory's files may be
replaced. Its identity is its real path, every file's name, size and time of change, the content of
small files (configuration), and samples of the content of large ones. So two directories never
share, nor a directory before and after a change; a copy of a model is another model.

Reading samples takes milliseconds a file; hashing the weights themselves would take minutes.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path

SMALL_FILE_BYTES = 1 << 20
SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 4096
# Written by others beside the weights, and without influence on them.
_IGNORED_SUFFIXES = (".md", ".txt", ".lock", ".png", ".jpg", ".gitattributes")


def _sample_offsets(size_bytes: int) -> list[int]:
    """Where to look into a large file: the head (where the names of tensors are) to the end."""
    last = size_bytes - SAMPLE_BYTES
    return [last * at // (SAMPLES_PER_FILE - 1) for at in range(SAMPLES_PER_FILE)]


def _add_file(digest: hashlib._Hash, path: Path, name: str) -> None:
    status = path.stat()
    digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    with path.open("rb") as file:
        if status.st_size <= SMALL_FILE_BYTES:
            digest.update(file.read())
            return
        for offset in _sample_offsets(status.st_size):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))


def directory_digest(directory: Path) -> str:
    """Hex digest of a model directory. OSError if it cannot be read."""
    digest = hashlib.sha256(os.fsencode(directory.resolve()) + b"\0")
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.name.endswith(_IGNORED_SUFFIXES):
            _add_file(digest, path, path.name)
    return digest.hexdigest()


def weights_digest(model: str) -> str:
    """Digest of a model that is a directory or a file here; empty for the name of a hub's model.

    OSError if it cannot be read.
    """
    path = Path(model)
    if path.is_dir():
        return directory_digest(path)
    if path.is_file():  # a single GGUF file
        digest = hashlib.sha256(os.fsencode(path.resolve()) + b"\0")
        _add_file(digest, path, path.name)
        return digest.hexdigest()
    return ""


def hub_commit(name: str, revision: str = "") -> str:
    """The commit that a hub's name and a branch mean on this machine: what was downloaded, and so
    what vLLM loads. Empty if it is no hub's name, or nothing of it is here.

    A branch moves: without the commit a new upload would go on from what the old weights computed.
    Asks the hub's cache, not the hub. The configuration that transformers gives does not tell it.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        return ""
    if os.path.exists(name):
        return ""
    for file in ("config.json", "params.json", "adapter_config.json"):
        try:
            path = hub.try_to_load_from_cache(name, file, revision=revision or None)
        except ValueError:  # this can be no hub's name
            return ""
        if isinstance(path, str):
            return os.path.basename(os.path.dirname(path))
    return ""
