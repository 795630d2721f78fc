"""The scheduler half call by call: lookups, loads, ends of requests, resets, sick daemons."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_fakes as fakes
from kvtier.errors import ResourceExhausted
from kvtier.types import NO_BLOCK, Kind, MoveResult
from kvtier.vllm import _compat, stores
from kvtier.vllm.meta import KvtierMetadata
from kvtier.vllm.scheduler import MISS_LIVES_S
from vllm_rig import FULL, WINDOW, Rig

# ---- lookups -------------------------------------------------------------------------------------


def test_a_prompt_that_is_there_whole_is_offered_without_its_last_token() -> None:
    rig = Rig()
    rig.warm(40)
    assert rig.ask(rig.request(40)) == (32, True)  # 5 blocks, of which 4
    assert rig.ask(rig.request(41, "s")) == (40, True)
    assert rig.ask(rig.request(33, "t")) == (32, True)


def test_repeated_questions_are_one_lookup() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    for _ in range(10):
        assert rig.ask(request) == (32, True)
        rig.clock.sleep(1.0)
    assert rig.daemon.calls == ["lookup"]
    assert len(rig.daemon.leases) == 1


def test_the_local_hit_changes_between_two_questions() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    assert rig.ask(request, 0) == (32, True)
    assert rig.ask(request, 16) == (16, True)
    assert rig.ask(request, 4) == (28, True)
    assert rig.daemon.calls == ["lookup"]
    assert rig.ask(request, 32) == (0, False)
    assert rig.daemon.leases == {}  # nothing to load: not kept
    assert rig.ask(request, 0) == (32, True)
    assert rig.daemon.calls == ["lookup", "lookup"]


def test_an_old_lease_is_not_promised_on() -> None:
    rig = Rig(lease_s=10.0)
    rig.warm()
    request = rig.request()
    rig.ask(request)
    (old,) = rig.daemon.leases
    rig.clock.sleep(5.1)
    assert rig.ask(request) == (32, True)
    assert list(rig.daemon.leases) != [old]
    assert len(rig.daemon.leases) == 1


def test_a_miss_is_not_asked_again_at_once() -> None:
    rig = Rig()
    request = rig.request()
    for _ in range(5):
        assert rig.ask(request) == (0, False)
    assert rig.daemon.calls == ["lookup"]
    rig.clock.sleep(MISS_LIVES_S)
    rig.ask(request)
    assert rig.daemon.calls == ["lookup", "lookup"]


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": 8},
        {"tokens": 1},
        {"skip_reading_prefix_cache": True},
        {"pooling_params": object()},
    ],
)
def test_questions_that_need_no_lookup(more: dict[str, Any]) -> None:
    rig = Rig()
    rig.warm()
    request = rig.request(more.pop("tokens", 40), **more)
    assert rig.ask(request) == (0, False)
    assert rig.daemon.calls == []


def test_what_the_request_has_itself_needs_no_lookup() -> None:
    rig = Rig()
    rig.warm()
    assert rig.ask(rig.request(40), 32) == (0, False)
    assert rig.daemon.calls == []


def test_other_salts_adapters_and_images_do_not_meet() -> None:
    rig = Rig()
    rig.warm(40, cache_salt="a")
    lora = fakes.LoraRequest("a", "hub/a")
    others: list[dict[str, Any]] = [
        {},
        {"cache_salt": "b"},
        {"lora_request": lora},
        {"cache_salt": "a", "lora_request": lora},
        {"cache_salt": "a", "mm_features": [fakes.Item("x", 0, 4)]},
    ]
    for number, more in enumerate(others):
        assert rig.ask(rig.request(req_id=str(number), **more)) == (0, False)
    assert rig.ask(rig.request(req_id="same", cache_salt="a")) == (32, True)


def test_with_draft_layers_the_block_after_the_boundary_must_be_known_too() -> None:
    """Draft layers compute a token's cache from the token after it."""
    rig = Rig(has_drafts=True)
    rig.warm(40)
    assert rig.ask(rig.request(40, "same")) == (32, True)  # block 4 is known to be the same
    assert rig.ask(rig.request(48, "longer")) == (32, True)  # block 5 is not
    assert rig.ask(rig.request([*range(32), *[77] * 8], "other")) == (24, True)
    assert rig.ask(rig.request([*range(8), *[77] * 8], "short")) == (0, False)
    assert len(rig.daemon.leases) == 3


