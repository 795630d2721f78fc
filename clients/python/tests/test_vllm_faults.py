"""The scheduler half call by call: daemons that are late, away or other ones, and resets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvtier.vllm import stores
from kvtier.vllm.meta import KvtierMetadata
from vllm_rig import Rig

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
    assert time.monotonic() - began < 5.0
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
