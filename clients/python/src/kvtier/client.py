"""The client: one for each daemon and process.

Threads: a client with sessions has one dispatcher thread, and a thread for each session (and what
grpcio starts: one that waits for answers, and one for each session's stream). Operations cost none.

Forks: a client may be made, and used, before a fork. The child finds it empty: it opens a channel
of its own with its first call, and the sockets that it inherited are closed, so that the daemon
sees the end of the parent when that ends. Sessions and operations stay the parent's; in the child
their calls raise NotAttached. What grpcio itself can do is a limit: see docs/python.md.
"""

from __future__ import annotations

import atexit
import os
import socket as sockets
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from kvtier import _wire, errors
from kvtier._daemon import Process, RegionSocket
from kvtier._dispatcher import Dispatcher
from kvtier._proto import kvtier_pb2 as pb
from kvtier._session import Identity, RankSession
from kvtier.region import AnyRegion
from kvtier.types import ENGINE_ID_BYTES, Layout, ModelSpec, Namespace, Role

DEFAULT_SOCKET = "/run/kvtierd/kvtierd.sock"
_OPEN_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 0.5


class Client:
    """The daemon on a unix socket. Thread-safe; nothing is opened before the first call.

    socket: the daemon's main socket. timeout_s: of each call that says nothing else.
    """

    def __init__(self, socket: str = DEFAULT_SOCKET, *, timeout_s: float = 1.0) -> None:
        self.socket = _wire.checked_socket(socket)
        self._timeout_s = timeout_s
        self._sessions: list[RankSession] = []
        self._is_closed = False
        self._empty()
        _CLIENTS.add(self)

    def _empty(self) -> None:
        """Nothing of this process is open yet."""
        self._lock = threading.Lock()
        self._wire: _wire.Wire | None = None
        self._dispatcher: Dispatcher | None = None
        self._process: Process | None = None
        self.op_ids = _wire.OpIds()

    # ---- calls without a session -----------------------------------------------------------------

    def open_namespace(self, spec: ModelSpec, *, timeout_s: float | None = None) -> Namespace:
        """Declares a model, or finds it: equal specs are one namespace."""
        timeout = _OPEN_TIMEOUT_S if timeout_s is None else timeout_s
        request = _wire.open_namespace(spec)
        answer = _wire.call(self.wire().open_namespace, request, timeout, wait_for_ready=True)
        _check_quantised(spec, answer.stored_bytes_per_block)
        return Namespace(
            answer.namespace_handle, answer.fingerprint, answer.epoch, answer.was_known
        )

    def stats(self, *, timeout_s: float | None = None) -> pb.StatsAnswer:
        """Counters and gauges, as message StatsAnswer of kvtier.proto."""
        answer: pb.StatsAnswer = _wire.call(
            self.wire().stats, pb.StatsRequest(), self.timeout_of(timeout_s)
        )
        return answer

    def serving(self, *, timeout_s: float | None = None) -> bool:
        """The daemon answers, and that it serves. Never raises."""
        try:
            return self.wire().is_serving(self.timeout_of(timeout_s))
        except (grpc.RpcError, errors.KvtierError):
            return False

    # ---- sessions --------------------------------------------------------------------------------

    def attach(
        self,
        spec: ModelSpec,
        *,
        engine_id: bytes,
        role: Role,
        rank: int = -1,
        regions: Sequence[AnyRegion] = (),
        layouts: Sequence[Layout] = (),
        name: str = "",
        on_change: Callable[[bool], None] | None = None,
        wait_s: float | None = None,
    ) -> RankSession:
        """A session, which a thread attaches now and whenever its stream ends.

        engine_id: 16 random bytes, the same for all processes of an engine. rank: 0 .. ranks - 1,
        or -1 for a scheduler that is no worker. regions and layouts: where a worker's blocks lie;
        the session keeps the regions alive. on_change(attached) is called from that thread.

        wait_s: None returns at once; else waits so long for the first time and, if it does not
        come (or cannot: InvalidArgument), closes the session and raises what the last attempt
        said.
        """
        if len(engine_id) != ENGINE_ID_BYTES:
            raise errors.InvalidArgument(
                f"engine_id: {ENGINE_ID_BYTES} bytes are wanted, not {len(engine_id)}"
            )
        identity = Identity(
            spec, bytes(engine_id), Role(role), rank, tuple(regions), tuple(layouts), name
        )
        session = RankSession(self, identity, on_change)
        with self._lock:
            if self._is_closed:
                raise errors.NotAttached("the client is closed", advice="make a new one")
            self._sessions.append(session)
        session.start()
        if wait_s is not None and not session.wait_attached(wait_s):
            error = session.last_error or errors.NotAttached(f"not attached within {wait_s} s")
            session.close(0.0)
            raise error
        return session

    def close(self, timeout_s: float = 5.0) -> None:
        """Closes the sessions (together within timeout_s) and the channel; may be repeated. When
        an operation is not finished by then, the channel stays open in the background until it
        is."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close(max(0.0, until_s - time.monotonic()))
        self._finish_close()

    def _finish_close(self) -> None:
        with self._lock:
            is_over = all(session.is_over() for session in self._sessions)
            dispatcher = self._dispatcher
            if is_over:
                wire, self._wire = self._wire, None
                process, self._process = self._process, None
                self._dispatcher = None
                self._sessions = []
        if not is_over:
            self.dispatcher.call_later(0.2, self._finish_close)
            return
        if dispatcher is not None:
            dispatcher.stop()
        if wire is not None:
            wire.channel.close()
        if process is not None:
            process.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for the sessions ------------------------------------------------------------------------

    def timeout_of(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def wire(self) -> _wire.Wire:
        """The channel of this process."""
        wire = self._wire
        if wire is not None:
            return wire
        with self._lock:
            if self._is_closed:
                raise errors.NotAttached("the client is closed", advice="make a new one")
            if self._wire is None:
                self._wire = _wire.Wire(self.socket)
            return self._wire

    @property
    def dispatcher(self) -> Dispatcher:
        """Sessions of a closed client still use it."""
        with self._lock:
            if self._dispatcher is None:
                self._dispatcher = Dispatcher()
            return self._dispatcher

    def process_of(self, lender: RegionSocket) -> Process:
        """The daemon's process; the same object as long as it is the same process."""
        found = lender.process()
        dispatcher = self.dispatcher
        with self._lock:
            known = self._process
            is_same = known is not None and known.pid == found.pid and known.is_watched
            if known is not None and is_same and not known.is_dead:
                found.close()
                return known
            self._process = found
        if found.is_watched:
            dispatcher.watch(found.pidfd, lambda: self._on_end(found))
        return found

    def _on_end(self, process: Process) -> None:
        process.on_end()
        for session in list(self._sessions):
            session.on_daemon_gone(process)

    def drop(self, session: RankSession) -> None:
        """A closed session; it stays until it is over."""
        with self._lock:
            if session in self._sessions and session.is_over():
                self._sessions.remove(session)

    # ---- forks -----------------------------------------------------------------------------------

    def forget_parent(self) -> None:
        """In the child of a fork, which has one thread: become empty."""
        _ABANDONED.append((self._wire, list(self._sessions)))
        if self._dispatcher is not None:
            self._dispatcher.close_descriptors()
        if self._process is not None:
            self._process.close()
        self._sessions = []
        self._empty()


