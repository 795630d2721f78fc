"""Engine blocks for tests: vLLM's pool as much as is used, and geometries of few tokens.

A block that a load or store of any rank uses is `busy`; giving it to somebody else fails the test.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvtier.types import Kind
from kvtier.vllm.geometry import Geometry, GroupComponent

Tag = tuple[Any, ...]


def geometry_of(
    block_tokens: int,
    components: list[tuple[Kind, int, int, int]],
    ranks: int = 1,
    pool_blocks: int = 64,
) -> Geometry:
    """components: (kind, window_tokens, how many groups, tokens of an engine block)."""
    made, group = [], 0
    for kind, window, groups, engine_tokens in components:
        made.append(
            GroupComponent(
                kind=kind,
                window_tokens=window,
                groups=tuple(range(group, group + groups)),
                group_block_tokens=engine_tokens,
                engine_blocks_per_group=1 if kind is Kind.STATE else block_tokens // engine_tokens,
                layer_names=(("l",),) * groups,
                places=(),
                is_replicated=False,
                text=f"{kind} {window}",
            )
        )
        group += groups
    return Geometry(
        block_tokens=block_tokens,
        components=tuple(made),
        group_count=group,
        pool_blocks=pool_blocks,
        ranks=ranks,
        layout="",
        model="m",
        revision="",
        dtype="",
        tags=(),
    )


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    tag: Tag | None = None  # under which the engine's own prefix cache finds it

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class Pool:
    """vLLM's BlockPool, as much as is used."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.free = deque(self.blocks[1:])
        self.busy: Counter[int] = Counter()
        self.memory: dict[int, Tag] = {}
        self.cached: dict[Tag, int] = {}
        self._serial = 0

    def take(self, count: int) -> list[Block] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            assert block.ref_cnt == 0
            assert self.busy[block.block_id] == 0, "reused while a job uses it"
            if block.tag is not None:
                self.cached.pop(block.tag, None)
                block.tag = None
            block.ref_cnt = 1
            self._serial += 1
            self.memory[block.block_id] = ("junk", self._serial)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert not block.is_null
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.tag is None:
                    self.free.appendleft(block)
                else:
                    self.free.append(block)

    def remember(self, block_id: int, tag: Tag) -> None:
        if tag not in self.cached and self.blocks[block_id].tag is None:
            self.cached[tag] = block_id
            self.blocks[block_id].tag = tag
