"""Which blocks a load and a store move: windows, states, nulls, shared blocks, sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.types import NO_BLOCK, BlockRange, Kind, ReserveState
from kvtier.vllm import plan
from kvtier.vllm.meta import ComponentMoves
from vllm_pool import geometry_of

FULL = (Kind.FULL, 0, 1, 4)
NONE = NO_BLOCK


def table(count: int, first: int, null: range = range(0)) -> list[int]:
    return [0 if i in null else first + i for i in range(count)]


def loaded(
    components: list[Any],
    tables: list[list[int]],
    computed: int,
    boundary: int,
    block_tokens: int = 8,
) -> Any:
    moves = plan.load_moves(geometry_of(block_tokens, components), tables, computed, boundary)
    return None if moves is None else [(m.component, m.blocks, m.engine_blocks) for m in moves]


def test_a_load_from_nothing() -> None:
    assert loaded([FULL], [table(4, 10)], 0, 16) == [(0, [0, 1], [10, 11, 12, 13])]


def test_what_the_request_has_itself_is_not_written() -> None:
    """A local hit that ends within a kvtier block: its first half is shared."""
    assert loaded([FULL], [table(4, 10)], 4, 16) == [(0, [0, 1], [NONE, 11, 12, 13])]
    assert loaded([FULL], [table(4, 10)], 12, 16) == [(0, [1], [NONE, 13])]
    assert loaded([FULL], [table(4, 10)], 16, 16) == []


def test_a_shorter_load_does_not_write_beyond_its_end() -> None:
    assert loaded([FULL], [table(4, 10)], 0, 12) == [(0, [0, 1], [10, 11, 12, NONE])]
    assert loaded([FULL], [table(3, 10)], 0, 12) == [(0, [0, 1], [10, 11, 12, NONE])]


@pytest.mark.parametrize("tables", [table(4, 10, range(2, 3)), table(3, 10)])
def test_a_null_block_where_bytes_are_needed_gives_the_load_up(tables: list[int]) -> None:
    assert loaded([FULL], [tables], 0, 16) is None


@pytest.mark.parametrize(("computed", "boundary"), [(2, 16), (0, 14)])
def test_no_engine_block_is_written_in_part(computed: int, boundary: int) -> None:
    assert loaded([FULL], [table(4, 10)], computed, boundary) is None


def test_a_window_loads_what_the_next_token_looks_back_to() -> None:
    window = (Kind.SLIDING_WINDOW, 5, 1, 4)
    # b = 32, W = 5: tokens from 27 on, so engine blocks 6 and 7; block 3 holds both.
    assert loaded([window], [table(8, 10, range(6))], 0, 32) == [(0, [3], [16, 17])]
    # W = 9: from 23 on, engine block 5, the second of kvtier block 2.
    wide = (Kind.SLIDING_WINDOW, 9, 1, 4)
    assert loaded([wide], [table(8, 10, range(5))], 0, 32) == [(0, [2, 3], [NONE, 15, 16, 17])]
    # What is below is not written, should vLLM have a block there.
    assert loaded([wide], [table(8, 10)], 0, 32) == [(0, [2, 3], [NONE, 15, 16, 17])]
    # W = 8: exactly two blocks. A ninth token back would be one too many.
    exact = (Kind.SLIDING_WINDOW, 8, 1, 4)
    assert loaded([exact], [table(8, 10, range(6))], 0, 32) == [(0, [3], [16, 17])]
    assert loaded([wide], [table(8, 10, range(6))], 0, 32) is None


def test_a_window_that_the_request_has_in_part() -> None:
    window = (Kind.SLIDING_WINDOW, 12, 1, 4)
    assert loaded([window], [table(8, 10, range(5))], 24, 32) == [(0, [3], [16, 17])]
    assert loaded([window], [table(8, 10, range(5))], 28, 32) == [(0, [3], [NONE, 17])]


def test_merged_groups_come_one_after_the_other() -> None:
    window = (Kind.SLIDING_WINDOW, 5, 2, 4)
    tables = [table(8, 10, range(6)), table(8, 30, range(6)), table(8, 50)]
    assert loaded([window, FULL], tables, 24, 32) == [
        (0, [3], [16, 17, 36, 37]),
        (1, [3], [56, 57]),
    ]


def test_a_state_is_the_block_that_ends_at_the_boundary() -> None:
    state = (Kind.STATE, 0, 2, 4)
    tables = [table(4, 10, range(3)), table(4, 30, range(3))]
    assert loaded([state], tables, 0, 16) == [(0, [1], [13, 33])]
    assert loaded([state], [table(4, 10, range(4)), tables[1]], 0, 16) is None
    assert loaded([state], tables, 0, 12) is None  # no boundary of the daemon


def test_what_is_given_up_names_the_blocks() -> None:
    geometry = geometry_of(8, [FULL])
    (move,) = plan.given_up(geometry, [table(4, 10, range(2, 3))], 4)
    assert move.engine_blocks == [11, 13]


# ---- stores --------------------------------------------------------------------------------------


def stored(
    components: list[Any],
    tables: list[list[int]],
    end_block: int,
    *,
    starts: plan.Starts | None = None,
    boundaries: set[int] | None = None,
    states: Any = (),
    block_tokens: int = 8,
) -> Any:
    candidates = plan.store_candidates(
        geometry_of(block_tokens, components),
        tables,
        starts or plan.Starts(),
        end_block,
        boundaries,
        states,
    )
    return [(m.component, m.blocks, m.engine_blocks) for m in candidates]


def test_full_blocks_from_where_the_last_store_ended() -> None:
    assert stored([FULL], [table(7, 10)], 3, starts=plan.Starts(full=1)) == [
        (0, [1, 2], [12, 13, 14, 15])
    ]
    assert stored([FULL], [table(7, 10)], 3, starts=plan.Starts(3, 3)) == []


def test_windows_near_where_another_request_may_go_on() -> None:
    window = (Kind.SLIDING_WINDOW, 9, 1, 4)
    tables = [table(20, 10)]
    assert [
        b for _, blocks, _ in stored([window], tables, 10, boundaries={40}) for b in blocks
    ] == [3, 4]
    assert [
        b for _, blocks, _ in stored([window], tables, 10, boundaries={8, 72}) for b in blocks
    ] == [0, 7, 8]
    assert stored([window], tables, 4, boundaries={72}) == []  # not computed yet
    assert len(stored([window], tables, 10)[0][1]) == 10


def test_a_window_block_whose_unreadable_part_is_gone_is_stored() -> None:
    """A kvtier block of 16 tokens, a window of 3: who resumes at its end reads 3 tokens of it, and
    vLLM has given back the rest."""
    narrow = (Kind.SLIDING_WINDOW, 3, 1, 4)
    assert stored([narrow], [table(4, 10, range(3))], 1, block_tokens=16) == [
        (0, [0], [13, 13, 13, 13])
    ]
    # 6 tokens back reach into engine block 2: without it the block cannot be stored.
    wider = (Kind.SLIDING_WINDOW, 6, 1, 4)
    assert stored([wider], [table(4, 10, range(3))], 1, block_tokens=16) == []
    assert stored([wider], [table(4, 10, range(2))], 1, block_tokens=16) == [
        (0, [0], [13, 13, 12, 13])
    ]
    # 4 tokens back are engine block 3 alone.
    exact = (Kind.SLIDING_WINDOW, 4, 1, 4)
    assert stored([exact], [table(4, 10, range(3))], 1, block_tokens=16) != []


def test_states_are_those_that_are_offered_for_all_groups() -> None:
    state = (Kind.STATE, 0, 2, 8)
    tables = [table(4, 10), table(4, 30)]
    assert stored([state], tables, 2, states=[(0, 5, 16), (1, 6, 16)]) == [(0, [1], [5, 6])]
    assert stored([state], tables, 2, states=[(0, 5, 16)]) == []
    assert stored([state], tables, 2, states=[(0, 0, 16), (1, 6, 16)]) == []
    assert stored([state], tables, 1, states=[(0, 5, 16), (1, 6, 16)]) == []  # not to be stored
    assert stored([state], tables, 2, states=[(0, 5, 12), (1, 6, 12)]) == []  # within a block


def test_boundaries() -> None:
    geometry = geometry_of(8, [FULL])
    assert plan.boundaries_of(geometry, 20, 0) == {16}
    assert plan.boundaries_of(geometry, 16, 0) == {8, 16}  # the last token must be computed
    assert plan.boundaries_of(geometry, 20, 8) == {8, 16}
    assert plan.boundaries_of(geometry, 7, 0) == set()


def test_ranges_and_what_is_missing() -> None:
    geometry = geometry_of(8, [FULL, (Kind.SLIDING_WINDOW, 9, 1, 8)])
    candidates = [ComponentMoves(0, [1, 2, 5], [1, 2, 3, 4, 5, 6]), ComponentMoves(1, [5], [9])]
    assert plan.wants(candidates) == [BlockRange(0, 1, 3), BlockRange(0, 5, 6), BlockRange(1, 5, 6)]
    miss, there = bytes([ReserveState.MISSING]), bytes([ReserveState.PRESENT])
    pending, full = bytes([ReserveState.PENDING]), bytes([ReserveState.NO_ROOM])
    left = plan.missing(geometry, candidates, [there + miss, miss, pending])
    assert left == [ComponentMoves(0, [2, 5], [3, 4, 5, 6])]
    assert plan.missing(geometry, candidates, [full + there, pending, miss]) == [
        ComponentMoves(1, [5], [9])
    ]
    with pytest.raises(ValueError, match="zip"):
        plan.missing(geometry, candidates, [miss])


def test_trim_keeps_whole_blocks_from_the_front() -> None:
    geometry = geometry_of(8, [FULL, (Kind.SLIDING_WINDOW, 9, 1, 8)])
    candidates = [
        ComponentMoves(0, [0, 1, 2], [1, 2, 3, 4, 5, 6]),
        ComponentMoves(1, [1, 2], [8, 9]),
    ]
    assert plan.trim(geometry, candidates, 100) == (candidates, None)
    assert plan.trim(geometry, candidates, 8) == (candidates, None)
    kept, left_out = plan.trim(geometry, candidates, 7)
    assert left_out == 2
    assert kept == [ComponentMoves(0, [0, 1], [1, 2, 3, 4]), ComponentMoves(1, [1], [8])]
    assert plan.trim(geometry, candidates, 1) == ([], 0)


def test_trim_keeps_to_what_one_reserve_takes() -> None:
    geometry = geometry_of(8, [(Kind.FULL, 0, 1, 8)])
    spread = list(range(0, 200, 2))
    kept, left_out = plan.trim(geometry, [ComponentMoves(0, spread, spread)], 10**9)
    assert left_out == 2 * plan.RANGES_MAX
    assert len(plan.wants(kept)) == plan.RANGES_MAX