def test_an_answer_that_cannot_be_is_a_miss() -> None:
    rig = Rig()
    rig.warm()
    honest = rig.session.lookup

    def lookup(*args: Any, **more: Any) -> Any:
        result = honest(*args, **more)
        object.__setattr__(result, "boundary_tokens", 36)
        return result

    rig.session.lookup = lookup  # type: ignore[method-assign]
    assert rig.ask(rig.request()) == (0, False)
    rig.check_idle()


def test_a_negative_token_is_a_miss_and_no_exception() -> None:
    rig = Rig()
    assert rig.ask(rig.request([-1] * 40)) == (0, False)
    assert rig.side.stats.counter("lookups", "error") == 1


def test_an_adapter_that_cannot_be_read_is_not_cached(tmp_path: Any) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "gone").symlink_to(tmp_path / "nothing")
    rig = Rig()
    request = rig.request(lora_request=fakes.LoraRequest("a", str(adapter)))
    assert rig.ask(request) == (0, False)


# ---- a daemon that is late, away, or another one -------------------------------------------------


def test_a_late_daemon_is_asked_thrice_and_then_now_and_again() -> None:
    rig = Rig()
    rig.warm()
    rig.daemon.is_late = True
    for number in range(20):
        assert rig.ask(rig.request(req_id=str(number))) == (0, False)
    assert rig.daemon.calls == ["lookup"] * 3
    rig.clock.sleep(0.5)
    for number in range(20):
        rig.ask(rig.request(req_id=f"again{number}"))
    assert rig.daemon.calls == ["lookup"] * 4  # one probe
    rig.daemon.is_late = False
    rig.clock.sleep(1.0)
    assert rig.ask(rig.request(req_id="well")) == (32, True)
    assert rig.ask(rig.request(req_id="well2")) == (32, True)
    counted = {o: rig.side.stats.counter("lookups", o) for o in ("timeout", "breaker_open", "hit")}
    assert counted == {"timeout": 4, "breaker_open": 36, "hit": 2}


def test_slow_answers_cost_a_step_two_deadlines_at_most() -> None:
    """Each lookup is in time, and there are many: the others are asked about in later steps."""
    rig = Rig(lookup_timeout_ms=20.0)
    rig.warm()
    rig.daemon.on_call = lambda: rig.clock.sleep(0.015)
    requests = [rig.request(req_id=str(number)) for number in range(7)]
    answers = [rig.ask(request) for request in requests]
    assert answers == [(32, True)] * 3 + [(None, False)] * 4
    rig.build()
    answers = [rig.ask(request) for request in requests]
    assert answers == [(32, True)] * 6 + [(None, False)]
    rig.build()
    assert rig.ask(requests[6]) == (32, True)


def test_a_daemon_that_is_away_is_not_called() -> None:
    rig = Rig()
    rig.daemon.is_up = False
    began = time.monotonic()
    request = rig.request()
    assert rig.ask(request) == (0, False)
    assert rig.compute(request, 40).stores == []
    assert rig.daemon.calls == []
    assert time.monotonic() - began < 1.0
    assert rig.side.stats.counter("stores_skipped", "not_attached") == 1
    rig.daemon.is_up = True
    rig.clock.sleep(stores.RETRY_S)
    (job,) = rig.build({"r": 1}).stores
    assert job.moves[0].blocks == [0, 1, 2, 3, 4]  # what could not be stored then is now


def test_a_lookup_has_the_deadline_of_the_options() -> None:
    rig = Rig(lookup_timeout_ms=7.0)
    seen = []
    honest = rig.session.lookup

    def lookup(*args: Any, **more: Any) -> Any:
        seen.append(more["timeout_s"])
        return honest(*args, **more)

    rig.session.lookup = lookup  # type: ignore[method-assign]
    rig.ask(rig.request())
    assert seen == [pytest.approx(0.007)]


