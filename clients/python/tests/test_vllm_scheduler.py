"""The scheduler half call by call: lookups and loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import vllm_fakes as fakes
from kvtier.types import NO_BLOCK, Kind, MoveResult
from kvtier.vllm import _compat
from kvtier.vllm.scheduler import MISS_LIVES_S
from vllm_rig import FULL, WINDOW, Rig

# ---- lookups -------------------------------------------------------------------------------------


def test_a_prompt_that_is_there_whole_is_offered_without_its_last_token() -> None:
    rig = Rig()
    rig.warm(40)
    assert rig.ask(rig.request(40)) == (32, True)  # 5 blocks, of which 4
    assert rig.ask(rig.request(41, "s")) == (40, True)
    assert rig.ask(rig.request(33, "t")) == (32, True)


def test_an_answer_that_is_shorter_for_the_lease_is_told_apart() -> None:
    """Less is promised, and counted as what it is: no miss, no failure."""
    rig = Rig()
    rig.warm(40)
    rig.daemon.lease_blocks_max = 3
    assert rig.ask(rig.request(41)) == (24, True)
    rig.daemon.lease_blocks_max = 0
    assert rig.ask(rig.request(41, "s")) == (0, False)
    rig.daemon.lease_blocks_max = 5
    assert rig.ask(rig.request(41, "t")) == (40, True)
    assert rig.side.stats.counter("lookups", "limited") == 2
    assert rig.side.stats.counter("lookups", "hit") == 1
    assert rig.side.stats.counter("hit_tokens") == 24 + 40
    assert rig.side.stats.reduce()["Lookups failed"] == 0


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


def test_other_salts_adapters_and_images_do_not_meet(tmp_path: Any) -> None:
    rig = Rig()
    rig.warm(40, cache_salt="a")
    lora = fakes.LoraRequest("a", str(tmp_path))
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


def test_an_adapter_that_cannot_be_read_is_not_cached(tmp_path: Any, caplog: Any) -> None:
    adapter = tmp_path / "adapter"  # still to be downloaded
    rig = Rig()
    for req_id in ("one", "two"):
        lora = fakes.LoraRequest("a", str(adapter))
        assert rig.ask(rig.request(req_id=req_id, lora_request=lora)) == (0, False)
    assert rig.daemon.calls == []
    assert caplog.text.count("is not cached") == 1
    adapter.mkdir()
    lora = fakes.LoraRequest("a", str(adapter))
    rig.ask(rig.request(req_id="three", lora_request=lora))
    assert rig.daemon.calls == ["lookup"]


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
