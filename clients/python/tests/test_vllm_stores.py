"""The scheduler half call by call: what is stored, when, and what is held for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.types import Kind
from kvtier.vllm import plan, stores
from kvtier.vllm.meta import KvtierMetadata
from vllm_rig import FULL, STATE, WINDOW, Rig


def test_only_full_blocks_of_the_prompt_by_default() -> None:
    rig = Rig()
    request = rig.request(20)
    (job,) = rig.compute(request, 20).stores
    assert job.moves[0].blocks == [0, 1]
    request.all_token_ids += range(100)
    assert rig.compute(request, 100).stores == []
    assert rig.daemon.calls == ["lookup", "reserve"]


def test_generated_tokens_with_all() -> None:
    rig = Rig(store="all")
    request = rig.request(20)
    rig.store(rig.compute(request, 20))
    request.all_token_ids += range(5)
    rig.table(request)
    (job,) = rig.compute(request, 5).stores
    assert job.moves[0].blocks == [2]


def test_off_stores_nothing() -> None:
    rig = Rig(store="off")
    assert rig.compute(rig.request(), 40).stores == []
    assert rig.daemon.calls == ["lookup"]


def test_drafts_and_placeholders_are_no_tokens() -> None:
    rig = Rig(store="all")
    request = rig.request(23)
    rig.compute(request, 23)
    assert rig.build({"r": 5}).stores == []  # one token and four drafts
    request.num_computed_tokens = 26  # counted ahead by asynchronous scheduling
    assert rig.build({"r": 4}).stores == []
    request.all_token_ids.append(7)
    assert rig.build({"r": 4}).stores[0].moves[0].blocks == [2]


def test_a_step_of_a_long_request_sends_its_new_tokens_only() -> None:
    rig = Rig(pool_blocks=30_000, store_blocks_max=1.0)
    request = rig.request(80_512)
    rig.store(rig.compute(request, 80_000))
    rig.session.sent_tokens.clear()
    rig.store(rig.compute(request, 512))
    assert rig.session.sent_tokens == [512]


def test_what_the_lookup_found_is_not_offered() -> None:
    rig = Rig()
    rig.warm(40)
    request = rig.request(64)
    tokens = rig.offered(request)
    rig.allocated(request, tokens)
    (load,) = rig.build().loads
    rig.report(load.job_id)
    request.num_computed_tokens = tokens
    rig.session.sent_tokens.clear()
    (job,) = rig.build({"r": 24}).stores
    assert job.moves[0].blocks == [5, 6, 7]
    assert rig.session.sent_tokens == [24]


def test_one_reserve_a_store_and_one_store_for_two_equal_prompts() -> None:
    rig = Rig()
    one, two = rig.request(40, "one"), rig.request(40, "two")
    for request in (one, two):
        rig.ask(request)
        rig.allocated(request, 0)
    meta = rig.build({"one": 40, "two": 40})
    assert [job.req_id for job in meta.stores] == ["one"]
    assert rig.daemon.calls == ["lookup", "lookup", "reserve", "reserve"]
    rig.store(meta)
    rig.check_idle()


def test_reserves_cost_a_step_one_deadline_and_one_call_at_most() -> None:
    """Many requests fill a block in the same step: the others' stores begin in later ones."""
    rig = Rig(lookup_timeout_ms=20.0)
    scheduled = {}
    for number in range(5):
        request = rig.request([number] * 16, str(number))
        rig.ask(request)
        rig.allocated(request, 0)
        scheduled[request.request_id] = 16
    rig.daemon.on_call = lambda: rig.clock.sleep(0.015)
    assert [job.req_id for job in rig.build(scheduled).stores] == ["0", "1"]
    assert [job.req_id for job in rig.build(scheduled).stores] == ["2", "3"]
    assert [job.req_id for job in rig.build(scheduled).stores] == ["4"]


def test_what_is_stored_already_does_not_travel() -> None:
    rig = Rig()
    rig.warm(40)
    rig.daemon.blocks.pop(next(iter(rig.daemon.blocks)))  # a hole at the front
    request = rig.request(48)
    assert rig.ask(request) == (0, False)
    rig.allocated(request, 0)
    (job,) = rig.build({"r": 48}).stores
    assert job.moves[0].blocks == [0, 5]
    assert job.moves[0].engine_blocks == [*rig.tables["r"][0][:2], *rig.tables["r"][0][10:12]]


def test_no_room_in_the_daemon_is_counted_and_not_asked_again() -> None:
    rig = Rig()
    rig.daemon.no_room = True
    request = rig.request(40)
    assert rig.compute(request, 39).stores == []
    assert rig.build({"r": 0}).stores == []
    assert rig.side.stats.counter("stores_skipped", "no_ticket") == 1
    assert rig.daemon.calls == ["lookup", "reserve"]
    rig.check_idle()


