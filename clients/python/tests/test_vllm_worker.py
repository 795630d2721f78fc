"""The worker half: what begins when, and that every job is reported once, never too early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kvtier import (
    NO_BLOCK,
    Component,
    DeadlineExceeded,
    FailedPrecondition,
    Kind,
    KvtierError,
    Layout,
    ModelSpec,
    MoveResult,
    NotAttached,
    Piece,
    ResourceExhausted,
    Role,
    Session,
    Unavailable,
)
from kvtier.vllm.layout import KvLayout, Storage
from kvtier.vllm.link import wait_attached
from kvtier.vllm.memory import SharedKv
from kvtier.vllm.meta import ComponentMoves, KvtierMetadata, LoadJob, StoreJob
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.worker import WorkerSide
from worker_fakes import FakeClient, FakeOp, FakeSession

LAYOUT = KvLayout(
    storages=(Storage(0x1000, 1 << 20),),
    layouts=(Layout(0, 2, (Piece(0, 1024, 0, 1024), Piece(0, 1024, 1 << 19, 1024))),),
)
MOVES = [ComponentMoves(0, [4, 5], [1, 2, 3, 4])]
DONE = [bytes(2)]
HALF = [bytes([MoveResult.DONE, MoveResult.MISS])]


SPEC = ModelSpec(block_tokens=64, ranks=2, components=(Component(Kind.FULL, 4096),), model="m")


def load(job_id: int, req_id: str = "r", *, is_sync: bool = False, **kw: Any) -> LoadJob:
    return LoadJob(job_id, req_id, b"lease", MOVES, kw.get("timeout_s", 1.0), is_sync)


def store(job_id: int, req_id: str = "r", *, is_fenced: bool = False) -> StoreJob:
    return StoreJob(job_id, req_id, b"ticket", MOVES, 1.0, is_fenced)


def worker_with(client: FakeClient) -> WorkerSide:
    return WorkerSide(SPEC, rank=0, engine_id=b"e" * 16, client=client, stats=KvtierStats())


def quiesce(ops: Sequence[FakeOp]) -> None:
    for op in ops:
        op.quiesce()


class Rig:
    """A worker that is registered, and one step of the engine at a time."""

    def __init__(self, is_daemon_there: bool = True) -> None:
        self.client = FakeClient()
        self.client.is_there = is_daemon_there
        self.stats = KvtierStats()
        self.worker = WorkerSide(
            SPEC,
            rank=1,
            engine_id=b"e" * 16,
            client=self.client,
            stats=self.stats,
        )
        self.worker.register(LAYOUT, lambda layout, is_refused: SharedKv((), layout.layouts))

    @property
    def session(self) -> FakeSession:
        return self.client.sessions[-1]

    def step(self, **meta: Any) -> tuple[set[str], set[str], dict[int, bool]]:
        """What one step reports: finished and failed loads for vLLM, jobs for the scheduler."""
        orders = KvtierMetadata(**meta)
        self.worker.begin(orders)
        self.worker.begin_stores(orders)
        results = self.worker.poll()
        report = self.worker.take_report()
        jobs = report.finished if report else {}
        assert all(job.ranks == 1 for job in jobs.values())
        return results.finished, results.failed, {i: job.is_ok for i, job in jobs.items()}


NOTHING: tuple[set[str], set[str], dict[int, bool]] = (set(), set(), {})


def test_attaches_with_rank_and_layout() -> None:
    args = Rig().session.attach_args
    assert args["role"] is Role.WORKER
    assert args["rank"] == 1
    assert args["engine_id"] == b"e" * 16
    assert args["layouts"] == LAYOUT.layouts


def test_tensors_that_are_not_what_was_declared_are_refused() -> None:
    wrong = KvLayout(LAYOUT.storages, (Layout(0, 2, LAYOUT.layouts[0].pieces[:1]),))
    rig = Rig()
    with pytest.raises(ValueError, match="2048 bytes a block, the engine's"):
        rig.worker.register(wrong, lambda layout, is_refused: SharedKv((), layout.layouts))


def test_start_waits_a_moment_for_a_daemon_that_is_there() -> None:
    """Attaching takes a thread some milliseconds; a prompt that came before it would be lost."""
    session = FakeSession()
    session.attached, session.last_error = False, NotAttached("not attached yet")

    def attach() -> None:
        session.attached = True

    later(0.05, attach)
    wait_attached(cast(Session, session), 60.0)
    assert session.attached
    session.attached, session.last_error = False, Unavailable("no daemon")
    wait_attached(cast(Session, session), 60.0)
    session.last_error = NotAttached("a daemon that does not answer")
    wait_attached(cast(Session, session), 0.02)


def test_async_load_is_reported_once_when_it_is_finished() -> None:
    rig = Rig()
    assert rig.step(loads=[load(7, "a")]) == NOTHING
    name, (moves,), handle, timeout_s = rig.session.calls[0]
    assert (name, handle, timeout_s) == ("promote", b"lease", 1.0)
    assert (list(moves.blocks), [int(b) for b in moves.engine_blocks]) == ([4, 5], [1, 2, 3, 4])
    assert rig.step() == NOTHING
    rig.session.ops[0].finish(DONE, 8192)
    assert rig.step() == ({"a"}, set(), {7: True})
    assert rig.step() == NOTHING
    assert rig.stats.counter("transfer_bytes", "load") == 8192


def test_failed_load_is_failed_and_finished_in_the_same_poll() -> None:
    """vLLM never releases a request that is in one of the two sets only."""
    rig = Rig()
    rig.step(loads=[load(1, "a"), load(2, "b")])
    rig.session.ops[0].finish(HALF, 4096)
    rig.session.ops[1].finish(DONE, 8192)
    assert rig.step() == ({"a", "b"}, {"a"}, {1: False, 2: True})
    assert rig.worker.take_bad_blocks() == set()  # block ids with several groups end the engine


def test_deadline_alone_does_not_end_a_load() -> None:
    """Until it is quiesced the daemon may still write to the request's blocks."""
    rig = Rig()
    rig.step(loads=[load(1, "a")])
    rig.session.ops[0].answer([], 0, DeadlineExceeded("after 1 s"))
    assert rig.step() == NOTHING
    rig.session.ops[0].quiesce()
    assert rig.step() == ({"a"}, {"a"}, {1: False})