def test_restart_between_two_questions() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.daemon.restart()
    rig.session.reattach()
    assert rig.ask(request) == (0, False)
    rig.check_idle()


def test_no_promise_of_a_daemon_that_is_gone() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.daemon.is_up = False
    assert rig.ask(request) == (0, False)


def test_restart_between_the_promise_and_the_blocks() -> None:
    """The load goes to the worker and fails there; it is not lost."""
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.daemon.restart()
    rig.session.reattach()
    rig.allocated(request, 32)
    (job,) = rig.build().loads
    rig.report(job.job_id, ok=False, failed={"r"})
    assert rig.ask(request) == (0, False)
    rig.check_idle()


def test_restart_during_a_prefill_stores_its_beginning_anew() -> None:
    rig = Rig()
    request = rig.request(40)
    rig.store(rig.compute(request, 16))
    rig.daemon.restart()
    rig.session.reattach()
    meta = rig.compute(request, 16)
    assert meta.stores[0].moves[0].blocks == [0, 1, 2, 3]
    rig.store(meta)
    assert rig.ask(rig.request(40, "s")) == (32, True)


def test_restart_during_a_store() -> None:
    rig = Rig()
    request = rig.request(40)
    (job,) = rig.compute(request, 40).stores
    rig.daemon.restart()
    rig.session.reattach()
    assert rig.refs(request) == {2}
    rig.report(job.job_id, ok=False)
    assert rig.refs(request) == {1}
    rig.clock.sleep(stores.RETRY_S)
    (again,) = rig.build({"r": 1}).stores
    assert again.moves[0].blocks == [0, 1, 2, 3, 4]


def test_a_cursor_that_the_daemon_forgot_costs_one_call_more() -> None:
    rig = Rig()
    request = rig.request(64)
    rig.store(rig.compute(request, 32))
    rig.session.cursors.clear()
    rig.session.sent_tokens.clear()
    rig.store(rig.compute(request, 16))
    rig.store(rig.compute(request, 16))
    assert rig.session.sent_tokens == [16, 48, 16]


# ---- loads ---------------------------------------------------------------------------------------


def test_a_load_keeps_its_lease_until_every_rank_reported() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    tokens = rig.offered(request)
    rig.allocated(request, tokens)
    (job,) = rig.build().loads
    assert (job.req_id, job.is_sync) == ("r", False)
    assert job.lease in rig.daemon.leases
    assert job.moves[0].blocks == [0, 1, 2, 3]
    assert job.moves[0].engine_blocks == rig.tables["r"][0][:8]
    assert rig.side.has_pending_push_work()
    rig.report(job.job_id, ranks=1)
    assert job.lease in rig.daemon.leases
    rig.report(job.job_id, ranks=1)
    rig.check_idle()
    assert rig.build().is_empty()


def test_the_second_call_after_a_load_changes_nothing() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.allocated(request, rig.offered(request))
    (job,) = rig.build().loads
    rig.allocated(request, 0)
    assert job.lease in rig.daemon.leases
    rig.report(job.job_id)
    rig.allocated(request, 0)
    rig.check_idle()


def test_a_question_during_a_load_is_answered_with_nothing() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.allocated(request, rig.offered(request))
    assert rig.ask(request) == (0, False)
    assert len(rig.daemon.leases) == 1


def test_a_load_that_vllm_does_not_want_is_given_back() -> None:
    """MultiConnector chose another one, or a local hit within a block was longer."""
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.allocated(request, 0)
    rig.check_idle()
    assert rig.build().loads == []


def test_what_is_shared_with_others_is_not_written() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    assert rig.ask(request, 12) == (20, True)
    rig.allocated(request, 20)
    (job,) = rig.build().loads
    own = rig.tables["r"][0]
    assert job.moves[0].blocks == [1, 2, 3]
    assert job.moves[0].engine_blocks == [NO_BLOCK, *own[3:8]]


def test_fewer_tokens_than_promised() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.allocated(request, 20)
    (job,) = rig.build().loads
    assert job.lease
    assert job.moves[0].engine_blocks == [*rig.tables["r"][0][:5], NO_BLOCK]


