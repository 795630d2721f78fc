"""What happens when the daemon is slow, stopped, killed or replaced: nothing waits longer than its
deadline, and memory is the engine's again only when nobody can touch it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
import kvtier
from daemon import Daemon
from engine import BLOCK_TOKENS, WAIT_S, Cache, wait_until
from kvtier import _attach
from kvtier._daemon import Process, RegionSocket

LATE_S = 4.0  # how much later than its deadline a call may come back on a busy machine


@pytest.fixture
def stored(daemon: Daemon) -> Any:
    """A session, its cache, and a lease on eight stored blocks."""
    cache = Cache(32)
    with kvtier.Client(daemon.socket, timeout_s=WAIT_S) as client:
        session = engine.attach(client, cache)
        content = engine.store(session, cache, 8)
        lease = session.lookup(engine.tokens(8), lease_s=60).lease
        yield session, cache, content, lease
        daemon.go_on_if_stopped()


LOADS = [kvtier.Moves(0, range(8), engine.ids(16, 8))]


def test_calls_to_a_stopped_daemon_end_with_their_deadline(daemon: Daemon, stored: Any) -> None:
    session = stored[0]
    daemon.stop()
    calls: list[Callable[[], object]] = [
        lambda: session.lookup(engine.tokens(8), timeout_s=0.1),
        lambda: session.reserve(engine.tokens(1), [kvtier.BlockRange(0, 0, 1)], timeout_s=0.1),
        lambda: session.client.stats(timeout_s=0.1),
    ]
    for call in calls:
        started_s = time.monotonic()
        with pytest.raises(kvtier.DeadlineExceeded):
            call()
        assert time.monotonic() - started_s < 0.1 + LATE_S
    started_s = time.monotonic()
    assert not session.client.serving(timeout_s=0.1)
    session.release(stored[3])
    assert time.monotonic() - started_s < 0.1 + LATE_S
    daemon.go_on()
    assert session.attached
    assert session.lookup(engine.tokens(8)).boundary_tokens == 8 * BLOCK_TOKENS


def test_a_release_waits_for_a_stopped_daemon(daemon: Daemon) -> None:
    """Else the lease would be held until it ends by itself."""
    cache = Cache(32)
    with kvtier.Client(daemon.socket, timeout_s=1.0) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, 8)
        lease = session.lookup(engine.tokens(8), lease_s=60, timeout_s=WAIT_S).lease
        assert lease is not None
        assert client.stats(timeout_s=WAIT_S).leases == 1
        daemon.stop()
        session.release(lease)
        time.sleep(1.3)
        daemon.go_on()
        wait_until(lambda: client.stats(timeout_s=WAIT_S).leases == 0)
        assert session.release_errors == 0


def test_what_a_late_answer_grants_is_given_back(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is gone by then; its lease and ticket would be held until they expire."""
    cache = Cache(32)
    with kvtier.Client(daemon.socket, timeout_s=WAIT_S) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, 8)
        given_back: list[object] = []
        release = session.release

        def spy(handle: Any) -> None:
            given_back.append(handle)
            release(handle)

        monkeypatch.setattr(session, "release", spy)
        wants = [kvtier.BlockRange(0, 8, 9)]
        daemon.stop()
        with pytest.raises(kvtier.DeadlineExceeded):
            session.lookup(engine.tokens(8), lease_s=60, timeout_s=0.1)
        with pytest.raises(kvtier.DeadlineExceeded):
            session.reserve(engine.tokens(9), wants, ticket_s=60, timeout_s=0.1)
        daemon.go_on()
        wait_until(lambda: len(given_back) == 2)
        assert {type(handle) for handle in given_back} == {kvtier.Lease, kvtier.Ticket}
        wait_until(lambda: _held(client) == (0, 0))
        assert session.release_errors == 0


def _held(client: kvtier.Client) -> tuple[int, int]:
    stats = client.stats(timeout_s=WAIT_S)
    return stats.leases, stats.tickets


def test_an_op_of_a_stopped_daemon_is_not_finished(daemon: Daemon, stored: Any) -> None:
    session, cache, content, lease = stored
    daemon.stop()
    op = session.promote(LOADS, lease=lease, timeout_s=0.2)
    assert not op.wait(0.7)
    wait_until(lambda: op.result is not None)
    assert isinstance(op.result.error, kvtier.DeadlineExceeded)
    assert not op.finished(), "the request still lies in the daemon's socket"
    daemon.go_on()
    assert op.wait(WAIT_S)
    # Whatever the daemon did of it is over: nothing changes any more.
    cache.blocks[16:24] = 0x5A
    time.sleep(0.2)
    assert (cache.blocks[16:24] == 0x5A).all()
    again = session.promote(LOADS, lease=lease)
    assert again.wait(WAIT_S)
    assert again.result.all_done
    assert np.array_equal(cache.blocks[16:24], content)


