"""How an operation finds out that its memory is the caller's again.

    started --> result (answer, error, deadline) --> quiesced --> finished
                                                      ^ said in the answer
                                                      | a Quiesce was answered
                                                      | notice QUIESCED on the session's stream
                                                      | the daemon's process ended

Quiesce is asked again until it answers. While the session that began the operation lives, it is
asked in that session; its connection is the operation's too, so the daemon has read the request
before. When no answer of the daemon proves that it had begun with the request, it is asked twice
with a pause between: the daemon's threads may pass each other.

When the session's stream broke but the daemon's process lives, copies may go on and the request may
even still lie unread in the old connection. Then the old session's handle is tried until the daemon
says NOT_FOUND: from there on nothing can begin in it. After that the question goes to the next
session of the same rank, which may ask for operations of an earlier one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from kvtier import errors
from kvtier._dispatcher import run_safely
from kvtier._proto import kvtier_pb2 as pb
from kvtier.op import Op
from kvtier.types import Arena, InPlace, Outcome

if TYPE_CHECKING:
    from kvtier._session import Attachment, RankSession

_QUIESCE_TIMEOUT_S = 5.0
_PAUSE_S = 0.05  # between two questions
_RETRY_S = 0.2  # after an answer that is none
# Codes that grpcio makes up as well when no answer came.
_LOCAL_CODES = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)


class Transfer(Op):
    """A promote or demote of a session. Begins with start(); the lock is never held while anything
    else is called."""

    def __init__(self, session: RankSession, at: Attachment, op_id: int, *, is_demote: bool):
        self.op_id = op_id
        self.started_s = time.monotonic()
        self.at = at
        self._session = session
        self._is_demote = is_demote
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Op], None]] = []
        self._result: Outcome | None = None
        self._is_quiesced = False
        self._is_asking = False
        self._oks_wanted = 1
        self._call: Any = None

    # ---- the caller's side -----------------------------------------------------------------------

    @property
    def result(self) -> Outcome | None:
        return self._result

    def finished(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def add_done_callback(self, fn: Callable[[Op], None]) -> None:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(fn)
                return
        self._session.client.dispatcher.call_soon(partial(fn, self))

    def cancel(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    # ---- the answer ------------------------------------------------------------------------------

    def start(self, method: Any, request: Any, timeout_s: float) -> None:
        """Sends a unary request; its end comes in a thread of gRPC."""
        self._call = method.future(request, timeout=timeout_s)
        self._call.add_done_callback(self._on_end)

    def start_stream(
        self, method: Any, request: Any, timeout_s: float, on_progress: Callable[[int, int], None]
    ) -> None:
        """Sends a promote that tells its progress. Reading a stream takes a thread."""
        self._call = method(request, timeout=timeout_s)
        threading.Thread(
            target=self._read, args=(self._call, on_progress), name="kvtier-progress", daemon=True
        ).start()

    def _read(self, stream: Any, on_progress: Callable[[int, int], None]) -> None:
        answer = None
        try:
            for event in stream:
                if event.WhichOneof("event") == "result":
                    answer = event.result
                else:
                    step = event.progress
                    run_safely(partial(on_progress, step.group, step.groups_count))
        except grpc.RpcError as error:
            self._on_error(error)
            return
        self._on_answer(answer)

    def _on_end(self, call: Any) -> None:
        if call.cancelled():
            self._on_error(call)
            return
        error = call.exception()
        if error is not None:
            self._on_error(error)
            return
        answer = call.result()
        self._on_answer(answer if self._is_demote else answer.result)

    def _on_answer(self, answer: Any) -> None:
        error: errors.KvtierError | None = None
        if answer is None:
            answer, error = pb.PromoteAnswer(), errors.Internal("the daemon gave no result")
        elif not answer.is_quiesced:
            error = errors.DeadlineExceeded("the deadline passed while blocks were being copied")
        moved_from = (0, 0, 0) if self._is_demote else tuple(answer.moved_blocks_from) or (0, 0, 0)
        outcome = Outcome(
            results=tuple(answer.results),
            moved_bytes=answer.moved_bytes,
            moved_blocks_from=moved_from,
            error=error,
            seconds=time.monotonic() - self.started_s,
            inline_data=b"" if self._is_demote else answer.inline_data,
            is_durable=self._is_demote and answer.is_durable,
            is_demote=self._is_demote,
            in_place=() if self._is_demote else _in_place(answer),
            arenas=() if self._is_demote else _arenas(answer),
        )
        self._settle(outcome, is_quiesced=answer.is_quiesced, oks_wanted=1)

    def _on_error(self, error: Any) -> None:
        code = error.code()
        self._settle(
            self._failed(errors.from_status(code, error.details())),
            is_quiesced=False,
            oks_wanted=2 if code in _LOCAL_CODES else 1,
        )

    def _failed(self, error: errors.KvtierError) -> Outcome:
        return Outcome(
            results=(),
            moved_bytes=0,
            moved_blocks_from=(0, 0, 0),
            error=error,
            seconds=time.monotonic() - self.started_s,
            is_demote=self._is_demote,
        )

    def _settle(self, outcome: Outcome, *, is_quiesced: bool, oks_wanted: int) -> None:
        with self._lock:
            if self._result is None:
                self._result = outcome
            self._is_quiesced = self._is_quiesced or is_quiesced
            self._oks_wanted = oks_wanted
        self._go_on()

    # ---- quiescence ------------------------------------------------------------------------------

    def on_notice(self) -> None:
        """The session's stream said QUIESCED; the answer may still be on its way."""
        with self._lock:
            self._is_quiesced = True
        self._go_on()

    def on_attached(self) -> None:
        """The session has a stream again."""
        self._go_on()

    def on_daemon_gone(self) -> None:
        """The daemon's process ended: nobody is left who could touch anything."""
        with self._lock:
            if self._result is None:
                self._result = self._failed(errors.Unavailable("the daemon ended"))
            self._is_quiesced = True
        self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            if self._result is None or self._done.is_set():
                return
            # Its end is told to the operations of that moment: one that began just after it, when
            # the session did not know yet, has to look.
            is_over = self._is_quiesced or self.at.process.is_dead
            if is_over:
                callbacks, self._callbacks = self._callbacks, []
                self._done.set()
            elif self._is_asking or self._session.current is None:
                return  # asked already, or there is nobody to ask: on_attached() will come
            else:
                self._is_asking = True
        if not is_over:
            self._ask()
            return
        self._session.forget(self)
        for fn in callbacks:
            self._session.client.dispatcher.call_soon(partial(fn, self))

    def _ask(self) -> None:
        self._send_quiesce(self.at.handle, self._on_own_answer)

    def _send_quiesce(self, handle: bytes, on_end: Callable[[Any], None]) -> None:
        request = pb.QuiesceRequest(session=handle, op_id=self.op_id)
        wire = self._session.client.wire()
        wire.quiesce.future(request, timeout=_QUIESCE_TIMEOUT_S).add_done_callback(on_end)

    def _on_own_answer(self, call: Any) -> None:
        """What the session that began the operation says."""
        code = call.code()
        if code == grpc.StatusCode.OK and self._session.current is self.at:
            self._count_ok()
        elif code == grpc.StatusCode.OK:
            self._ask_later(_PAUSE_S)  # the stream broke; the daemon has not seen that yet
        elif code == grpc.StatusCode.NOT_FOUND:
            now = self._session.current
            if now is None or now is self.at:
                self._ask_later(_PAUSE_S)  # between two sessions
            else:
                self._send_quiesce(now.handle, self._on_next_answer)
        elif code == grpc.StatusCode.FAILED_PRECONDITION and not self.at.process.is_watched:
            self._quiesced()  # another life of the daemon answers, so that one is over
        else:
            self._ask_later(_RETRY_S)

    def _on_next_answer(self, call: Any) -> None:
        """What a later session of the same rank says, after the first one ended."""
        if call.code() == grpc.StatusCode.OK:
            self._quiesced()
        else:
            self._ask_later(_RETRY_S)

    def _count_ok(self) -> None:
        with self._lock:
            self._oks_wanted -= 1
            is_enough = self._oks_wanted <= 0
        if is_enough:
            self._quiesced()
        else:
            self._ask_later(_PAUSE_S)

    def _quiesced(self) -> None:
        with self._lock:
            self._is_quiesced = True
        self._go_on()

    def _ask_later(self, delay_s: float) -> None:
        self._session.client.dispatcher.call_later(delay_s, self._ask_again)

    def _ask_again(self) -> None:
        with self._lock:
            self._is_asking = False
        self._go_on()


def _in_place(answer: Any) -> tuple[InPlace, ...]:
    return tuple(InPlace(tuple(one.zones), tuple(one.offsets_bytes)) for one in answer.in_place)


def _arenas(answer: Any) -> tuple[Arena, ...]:
    return tuple(
        Arena(one.zone, one.handle, one.device_uuid, one.bytes, one.incarnation)
        for one in answer.arenas
    )