@pytest.mark.parametrize("tokens", [20, 24, 40])
def test_a_load_that_cannot_be_right_fails_and_is_not_begun(tokens: int) -> None:
    """A window is there at the promised boundary and at no other; more was never promised."""
    rig = Rig([WINDOW, FULL])
    rig.warm()
    request = rig.request()
    assert rig.ask(request) == (32, True)
    rig.allocated(request, tokens)
    (job,) = rig.build().loads
    assert job.lease == b""
    assert rig.daemon.leases == {}
    rig.report(job.job_id, ok=False, failed={"r"})
    assert rig.ask(request) == (0, False)
    rig.check_idle()


def test_null_blocks_where_bytes_are_needed_fail_the_load() -> None:
    rig = Rig([WINDOW, FULL])
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.allocated(request, 32, null=7)  # the window needs engine blocks 5, 6 and 7
    (job,) = rig.build().loads
    assert job.lease == b""
    rig.report(job.job_id, ok=False)
    rig.check_idle()


def test_a_promise_that_nobody_made_fails() -> None:
    rig = Rig()
    request = rig.request()
    rig.allocated(request, 16)
    (job,) = rig.build().loads
    assert job.lease == b""


def test_a_request_whose_load_failed_is_never_promised_anything_again() -> None:
    """vLLM asks again at once and counts no tries: the same answer would fail for ever."""
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.allocated(request, rig.offered(request))
    (job,) = rig.build().loads
    rig.report(job.job_id, ok=False, failed={"r"})
    for _ in range(5):
        rig.clock.sleep(100.0)
        assert rig.ask(request) == (0, False)
    rig.check_idle()
    assert rig.ask(rig.request(req_id="other")) == (32, True)


def test_a_failure_that_only_vllm_tells_counts_too() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    rig.side.update_connector_output(
        SimpleNamespace(failed_recving={"r", "unknown"}, kv_connector_worker_meta=None)
    )
    assert rig.ask(request) == (0, False)
    rig.check_idle()


def test_workers_that_cannot_load_are_left_alone() -> None:
    rig = Rig()
    rig.warm()
    for number in range(3):
        request = rig.request(req_id=str(number))
        rig.allocated(request, rig.offered(request))
        (job,) = rig.build().loads
        rig.report(job.job_id, ok=False)
    assert rig.ask(rig.request(req_id="fourth")) == (0, False)
    rig.clock.sleep(1.0)
    assert rig.ask(rig.request(req_id="probe")) == (32, True)


def test_blocks_that_are_gone_or_damaged_do_not_keep_others_from_loading() -> None:
    rig = Rig()
    rig.warm()
    for number in range(9):
        request = rig.request(req_id=str(number))
        rig.allocated(request, rig.offered(request))
        (job,) = rig.build().loads
        rig.report(job.job_id, ok=False, results=(MoveResult.DONE, MoveResult.MISS))
    assert rig.ask(rig.request(req_id="last")) == (32, True)


def test_a_load_with_nothing_to_move_is_still_a_job() -> None:
    """All that the boundary needs is there: vLLM waits for the report nevertheless."""
    rig = Rig([(Kind.SLIDING_WINDOW, 4, 1, 4)])
    rig.warm()
    request = rig.request()
    rig.ask(request, 28)
    rig.tables["r"] = [[0] * 8 + [5, 6]]
    rig.allocated(request, 4)
    (job,) = rig.build().loads
    rig.report(job.job_id, ok=bool(job.lease))
    rig.check_idle()


def test_sync_is_for_one_group_only() -> None:
    """A load within the step can only fail by block ids, and those end an engine with more groups
    than one."""
    rig = Rig(load="sync")
    rig.warm()
    request = rig.request()
    assert rig.ask(request) == (32, False)
    rig.allocated(request, 32)
    assert rig.build({"r": 8}).loads[0].is_sync
    rig = Rig([WINDOW, FULL], load="sync")
    rig.warm()
    request = rig.request()
    assert rig.ask(request) == (32, True)
    rig.allocated(request, 32)
    assert not rig.build().loads[0].is_sync