#: What belongs to the parent of this process. Its destructors would talk to threads that are not
#: here, so it is never destroyed.
_ABANDONED: list[Any] = []
_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


def _is_connected_to(fd: int, paths: set[str]) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        # Its kind is named: a copy whose kind cannot be found out would stay open, and a copy of a
        # pipe's end that stays open keeps the other end from ever seeing the end of the file.
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM, fileno=os.dup(fd)) as copy:
            return copy.getpeername() in paths
    except OSError:
        return False


def _after_fork_in_child() -> None:
    clients = list(_CLIENTS)
    if not clients:
        return
    paths = {client.socket for client in clients}
    paths |= {path + ".regions" for path in paths}
    # The numbers stay taken: gRPC's copy of its state still has them.
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _is_connected_to(int(name), paths):
            os.dup2(null_fd, int(name), inheritable=False)
    os.close(null_fd)
    for client in clients:
        client.forget_parent()


def _at_exit() -> None:
    for client in list(_CLIENTS):
        client.close(_EXIT_TIMEOUT_S)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)


def _check_quantised(spec: ModelSpec, stored_bytes: Sequence[int]) -> None:
    """An earlier daemon ignores what it does not know, and would keep such components as they are
    in a namespace of their own: refused, rather than silently not what was declared."""
    wanted = [component.stored_bytes for component in spec.components]
    if any(c.quantisation for c in spec.components) and list(stored_bytes) != wanted:
        raise errors.FailedPrecondition(
            f"the daemon stores {list(stored_bytes)} bytes a block of quantised components, and "
            f"{wanted} were declared: it is of a version without quantisation",
            advice="run a newer kvtierd, or declare the components without quantisation",
        )
