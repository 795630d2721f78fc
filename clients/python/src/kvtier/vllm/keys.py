"""What belongs to a prompt's identity beside its tokens.

    root     salt and LoRA: the daemon tags them, so one can never pass for the other
    blocks   a key of 32 bytes where an image, a sound or embeddings lie in a block: their tokens
             are the same placeholders for every content

A block's key is a hash over each item that touches it: who it is, where in the block it begins, and
which part of the item the block holds. So neither two images nor two splits of the same two images
make the same key. What cannot be keyed is not cached at all.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from kvtier.vllm import _compat, identity

ROOT_TEXT_MAX = 200  # bytes; the daemon takes 256
_HASHED = b"sha256:"
_SINCE_RESET = b"reset:"


def bounded(text: str) -> bytes:
    """A text as bytes that the daemon takes, different for different texts."""
    raw = text.encode()
    if len(raw) <= ROOT_TEXT_MAX and not raw.startswith((_HASHED, _SINCE_RESET)):
        return raw
    return _HASHED + hashlib.sha256(raw).hexdigest().encode()


def salt_since(reset_tag: bytes, salt: bytes) -> bytes:
    """A `bounded` salt for what was computed since the cache was reset: one that nobody else has,
    and different for different salts. reset_tag: empty before the first reset."""
    return _SINCE_RESET + reset_tag + salt if reset_tag else salt


class LoraNames:
    """Names adapters by name, path and content of the files, as they were when this engine first
    saw the adapter: vLLM loads it then and keeps it, whatever happens to the files afterwards."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str, str], str] = {}

    def key(self, lora: Any) -> bytes:
        """Empty for a request without an adapter. OSError if its files cannot be read."""
        if lora is None:
            return b""
        name = str(lora.lora_name)
        path = str(getattr(lora, "lora_path", ""))
        place = (int(getattr(lora, "lora_int_id", 0)), name, path)
        if place not in self._digests or getattr(lora, "load_inplace", False):
            self._digests[place] = _content_of(path)
        text = f"{name}\0{path}\0{self._digests[place]}"
        return name.encode()[:64] + b"@" + hashlib.sha256(text.encode()).hexdigest().encode()


def _content_of(path: str) -> str:
    """What an adapter is: the content of its files, or its commit on a hub. OSError if its files
    cannot be read, or are not on this machine: vLLM downloads them for the first request."""
    if not path:
        return ""
    content = identity.weights_digest(path) or identity.hub_commit(path)
    if not content:
        raise FileNotFoundError(f"nothing of the adapter {path} is on this machine yet")
    return content


@dataclass
class RequestKeys:
    """The identity of one request's blocks, beside their tokens."""

    request: Any
    block_tokens: int
    salt: bytes
    lora: bytes

    def __post_init__(self) -> None:
        self._embeds: dict[int, bytes] = {}

    def extra(self, first_block: int, end_block: int) -> list[tuple[int, bytes]]:
        """Keys of those blocks in [first_block, end_block) that have one, rising; blocks are
        numbered from first_block, as a call that begins there wants them."""
        parts: dict[int, list[bytes]] = {}
        for item in self.request.mm_features:
            self._add_item(parts, item, first_block, end_block)
        if self.request.prompt_embeds is not None:
            for block in range(first_block, min(end_block, self._embeds_end())):
                parts.setdefault(block, []).append(b"embeds" + self._embeds_digest(block))
        return [
            (block - first_block, hashlib.sha256(b"".join(parts[block])).digest())
            for block in sorted(parts)
        ]

    def _add_item(
        self, parts: dict[int, list[bytes]], item: Any, first_block: int, end_block: int
    ) -> None:
        start, length = int(item.mm_position.offset), int(item.mm_position.length)
        name = str(item.identifier).encode()
        size = self.block_tokens
        for block in range(
            max(first_block, start // size), min(end_block, -(-(start + length) // size))
        ):
            in_block = max(start - block * size, 0)
            in_item = max(block * size - start, 0)
            part = struct.pack("<4sIIII", b"item", len(name), length, in_block, in_item)
            parts.setdefault(block, []).append(part + name)

    def _embeds_end(self) -> int:
        return -(-len(self.request.prompt_embeds) // self.block_tokens)

    def _embeds_digest(self, block: int) -> bytes:
        if block not in self._embeds:
            start = block * self.block_tokens
            end = start + self.block_tokens
            part = self.request.prompt_embeds[start:end]
            # Where tokens and embeddings are mixed: which positions of the tensor are used at all.
            is_token = getattr(self.request, "prompt_is_token_ids", None) or ()
            digest = hashlib.sha256(bytes(map(bool, is_token[start:end])) + b"|")
            digest.update(_compat.embeds_bytes(part))
            self._embeds[block] = digest.digest()
        return self._embeds[block]


def request_keys(request: Any, block_tokens: int, loras: LoraNames) -> RequestKeys | None:
    """The request's identity, or None for one that is not to be cached: it has something whose
    content we cannot name. OSError if its adapter cannot be read."""
    if getattr(request, "pooling_params", None) is not None:
        return None
    if any(getattr(item, "identifier", None) is None for item in request.mm_features or ()):
        return None
    salt = bounded(request.cache_salt) if request.cache_salt else b""
    return RequestKeys(request, block_tokens, salt, loras.key(request.lora_request))