def test_without_a_way_to_tell_failed_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older vLLM knows failed block ids only, and those of one cache group."""
    monkeypatch.setattr(_compat, "HAS_FAILED_RECVING", False)
    rig = Rig()
    rig.warm()
    assert rig.ask(rig.request()) == (32, False)
    rig = Rig([WINDOW, FULL])
    rig.warm()
    assert rig.ask(rig.request()) == (0, False)
    assert rig.daemon.calls == []


def test_without_a_way_to_tell_that_jobs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job would never end, and its request or its blocks be held for ever."""
    other = Rig()
    other.warm()
    monkeypatch.setattr(_compat, "HAS_WORKER_METADATA", False)
    rig = Rig(daemon=other.daemon)
    request = rig.request()
    assert rig.ask(request) == (0, False)
    assert rig.compute(request, 40).is_empty()
    rig.check_idle()


def test_a_sync_load_that_is_given_up_names_its_blocks() -> None:
    rig = Rig(load="sync")
    rig.warm()
    request = rig.request()
    rig.ask(request, 8)
    rig.table(request)[0][5] = 0
    rig.allocated(request, 24)
    (job,) = rig.build({"r": 8}).loads
    own = rig.tables["r"][0]
    assert job.lease == b""
    assert job.moves[0].engine_blocks == [b for b in own[2:] if b]


# ---- ends ----------------------------------------------------------------------------------------


def test_never_scheduled() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.ask(request)
    assert rig.side.request_finished(request) == (False, None)
    rig.check_idle()
    assert rig.build().is_empty()


def test_aborted_before_the_first_question() -> None:
    rig = Rig()
    assert rig.side.request_finished(rig.request()) == (False, None)


def test_aborted_during_a_load() -> None:
    """The workers are told; the lease stays until they report; their report is the last."""
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.allocated(request, rig.offered(request))
    (job,) = rig.build().loads
    assert rig.side.request_finished(request) == (False, None)
    meta = rig.build()
    assert meta.cancels == [job.job_id]
    assert job.lease in rig.daemon.leases
    assert rig.build().is_empty()
    rig.report(job.job_id, ok=False)
    rig.check_idle()
    assert not rig.side._loads_breaker.is_open


def test_a_new_request_of_the_same_name() -> None:
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.allocated(request, rig.offered(request))
    (old,) = rig.build().loads
    rig.side.request_finished(request)
    again = rig.request()
    assert rig.ask(again) == (32, True)
    rig.report(old.job_id, ok=False)
    assert rig.ask(again) == (32, True)
    rig.side.request_finished(again)
    rig.check_idle()


def test_finished_during_a_store() -> None:
    rig = Rig()
    request = rig.request(40)
    (job,) = rig.compute(request, 40).stores
    assert rig.side.request_finished(request) == (False, None)
    assert rig.refs(request) == {2}
    assert rig.side.has_pending_push_work()
    rig.report(job.job_id, ranks=1)
    assert rig.refs(request) == {2}
    rig.report(job.job_id, ranks=1)
    assert rig.refs(request) == {1}
    rig.check_idle()


def test_preempted_during_a_store() -> None:
    rig = Rig()
    request = rig.request(40)
    (job,) = rig.compute(request, 40).stores
    blocks = [rig.pool.blocks[b] for b in rig.tables["r"][0]]
    rig.pool.free_blocks(blocks)
    request.num_computed_tokens = 0
    rig.build(preempted={"r"})
    free = {block.block_id for block in rig.pool.free}
    assert free.isdisjoint(job.moves[0].engine_blocks)
    rig.report(job.job_id)
    assert {b.block_id for b in rig.pool.free} >= set(job.moves[0].engine_blocks)


def test_preempted_requests_are_offered_from_their_beginning() -> None:
    """Stored before, dropped by the daemon since, computed again."""
    rig = Rig()
    request = rig.request(40)
    rig.store(rig.compute(request, 40))
    rig.daemon.blocks.clear()
    del rig.tables["r"]
    request.num_computed_tokens = 0
    rig.build(preempted={"r"})
    rig.clock.sleep(10.0)
    assert rig.compute(request, 40).stores[0].moves[0].blocks == [0, 1, 2, 3, 4]


