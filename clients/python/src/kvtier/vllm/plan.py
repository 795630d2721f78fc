"""Which blocks a load or a store moves, and into or out of which engine blocks. Pure functions.

A request's tokens, with block_tokens = 4 engine blocks here and a boundary b that is to be loaded:

    tokens        0                computed           low = b - W        b
    full          [ local hit, shared ][ loaded                         ]
    sliding       [ out of window, null or local        ][ loaded       ]
    state                                                      [loaded  ]   ends exactly at b

A block of the daemon may be larger than the engine's. Engine blocks of it that must not be written
(shared with other requests, beyond the boundary, out of the window) are NO_BLOCK in a load. In a
store every engine block must be named: one that is out of every window that this block can serve is
given as another engine block of the same kvtier block. Such bytes are never read: whoever resumes
at or after the block's end e looks back to e - W at most, and a load writes NO_BLOCK below that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.types import NO_BLOCK, BlockRange, Kind, ReserveState
from kvtier.vllm.geometry import Geometry, GroupComponent
from kvtier.vllm.meta import ComponentMoves

NULL_BLOCK = 0  # vLLM's placeholder for "not allocated"
RANGES_MAX = 32  # of one Reserve
BLOCKS_MAX = 65536  # of one Reserve, and of one transfer

Tables = Sequence[Sequence[int]]  # one list of engine block ids a cache group


# ---- loads -------------------------------------------------------------------------------------


def load_moves(
    geometry: Geometry, tables: Tables, computed: int, boundary: int
) -> list[ComponentMoves] | None:
    """What to load so that a request that has tokens [0, computed) can resume at `boundary`.

    Components with nothing to load are left out. None: the engine's blocks are not as the load
    needs them (a needed one is null, or one would be written in part), so it must not be begun.
    """
    moves = []
    for number, component in enumerate(geometry.components):
        blocks = _blocks_to_load(geometry, component, computed, boundary)
        filled = ComponentMoves(number, [], [])
        for block in blocks:
            ids = _load_ids(geometry, component, tables, block, computed, boundary)
            if ids is None:
                return None
            if any(engine_block != NO_BLOCK for engine_block in ids):
                filled.blocks.append(block)
                filled.engine_blocks.extend(ids)
        if filled.blocks:
            moves.append(filled)
    return moves


def _blocks_to_load(
    geometry: Geometry, component: GroupComponent, computed: int, boundary: int
) -> range:
    size = geometry.block_tokens
    end = -(-boundary // size)
    if component.kind is Kind.STATE:
        return range(end - 1, end)
    return range(_load_start(component, computed, boundary) // size, end)


def _load_start(component: GroupComponent, computed: int, boundary: int) -> int:
    """First token whose cache the load must bring."""
    if component.kind is Kind.SLIDING_WINDOW:
        return max(computed, boundary - component.window_tokens)
    return computed


def _load_ids(
    geometry: Geometry,
    component: GroupComponent,
    tables: Tables,
    block: int,
    computed: int,
    boundary: int,
) -> list[int] | None:
    """Of one block, for each of its groups in turn. None: it cannot be loaded."""
    if component.kind is Kind.STATE:
        if boundary % geometry.block_tokens:
            return None
        at = boundary // component.group_block_tokens - 1
        ids = [_id(tables, group, at) for group in component.groups]
        return None if NULL_BLOCK in ids else ids
    size, per_group = component.group_block_tokens, component.engine_blocks_per_group
    start = _load_start(component, computed, boundary)
    ids = []
    for group in component.groups:
        for at in range(block * per_group, (block + 1) * per_group):
            if (at + 1) * size <= start or at * size >= boundary:
                ids.append(NO_BLOCK)
                continue
            engine_block = _id(tables, group, at)
            if engine_block == NULL_BLOCK or at * size < computed or (at + 1) * size > boundary:
                return None
            ids.append(engine_block)
    return ids


def _id(tables: Tables, group: int, at: int) -> int:
    """NULL_BLOCK where the table ends."""
    table = tables[group]
    return table[at] if at < len(table) else NULL_BLOCK


def given_up(geometry: Geometry, tables: Tables, computed: int) -> list[ComponentMoves]:
    """The engine blocks of a load that cannot be right, to be named as failed: one component with
    every block that the request has beyond `computed`."""
    component = geometry.components[0]
    first = computed // component.group_block_tokens
    ids = [
        engine_block
        for group in component.groups
        for engine_block in tables[group][first:]
        if engine_block != NULL_BLOCK
    ]
    return [ComponentMoves(0, [], ids)]


# ---- stores ------------------------------------------------------------------------------------


def boundaries_of(geometry: Geometry, prompt_tokens: int, branch_tokens: int) -> set[int]:
    """Where another request is likely to go on: at the end of the prompt (a next turn), one block
    earlier if the prompt ends with a block (the same prompt again, whose last token must be
    computed), and where prompts are known to part."""
    size = geometry.block_tokens
    ends = (prompt_tokens, prompt_tokens - 1, branch_tokens)
    return {end // size * size for end in ends if end >= size}


def store_candidates(
    geometry: Geometry,
    tables: Tables,
    starts: Starts,
    end_block: int,
    boundaries: Iterable[int] | None,
    states: Sequence[tuple[int, int, int]],
) -> list[ComponentMoves]:
    """What the engine has, or will after this step, of the blocks before end_block.

    starts: from which block on. boundaries: where windows are wanted; None for everywhere.
    states: (cache group, engine block, tokens) as vLLM offers them.
    """
    found = []
    for number, component in enumerate(geometry.components):
        moves = ComponentMoves(number, [], [])
        if component.kind is Kind.STATE:
            _add_states(geometry, component, end_block, states, moves)
        else:
            for block in _blocks_to_store(geometry, component, starts, end_block, boundaries):
                ids = _store_ids(geometry, component, tables, block)
                if ids is not None:
                    moves.blocks.append(block)
                    moves.engine_blocks.extend(ids)
        if moves.blocks:
            found.append(moves)
    return found


class Starts:
    """How far a request was stored: blocks of the full components, and of the windows."""

    __slots__ = ("full", "window")

    def __init__(self, full: int = 0, window: int = 0) -> None:
        self.full = full
        self.window = window

    @property
    def least(self) -> int:
        """Before it everything was dealt with."""
        return min(self.full, self.window)

    def advance(self, end_block: int) -> None:
        """Everything before end_block was dealt with."""
        self.full = max(self.full, end_block)
        self.window = max(self.window, end_block)

    def back_to(self, block: int) -> None:
        """From `block` on, deal with it again."""
        self.full = min(self.full, block)
        self.window = min(self.window, block)


def _blocks_to_store(
    geometry: Geometry,
    component: GroupComponent,
    starts: Starts,
    end_block: int,
    boundaries: Iterable[int] | None,
) -> Iterable[int]:
    if component.kind is Kind.FULL:
        return range(starts.full, end_block)
    if boundaries is None:
        return range(starts.window, end_block)
    wanted: set[int] = set()
    size = geometry.block_tokens
    for boundary in boundaries:
        low = max(0, boundary - component.window_tokens) // size
        wanted.update(range(max(low, starts.window), min(boundary // size, end_block)))
    return sorted(wanted)


def _store_ids(
    geometry: Geometry, component: GroupComponent, tables: Tables, block: int
) -> list[int] | None:
    """None: an engine block that the block needs is not there any more."""
    size, per_group = component.group_block_tokens, component.engine_blocks_per_group
    needed_from = 0
    if component.kind is Kind.SLIDING_WINDOW:
        needed_from = (block + 1) * geometry.block_tokens - component.window_tokens
    ids = []
    for group in component.groups:
        last = _id(tables, group, (block + 1) * per_group - 1)
        for at in range(block * per_group, (block + 1) * per_group):
            engine_block = _id(tables, group, at)
            if engine_block == NULL_BLOCK and (at + 1) * size <= needed_from:
                engine_block = last
            if engine_block == NULL_BLOCK:
                return None
            ids.append(engine_block)
    return ids


def _add_states(
    geometry: Geometry,
    component: GroupComponent,
    end_block: int,
    states: Sequence[tuple[int, int, int]],
    moves: ComponentMoves,
) -> None:
    by_boundary: dict[int, dict[int, int]] = {}
    for group, engine_block, tokens in states:
        if group in component.groups and engine_block != NULL_BLOCK:
            by_boundary.setdefault(tokens, {})[group] = engine_block
    for tokens in sorted(by_boundary):
        offered = by_boundary[tokens]
        block, rest = divmod(tokens, geometry.block_tokens)
        if rest or not 0 < block <= end_block or len(offered) < len(component.groups):
            continue
        moves.blocks.append(block - 1)
        moves.engine_blocks.extend(offered[group] for group in component.groups)


def wants(candidates: Sequence[ComponentMoves]) -> list[BlockRange]:
    """The candidates as ranges, for a Reserve."""
    ranges: list[BlockRange] = []
    for moves in candidates:
        first = previous = moves.blocks[0]
        for block in moves.blocks[1:]:
            if block != previous + 1:
                ranges.append(BlockRange(moves.component, first, previous + 1))
                first = block
            previous = block
        ranges.append(BlockRange(moves.component, first, previous + 1))
    return ranges


def missing(
    geometry: Geometry, candidates: Sequence[ComponentMoves], states: Sequence[bytes]
) -> list[ComponentMoves]:
    """Those candidates that a reserve found missing. states: its answer, a range each."""
    by_component: dict[int, bytes] = {}
    for want, answer in zip(wants(candidates), states, strict=True):
        by_component[want.component] = by_component.get(want.component, b"") + answer
    kept = []
    for moves in candidates:
        per_block = geometry.components[moves.component].engine_blocks_per_block
        left = ComponentMoves(moves.component, [], [])
        answers = by_component[moves.component]
        for at, (block, state) in enumerate(zip(moves.blocks, answers, strict=True)):
            if state == ReserveState.MISSING:
                left.blocks.append(block)
                left.engine_blocks.extend(
                    moves.engine_blocks[at * per_block : (at + 1) * per_block]
                )
        if left.blocks:
            kept.append(left)
    return kept


def trim(
    geometry: Geometry, candidates: Sequence[ComponentMoves], engine_blocks_max: int
) -> tuple[list[ComponentMoves], int | None]:
    """As many of the candidates as fit, the first blocks first.

    Returns them, and the first block that was left out: None if nothing was.
    """
    order = sorted(
        (block, number, at)
        for number, moves in enumerate(candidates)
        for at, block in enumerate(moves.blocks)
    )
    kept = [ComponentMoves(moves.component, [], []) for moves in candidates]
    used = ranges = 0
    last: dict[int, int] = {}
    for blocks, (block, number, at) in enumerate(order, 1):
        moves = candidates[number]
        per_block = geometry.components[moves.component].engine_blocks_per_block
        used += per_block
        ranges += last.get(number) != block - 1
        if used > engine_blocks_max or blocks > BLOCKS_MAX or ranges > RANGES_MAX:
            left = [part for part in kept if part.blocks]
            return _before(geometry, left, block), block
        last[number] = block
        kept[number].blocks.append(block)
        kept[number].engine_blocks.extend(
            moves.engine_blocks[at * per_block : (at + 1) * per_block]
        )
    return [part for part in kept if part.blocks], None


def _before(
    geometry: Geometry, candidates: Sequence[ComponentMoves], end_block: int
) -> list[ComponentMoves]:
    """Without the component's part of a block of which another component's part did not fit."""
    kept = []
    for moves in candidates:
        count = sum(block < end_block for block in moves.blocks)
        per_block = geometry.components[moves.component].engine_blocks_per_block
        if count:
            kept.append(
                ComponentMoves(
                    moves.component, moves.blocks[:count], moves.engine_blocks[: count * per_block]
                )
            )
    return kept