def test_stores_hold_a_bounded_part_of_the_pool() -> None:
    rig = Rig(pool_blocks=40, store_blocks_max=0.25)
    request = rig.request(64)
    (first,) = rig.compute(request, 64).stores
    assert first.moves[0].blocks == [0, 1, 2, 3, 4]  # 10 of 40 engine blocks
    assert rig.build({"r": 1}).stores == []
    assert rig.side.stats.counter("stores_skipped", "blocks_limit") == 1
    rig.store(KvtierMetadata(stores=[first]))
    rig.clock.sleep(stores.RETRY_S)
    (second,) = rig.build({"r": 1}).stores
    assert second.moves[0].blocks == [5, 6, 7]


def test_a_store_that_failed_is_offered_again_a_few_times() -> None:
    rig = Rig()
    request = rig.request(40)
    (job,) = rig.compute(request, 40).stores
    for _ in range(stores.FAILURES_MAX):
        rig.report(job.job_id, ok=False)
        assert rig.build({"r": 1}).stores == []
        rig.clock.sleep(stores.RETRY_S)
        (job,) = rig.build({"r": 1}).stores
    rig.report(job.job_id, ok=False)
    rig.clock.sleep(100.0)
    assert rig.build({"r": 1}).stores == []
    rig.check_idle()


def test_without_a_pool_stores_are_over_before_their_step_is() -> None:
    rig = Rig(lends_pool=False)
    request = rig.request(40)
    (job,) = rig.compute(request, 40).stores
    assert job.is_fenced
    assert rig.refs(request) == {1}
    rig.report(job.job_id)
    rig.check_idle()


def test_without_block_tables_nothing_is_stored() -> None:
    rig = Rig()
    request = rig.request(40)
    rig.ask(request)
    rig.allocated(request, 0)
    meta = rig.side.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"r": 40}))
    assert meta.stores == []


def test_windows_are_stored_near_the_end_of_the_prompt() -> None:
    rig = Rig([WINDOW, FULL])
    request = rig.request(80)
    (job,) = rig.compute(request, 80).stores
    by_component = {move.component: move.blocks for move in job.moves}
    # W = 9: of boundary 80 blocks 8 and 9, of boundary 72 (the prompt again) blocks 7 and 8.
    assert by_component == {0: [7, 8, 9], 1: list(range(10))}
    everywhere = Rig([WINDOW, FULL], window_store="all")
    (job,) = everywhere.compute(everywhere.request(80), 80).stores
    assert job.moves[0].blocks == list(range(10))


def test_a_window_is_stored_where_prompts_part() -> None:
    """The first request stores windows at its end only. The second shares 48 tokens with it and
    finds no window there; it stores one, and the third gets those 48 tokens."""
    rig = Rig([WINDOW, FULL])
    rig.warm(80)
    parting = [*range(48), *range(1000, 1032)]
    second = rig.request(parting, "second")
    assert rig.ask(second) == (0, False)
    rig.allocated(second, 0)
    rig.store(rig.build({"second": 80}))
    third = rig.request([*range(48), *range(2000, 2032)], "third")
    assert rig.ask(third) == (48, True)


def test_windows_of_generated_text_with_all() -> None:
    rig = Rig([WINDOW, FULL], store="all")
    request = rig.request(24)
    rig.store(rig.compute(request, 24))
    request.all_token_ids += range(16)
    del rig.tables["r"]
    rig.table(request)
    rig.store(rig.compute(request, 16))
    turn = rig.request([*request.all_token_ids, 1, 2, 3], "turn")
    assert rig.ask(turn) == (40, True)


def test_states_that_vllm_offers_are_stored() -> None:
    rig = Rig([STATE, (Kind.FULL, 0, 1, 8)])
    request = rig.request(20)
    meta = rig.compute(request, 16, states={"r": [(0, 77, 16)], "unknown": [(0, 1, 8)]})
    by_component = {move.component: move for move in meta.stores[0].moves}
    assert by_component[0].blocks == [1]
    assert by_component[0].engine_blocks == [77]
    assert rig.pool.blocks[77].ref_cnt == 1
    rig.store(meta)
    assert rig.ask(rig.request(20, "s")) == (16, True)


def test_nothing_computed_from_a_load_of_the_same_step_is_stored() -> None:
    """A load within the step may fail after the store was ordered: the request's own store waits,
    and that of a request that shares the blocks being loaded."""
    rig = Rig(load="sync")
    rig.warm(40)
    one, two = rig.request(64, "one"), rig.request(64, "two")
    two.all_token_ids[63] = 9999
    tokens = rig.offered(one)
    rig.allocated(one, tokens)
    one.num_computed_tokens = tokens
    rig.tables["two"] = [[*rig.tables["one"][0][:10], *rig.table(rig.request(24, "x"))[0]]]
    rig.ask(two, 40)
    rig.allocated(two, 0)
    two.num_computed_tokens = 40
    meta = rig.build({"one": 24, "two": 24})
    assert (len(meta.loads), meta.stores) == (1, [])
    rig.report(meta.loads[0].job_id)
    one.num_computed_tokens = two.num_computed_tokens = 63
    meta = rig.build({"one": 1, "two": 1})
    assert {job.req_id for job in meta.stores} == {"one", "two"}


def test_an_error_while_storing_gives_the_ticket_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(plan, "missing", broken)
    assert rig.compute(rig.request(), 40).stores == []
    assert rig.side.stats.counter("stores_skipped", "error") == 1
    rig.check_idle()