def test_preempted_and_resumed_within_one_step() -> None:
    """A reset of vLLM's cache preempts between two steps, and the next one begins the request
    anew: its load must not be forgotten for the preemption that came before."""
    rig = Rig()
    rig.warm()
    request = rig.request()
    rig.compute(request, 8)
    request.num_computed_tokens = 0
    rig.allocated(request, rig.offered(request))
    meta = rig.build(preempted={"r"})
    assert len(meta.loads) == 1
    rig.report(meta.loads[0].job_id)


def test_a_report_of_an_unknown_job_is_ignored(caplog: Any) -> None:
    rig = Rig()
    rig.report(99)
    assert "job 99" in caplog.text
    rig.side.update_connector_output(SimpleNamespace())


def test_what_the_daemon_refuses_is_said_now_and_then(caplog: Any, monkeypatch: Any) -> None:
    rig = Rig()

    def refuse(*_: Any, **__: Any) -> None:
        raise ResourceExhausted("no lease for you")

    monkeypatch.setattr(rig.session, "lookup", refuse)
    for number in range(50):
        assert rig.ask(rig.request(req_id=f"r{number}")) == (0, False)
    assert caplog.text.count("lookup: no lease for you") == 1
    rig.clock.sleep(10.0)
    rig.ask(rig.request(req_id="later"))
    assert caplog.text.count("lookup: no lease for you") == 2
    assert "(49 more since the last such line)" in caplog.text


def test_shutdown_gives_everything_back() -> None:
    rig = Rig()
    rig.warm()
    held, loading = rig.request(req_id="held"), rig.request(req_id="loading")
    rig.ask(held)
    rig.allocated(loading, rig.offered(loading))
    rig.build()
    rig.compute(rig.request(80, "storing"), 80)
    rig.side.shutdown()
    assert rig.daemon.leases == {}
    assert rig.daemon.tickets == {}
    assert rig.session.is_closed
    assert rig.client.is_closed


# ---- reset ---------------------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_used() -> None:
    rig = Rig()
    rig.warm(40)
    waiting = rig.request(req_id="waiting")
    rig.ask(waiting)
    assert rig.side.reset_cache() is True
    assert rig.daemon.leases == {}
    assert rig.ask(waiting) == (0, False)
    fresh = rig.request(req_id="fresh")
    rig.store(rig.compute(fresh, 40))
    assert rig.ask(rig.request(req_id="warm again")) == (32, True)
    assert rig.ask(rig.request(req_id="another tenant", cache_salt="s")) == (0, False)
    rig.side.reset_cache()
    assert rig.ask(rig.request(req_id="newer weights")) == (0, False)


def test_a_reset_needs_no_namespace() -> None:
    """The daemon has 64 of them, and new weights may come after each step of a training."""
    rig = Rig()
    for _ in range(100):
        rig.side.reset_cache()
        assert rig.ask(rig.request()) == (0, False)
        rig.build()
    assert len(rig.client.sessions) == 1


def test_what_was_computed_before_a_reset_is_not_stored_after_it() -> None:
    rig = Rig()
    request = rig.request(40)
    rig.compute(request, 16)
    rig.side.reset_cache()
    assert rig.compute(request, 24).stores == []
    del rig.tables["r"]  # preempted, and begun anew
    request.num_computed_tokens = 0
    rig.build(preempted={"r"})
    assert rig.compute(request, 40).stores[0].moves[0].blocks == [0, 1, 2, 3, 4]


def test_a_store_that_a_reset_meets_is_not_found_after_it() -> None:
    rig = Rig()
    (job,) = rig.compute(rig.request(40), 40).stores
    rig.side.reset_cache()
    rig.store(KvtierMetadata(stores=[job]))
    rig.check_idle()
    assert rig.ask(rig.request(40, "same prompt")) == (0, False)


def test_a_reset_needs_no_daemon() -> None:
    rig = Rig()
    rig.warm(40)
    rig.daemon.is_up = False
    assert rig.side.reset_cache() is True
    rig.daemon.is_up = True
    assert rig.ask(rig.request()) == (0, False)