def test_many_ops_of_a_stopped_daemon(daemon: Daemon, stored: Any) -> None:
    """More than the server has requests posted, and more than a connection has streams: the
    question must not overtake one of them."""
    session, cache, _, lease = stored
    daemon.stop()
    threads_before = threading.active_count()
    ops = [session.promote(LOADS, lease=lease, timeout_s=0.1) for _ in range(100)]
    assert threading.active_count() == threads_before, "an operation costs no thread"
    wait_until(lambda: all(op.result is not None for op in ops))
    assert not any(op.finished() for op in ops)
    daemon.go_on()
    assert all(op.wait(WAIT_S) for op in ops)
    cache.blocks[16:24] = 0x5A
    time.sleep(0.2)
    assert (cache.blocks[16:24] == 0x5A).all()


def test_a_cancelled_op_is_finished_when_it_is_quiesced(daemon: Daemon, stored: Any) -> None:
    session, _, _, lease = stored
    daemon.stop()
    op = session.promote(LOADS, lease=lease, timeout_s=30.0)
    op.cancel()
    wait_until(lambda: op.result is not None)
    assert isinstance(op.result.error, kvtier.Cancelled)
    assert not op.wait(0.3)
    daemon.go_on()
    assert op.wait(WAIT_S)


def test_death_finishes_an_op(daemon: Daemon, stored: Any) -> None:
    session, _, _, lease = stored
    daemon.stop()
    op = session.promote(LOADS, lease=lease, timeout_s=0.1)
    seen: list[kvtier.Op] = []
    op.add_done_callback(seen.append)
    assert not op.wait(0.3)
    daemon.kill()
    assert op.wait(WAIT_S)
    assert not op.result.all_done
    wait_until(lambda: seen == [op])


def test_death_finishes_an_op_within_its_deadline(daemon: Daemon, stored: Any) -> None:
    session, _, _, lease = stored
    daemon.stop()
    op = session.promote(LOADS, lease=lease, timeout_s=60.0)
    daemon.kill()
    started_s = time.monotonic()
    assert op.wait(WAIT_S)
    assert time.monotonic() - started_s < 1.0 + LATE_S
    assert isinstance(op.result.error, kvtier.Unavailable)


def test_an_op_that_begins_just_after_the_death(daemon: Daemon, stored: Any) -> None:
    """Its caller read the attachment before; everybody was told of the end before it was there."""
    session, _, _, lease = stored
    before = session.current
    daemon.kill()
    wait_until(lambda: before.process.pidfd < 0)
    wait_until(lambda: not session.attached)
    session.current = before
    op = session.promote(LOADS, lease=lease, timeout_s=1.0)
    session.current = None
    assert op.wait(WAIT_S), "nobody attaches again, so nobody would ever finish it"
    assert isinstance(op.result.error, kvtier.Unavailable)


