"""What tests of the client need of an engine: a model, a KV cache in a region, block contents that
tell where they belong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kvtier

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
WAIT_S = 10.0


def spec(model: str = "model", ranks: int = 1, block_bytes: int = BLOCK_BYTES) -> kvtier.ModelSpec:
    component = kvtier.Component(kvtier.Kind.FULL, block_bytes, name="full")
    return kvtier.ModelSpec(BLOCK_TOKENS, ranks, (component,), model)


def tokens(blocks: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    """A prompt of so many whole blocks, another for each seed."""
    return np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(1_000_000 * seed)


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Looks again and again until condition() is true."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.01)


def ids(first: int, count: int) -> npt.NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64)


class Cache:
    """An engine's blocks: one component, one piece a block, in a region of its own."""

    def __init__(self, blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.region = kvtier.Region.create(blocks * block_bytes)
        self.blocks = np.frombuffer(self.region.memory, np.uint8).reshape(blocks, block_bytes)
        self.layouts = (kvtier.Layout(0, 1, (kvtier.Piece(0, block_bytes, 0, block_bytes),)),)

    @property
    def lent(self) -> kvtier.AnyRegion:
        """What a session is attached with."""
        return self.region

    def fill(self, first: int, count: int, seed: int = 0) -> npt.NDArray[np.uint8]:
        """Random bytes in so many blocks; a copy of them."""
        content = np.random.default_rng(seed).integers(
            0, 256, (count, self.blocks.shape[1]), np.uint8
        )
        self.blocks[first : first + count] = content
        return content


def attach(client: kvtier.Client, cache: Cache | None = None, **changes: Any) -> Any:
    """A session that is both scheduler and rank 0, attached."""
    options: dict[str, Any] = {
        "engine_id": os.urandom(16),
        "role": kvtier.Role.SCHEDULER,
        "rank": 0,
        "wait_s": WAIT_S,
    }
    if cache is not None:
        options |= {"regions": (cache.lent,), "layouts": cache.layouts}
    options |= changes
    return client.attach(options.pop("spec", spec()), **options)


def store(session: Any, cache: Cache, blocks: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Stores a prompt of so many blocks from the cache's first ones; their content."""
    content = cache.fill(0, blocks, seed)
    prompt = tokens(blocks, seed)
    reserved = session.reserve(prompt, [kvtier.BlockRange(0, 0, blocks)])
    assert reserved.states == (bytes([kvtier.ReserveState.MISSING]) * blocks,)
    op = session.demote([kvtier.Moves(0, range(blocks), ids(0, blocks))], ticket=reserved.ticket)
    assert op.wait(WAIT_S)
    assert op.result.all_done, op.result
    return content