def test_cancelled_load_is_reported_when_quiesced() -> None:
    rig = Rig()
    rig.step(loads=[load(1, "a")])
    assert rig.step(cancels=[1, 99]) == NOTHING
    assert rig.session.ops[0].is_cancelled
    rig.session.ops[0].finish([bytes([MoveResult.ABORTED] * 2)])
    assert rig.step() == ({"a"}, {"a"}, {1: False})
    assert rig.step(cancels=[1]) == NOTHING


@pytest.mark.parametrize("error", [None, Unavailable("the daemon went")])
def test_load_without_a_session_fails_in_the_same_step(error: Unavailable | None) -> None:
    rig = Rig(is_daemon_there=False)
    rig.session.last_error = error
    assert rig.step(loads=[load(1, "a")], stores=[store(2)]) == ({"a"}, {"a"}, {1: False, 2: False})
    assert rig.session.calls == []


def test_call_that_raises_is_a_failed_job() -> None:
    rig = Rig()
    rig.session.raises = Unavailable("the daemon went")
    assert rig.step(loads=[load(1, "a")], stores=[store(2)]) == ({"a"}, {"a"}, {1: False, 2: False})


def test_fault_of_ours_is_a_failed_job(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    wrong = [ComponentMoves(0, [4], [-1, 2])]  # no engine block has such a number
    job = LoadJob(1, "a", b"lease", wrong, 1.0, is_sync=False)
    assert rig.step(loads=[job]) == ({"a"}, {"a"}, {1: False})
    assert "OverflowError" in caplog.text


def test_worker_goes_on_when_the_daemon_is_back() -> None:
    rig = Rig(is_daemon_there=False)
    rig.step(loads=[load(1, "a")])
    rig.session.attached, rig.session.generation = True, 1
    assert rig.step(loads=[load(2, "a")]) == NOTHING
    rig.session.ops[0].finish(DONE)
    assert rig.step() == ({"a"}, set(), {2: True})
    assert rig.stats.data["gauges"]["attached"]["worker"]["1"] == 1


def test_load_without_lease_or_moves() -> None:
    """The scheduler found that the load cannot be right; or that nothing is missing."""
    rig = Rig()
    wrong = LoadJob(1, "a", b"", [], 1.0, is_sync=False)
    empty = LoadJob(2, "b", b"lease", [], 1.0, is_sync=False)
    assert rig.step(loads=[wrong, empty]) == ({"a", "b"}, {"a"}, {1: False, 2: True})
    assert rig.session.calls == []


def test_stores_begin_after_loads_and_are_never_told_to_vllm() -> None:
    rig = Rig()
    assert rig.step(loads=[load(1, "a")], stores=[store(2, "b")]) == NOTHING
    assert [call[0] for call in rig.session.calls] == ["promote", "demote"]
    rig.session.ops[1].finish([bytes([MoveResult.DONE, MoveResult.PRESENT])], 4096)
    assert rig.step() == (set(), set(), {2: True})


def test_store_that_found_no_room_is_not_ok_and_counts() -> None:
    rig = Rig()
    rig.step(stores=[store(2)])
    rig.session.ops[0].finish([bytes([MoveResult.DONE, MoveResult.NO_ROOM])], 4096)
    rig.worker.poll()
    report = rig.worker.take_report()
    assert report is not None
    assert report.finished[2].results == {MoveResult.DONE: 1, MoveResult.NO_ROOM: 1}
    assert rig.stats.counter("transfers", "store", "failed") == 1


def later(seconds: float, do: Callable[[], None]) -> None:
    threading.Timer(seconds, do).start()


def finishes(rig: Rig, seconds: float, results: Sequence[bytes], moved_bytes: int = 0) -> None:
    """Operations that begin from now on finish so long after that."""
    rig.session.on_op = lambda op: later(seconds, lambda: op.finish(results, moved_bytes))


def test_sync_load_is_over_before_begin_returns() -> None:
    rig = Rig()
    finishes(rig, 0.05, DONE, 8192)
    rig.worker.begin(KvtierMetadata(loads=[load(1, "a", is_sync=True)]))
    assert rig.session.ops[0].finished()
    assert rig.step() == (set(), set(), {1: True})  # not for vLLM: the request did not wait
    assert rig.worker.take_bad_blocks() == set()


def test_step_without_a_forward_pass_waits_a_moment_for_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that only waits would spin, and keep the threads that load from running."""
    monkeypatch.setattr("kvtier.vllm.worker.IDLE_WAIT_S", 5.0)
    rig = Rig()
    rig.step(loads=[load(1, "a")])
    assert rig.worker.poll().finished == set()
    later(0.05, lambda: rig.session.ops[0].finish(DONE, 8192))
    assert rig.worker.poll(is_idle=True).finished == {"a"}
    assert rig.worker.poll(is_idle=True).finished == set()  # nothing to wait for


def test_failed_sync_load_names_its_engine_blocks() -> None:
    rig = Rig()
    moves = [ComponentMoves(0, [4, 5], [1, 2, NO_BLOCK, 4])]
    job = LoadJob(1, "a", b"lease", moves, 1.0, is_sync=True)
    finishes(rig, 0.02, HALF, 4096)
    assert rig.step(loads=[job]) == (set(), set(), {1: False})
    assert rig.worker.take_bad_blocks() == {4}
    assert rig.worker.take_bad_blocks() == set()


def test_sync_load_that_was_given_up_names_its_engine_blocks() -> None:
    """The scheduler half gives engine blocks without saying what they were to hold."""
    rig = Rig()
    job = LoadJob(1, "a", b"", [ComponentMoves(0, [], [7, 8])], 1.0, is_sync=True)
    assert rig.step(loads=[job]) == (set(), set(), {1: False})
    assert rig.worker.take_bad_blocks() == {7, 8}


def test_sync_load_waits_for_quiescence_beyond_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The forward pass must not use blocks that a stopped daemon may still write to."""
    monkeypatch.setattr("kvtier.vllm.worker.SYNC_LOG_S", 0.02)
    rig = Rig()

    def answer_late(op: FakeOp) -> None:
        op.answer([], 0, DeadlineExceeded("after 10 ms"))
        later(0.15, op.quiesce)

    rig.session.on_op = answer_late
    job = load(1, "a", is_sync=True, timeout_s=0.01)
    assert rig.step(loads=[job]) == (set(), set(), {1: False})
    assert "waits for the daemon (pid 4711)" in caplog.text


def test_fenced_store_is_over_before_the_step_is() -> None:
    """With a vLLM that does not lend its block pool the next step may overwrite the blocks."""
    rig = Rig()
    finishes(rig, 0.05, DONE, 8192)
    assert rig.step(stores=[store(1, is_fenced=True)]) == (set(), set(), {1: True})


def gpu_worker(client: FakeClient) -> tuple[WorkerSide, list[bool]]:
    """One whose memory is a GPU's; and whether each opening came after a refusal."""

    class OnGpu(SharedKv):
        name = "cuda_ipc"

    opened: list[bool] = []

    def open_memory(layout: KvLayout, is_refused: bool) -> SharedKv:
        opened.append(is_refused)
        return SharedKv((), layout.layouts) if is_refused else OnGpu((), layout.layouts)

    worker = worker_with(client)
    worker.register(LAYOUT, open_memory)
    worker.begin(KvtierMetadata())
    assert opened == [False]
    return worker, opened


def test_memory_that_the_daemon_refuses_is_replaced() -> None:
    """No CUDA in the daemon: the same engine goes on through a staging buffer."""
    client = FakeClient()
    client.is_there = False
    worker, opened = gpu_worker(client)
    client.sessions[0].last_error = FailedPrecondition("built without CUDA")
    worker.begin(KvtierMetadata())
    assert opened == [False, True]
    assert len(client.sessions) == 2
    worker.begin(KvtierMetadata())
    assert len(client.sessions) == 2


def test_memory_that_another_daemon_refuses_is_replaced() -> None:
    """It was started anew, without L1 on that GPU. One refusal between others is none: a daemon
    that is just being replaced may say so in passing, and staging is for good."""
    client = FakeClient()
    worker, opened = gpu_worker(client)
    session = client.sessions[0]
    session.attached = False
    for error in (
        FailedPrecondition("handle of an earlier daemon"),
        Unavailable("the GPU is out of service"),
        FailedPrecondition("no such GPU"),
        FailedPrecondition("no such GPU"),
    ):
        session.last_error = error
        worker.begin(KvtierMetadata())
        worker.begin(KvtierMetadata())  # a step that sees the same attempt once more
    assert opened == [False]
    session.last_error = FailedPrecondition("no such GPU")
    worker.begin(KvtierMetadata())
    assert opened == [False, True]
    assert len(client.sessions) == 2


def of_attach(error: KvtierError) -> KvtierError:
    """As of a daemon that answered what goes before Attach."""
    error.is_of_attach = True
    return error


LATE = "the daemon did not answer Attach in time"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("then", [DeadlineExceeded, Unavailable, ResourceExhausted])
def test_memory_that_the_daemon_never_opens_is_replaced(
    is_first: bool, then: type[KvtierError], caplog: pytest.LogCaptureFixture
) -> None:
    """Its driver hangs: no answer, or what it says after that. Not at once, also of a daemon that
    never had this memory: late may be just busy."""
    client = FakeClient()
    client.is_there = not is_first
    worker, opened = gpu_worker(client)
    session = client.sessions[0]
    session.attached = False
    for error in (DeadlineExceeded(LATE), then("still")):
        session.last_error = of_attach(error)
        worker.begin(KvtierMetadata())
        worker.begin(KvtierMetadata())  # a step that sees the same attempt once more
    assert opened == [False]
    session.last_error = of_attach(then("still"))
    worker.begin(KvtierMetadata())
    assert opened == [False, True]
    assert len(client.sessions) == 2
    assert "cannot map this memory" in caplog.text


@pytest.mark.parametrize(
    "between",
    [
        None,  # it was attached meanwhile
        DeadlineExceeded("OpenNamespace"),  # stopped: it answers nothing
        Unavailable("no daemon"),
        ResourceExhausted("region: too many"),
    ],
)
def test_daemon_that_answers_nothing_is_no_reason_for_other_memory(
    between: KvtierError | None,
) -> None:
    client = FakeClient()
    worker, opened = gpu_worker(client)
    session = client.sessions[0]
    session.attached = False
    for _ in range(5):
        for error in (of_attach(DeadlineExceeded(LATE)), of_attach(Unavailable("gone")), between):
            session.last_error = error
            worker.begin(KvtierMetadata())
    for _ in range(5):  # in a row, but of a daemon that is away or stopped
        session.last_error = between and type(between)(between.text)
        worker.begin(KvtierMetadata())
    for _ in range(5):  # the GPU is out of service: the daemon takes it back
        session.last_error = of_attach(Unavailable("the GPU is out of service"))
        worker.begin(KvtierMetadata())
    assert opened == [False]


def test_shutdown_waits_for_ops_in_flight() -> None:
    rig = Rig()
    rig.step(loads=[load(1, "a")], stores=[store(2)])
    ops = rig.session.ops
    later(0.05, lambda: quiesce(ops))
    rig.worker.shutdown(timeout_s=60.0)
    assert all(op.is_cancelled for op in ops)
    assert rig.session.is_closed
    assert rig.client.is_closed


def test_shutdown_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.step(loads=[load(1, "a")])
    rig.worker.shutdown(timeout_s=0.1)
    assert "1 transfers that the daemon has not given up" in caplog.text
    assert rig.session.is_closed


def test_inert_worker_fails_every_job_at_once() -> None:
    client = FakeClient()
    worker = worker_with(client)
    worker.begin(KvtierMetadata(loads=[load(1, "a")]))
    assert worker.poll().failed == {"a"}
    worker.shutdown()