class TestWithoutPidfd:
    """The daemon's process is one that cannot be watched."""

    @pytest.fixture(autouse=True)
    def _unwatched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RegionSocket, "process", lambda _: Process(0, -1))

    def test_the_next_life_proves_the_end(self, daemon: Daemon, stored: Any) -> None:
        session, _, _, lease = stored
        daemon.stop()
        op = session.promote(LOADS, lease=lease, timeout_s=0.1)
        daemon.kill()
        assert not op.wait(0.3)
        assert session.daemon_pid is None
        daemon.start()
        assert op.wait(WAIT_S)
        wait_until(lambda: session.attached)
        assert session.generation == 2

    def test_a_socket_that_refuses_long_enough(
        self, daemon: Daemon, stored: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_attach, "_REFUSED_MAX_S", 0.5)
        session, _, _, lease = stored
        daemon.stop()
        op = session.promote(LOADS, lease=lease, timeout_s=0.1)
        daemon.kill()
        assert not op.wait(0.3)
        assert op.wait(WAIT_S)

    def test_a_socket_that_does_not_answer_is_no_end(
        self, daemon: Daemon, stored: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A daemon that hangs takes no more connections, and may go on copying later."""

        def late(*_: Any) -> None:
            raise kvtier.Unavailable("timed out")

        monkeypatch.setattr(_attach, "_REFUSED_MAX_S", 0.3)
        session, _, _, lease = stored
        daemon.stop()
        op = session.promote(LOADS, lease=lease, timeout_s=0.1)
        wait_until(lambda: op.result is not None)
        with monkeypatch.context() as hang:
            hang.setattr(_attach, "RegionSocket", late)
            session._attacher._stream.cancel()
            assert not op.wait(1.5)
        daemon.go_on()
        assert op.wait(WAIT_S)

    def test_a_lost_stream_finishes_nothing(self, daemon: Daemon, stored: Any) -> None:
        session, _, _, lease = stored
        daemon.stop()
        op = session.promote(LOADS, lease=lease, timeout_s=0.1)
        wait_until(lambda: op.result is not None)
        session._attacher._stream.cancel()
        assert not op.wait(0.5)
        daemon.go_on()
        assert op.wait(WAIT_S)


def test_a_restarted_daemon_is_found_again(daemon: Daemon) -> None:
    cache = Cache(16)
    changes: list[bool] = []
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache, on_change=changes.append)
        engine.store(session, cache, 4)
        old = session.lookup(engine.tokens(4), lease_s=60)
        daemon.kill()
        wait_until(lambda: not session.attached)
        why = session.last_error
        assert isinstance(why, kvtier.Unavailable)
        with pytest.raises(kvtier.Unavailable):
            session.lookup(engine.tokens(4))
        daemon.start()
        wait_until(lambda: changes == [True, False, True])
        assert session.generation == 2
        assert session.daemon_pid == daemon.pid
        assert session.last_error is None
        with pytest.raises(kvtier.StaleHandle, match="cursor of generation 1"):
            session.lookup(engine.tokens(1), cursor=old.cursor)
        with pytest.raises(kvtier.StaleHandle, match="lease of generation 1"):
            session.promote([kvtier.Moves(0, [0], [0])], lease=old.lease)
        op = session.promote([kvtier.Moves(0, [0], [0])], lease=old.lease.handle)
        assert op.wait(WAIT_S)
        assert isinstance(op.result.error, kvtier.FailedPrecondition)
        # The region was lent again: bytes go through it as before.
        engine.store(session, cache, 4)
        assert session.lookup(engine.tokens(4)).boundary_tokens == 4 * BLOCK_TOKENS


def test_an_orderly_stop_is_seen(daemon: Daemon) -> None:
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client)
        assert daemon.terminate() == 0
        wait_until(lambda: not session.attached)
        daemon.start()
        wait_until(lambda: session.attached)


def test_a_lost_stream_alone_finishes_nothing(daemon: Daemon, stored: Any) -> None:
    """The stream ends while the daemon is stopped with a request of ours unread: the op waits for
    the daemon, through the next session."""
    session, cache, _, lease = stored
    daemon.stop()
    op = session.promote(LOADS, lease=lease, timeout_s=0.1)
    wait_until(lambda: op.result is not None)
    session._attacher._stream.cancel()
    wait_until(lambda: not session.attached)
    assert not op.wait(0.5)
    daemon.go_on()
    assert op.wait(WAIT_S)
    assert session.generation == 2
    cache.blocks[16:24] = 0x5A
    time.sleep(0.2)
    assert (cache.blocks[16:24] == 0x5A).all()


def test_a_reset_is_told(daemon: Daemon, stored: Any) -> None:
    session, _, _, _ = stored
    before = session.epoch
    daemon.reset(session.namespace.fingerprint)
    wait_until(lambda: session.epoch == before + 1)
    assert session.lookup(engine.tokens(8)).boundary_tokens == 0


def test_close_waits_for_ops_but_not_for_ever(daemon: Daemon, stored: Any) -> None:
    session, _, _, lease = stored
    daemon.stop()
    op = session.promote(LOADS, lease=lease, timeout_s=60.0)
    started_s = time.monotonic()
    session.close(0.3)
    assert time.monotonic() - started_s < 0.3 + LATE_S
    assert not op.finished()
    daemon.go_on()
    assert op.wait(WAIT_S)
    with kvtier.Client(daemon.socket) as other:
        wait_until(lambda: other.stats().sessions == 0)


def test_close_while_the_daemon_is_stopped(daemon: Daemon, stored: Any) -> None:
    session = stored[0]
    daemon.stop()
    started_s = time.monotonic()
    session.client.close(0.3)
    assert time.monotonic() - started_s < 0.3 + 1.0 + LATE_S
