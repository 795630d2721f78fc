"""The scheduler half call by call: how requests and jobs end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.errors import ResourceExhausted
from vllm_rig import Rig


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
