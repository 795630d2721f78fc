"""The session of one scheduler or one rank: calls, and the operations that are not finished.

What changes when a session is attached again is one immutable Attachment that is replaced as a
whole, so a call that began with one never mixes handles of two. The thread that attaches and reads
notices is in _attach.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from kvtier import _wire, errors
from kvtier._attach import Attacher
from kvtier._daemon import Process
from kvtier._dispatcher import run_safely
from kvtier._op import Transfer
from kvtier._proto import kvtier_pb2 as pb
from kvtier.op import Op
from kvtier.region import AnyRegion
from kvtier.session import Session
from kvtier.types import (
    BlockRange,
    ComponentMatch,
    Cursor,
    Layout,
    Lease,
    LookupResult,
    ModelSpec,
    Moves,
    Namespace,
    Policy,
    Reservation,
    Role,
    Ticket,
    Why,
)

if TYPE_CHECKING:
    from kvtier.client import Client

_NS_PER_S = 1_000_000_000
_LATE_S = 30.0  # how long a late answer is waited for where the daemon chooses the lifetime
_RELEASE_AGAIN_S = 0.2
#: Codes that grpcio makes up when no answer came, and the daemon's "not now".
_NO_ANSWER = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)
# To try again changes nothing about these.
_HOPELESS = (errors.InvalidArgument, errors.PermissionDenied, errors.Unimplemented)


@dataclass(frozen=True)
class Identity:
    """Who attaches: the same in every generation."""

    spec: ModelSpec
    engine_id: bytes
    role: Role
    rank: int
    regions: tuple[AnyRegion, ...]
    layouts: tuple[Layout, ...]
    name: str


@dataclass(frozen=True, eq=False)
class Attachment:
    """One life of a session: from an `attached` event to the end of its stream."""

    generation: int
    handle: bytes
    namespace: Namespace
    process: Process
    #: What the daemon speaks, and the longest lease and ticket that it gives.
    api_version: int
    lease_s_max: float
    ticket_s_max: float


class RankSession(Session):
    """The session that `Client.attach` gives back."""

    def __init__(
        self, client: Client, identity: Identity, on_change: Callable[[bool], None] | None
    ) -> None:
        self.client = client
        self.identity = identity
        self.current: Attachment | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._last: Attachment | None = None
        self._epoch = 0
        self._error: errors.KvtierError | None = errors.NotAttached("not attached yet")
        self._release_errors = 0
        self._voids = 0
        self._on_void: list[Callable[[], None]] = []
        self._in_place: set[bytes] = set()  # leases under which blocks may be held in place
        self._ops: dict[int, Transfer] = {}
        self._is_closing = False
        self._on_change = on_change
        self._attacher = Attacher(self)

    def start(self) -> None:
        self._attacher.start()

    def is_over(self) -> bool:
        """Closed, no operation unfinished, and its thread has ended."""
        return self._is_closing and not self._ops and not self._attacher.is_alive()

    # ---- what is known ---------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self.current is not None and self._pid == os.getpid()

    @property
    def generation(self) -> int:
        return 0 if self._last is None else self._last.generation

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def daemon_pid(self) -> int | None:
        return None if self._last is None else self._last.process.pid

    @property
    def last_error(self) -> errors.KvtierError | None:
        return self._error

    @property
    def release_errors(self) -> int:
        return self._release_errors

    @property
    def voids(self) -> int:
        return self._voids

    def add_void_callback(self, fn: Callable[[], None]) -> None:
        with self._lock:
            if fn not in self._on_void:
                self._on_void.append(fn)

    @property
    def namespace(self) -> Namespace | None:
        """What the daemon calls the model spec; None before the first time."""
        return None if self._last is None else self._last.namespace

    def wait_attached(self, timeout_s: float) -> bool:
        """Waits until attached, at most timeout_s and not if that is hopeless; whether it is."""

        def is_decided() -> bool:
            return self.current is not None or isinstance(self._error, _HOPELESS)

        with self._changed:
            self._changed.wait_for(is_decided, timeout_s)
            return self.current is not None

    # ---- calls -----------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: Any,
        *,
        salt: bytes = b"",
        lora: bytes = b"",
        cursor: Cursor | None = None,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        limit_tokens: int = 0,
        tiers: int = 0,
        lease_s: float | None = None,
        why: bool = False,
        prefetch: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        at = self._attachment()
        _check_generation(at, cursor)
        request = pb.LookupRequest(
            session=at.handle,
            prefix=_wire.prefix(tokens, salt, lora, cursor, extra_keys),
            limit_tokens=limit_tokens,
            tiers=tiers,
            wants_lease=lease_s is not None,
            lease_ns=0 if lease_s is None else int(lease_s * _NS_PER_S),
            wants_why=why,
            wants_prefetch=prefetch,
        )
        client = self.client
        method, timeout = client.wire().lookup, client.timeout_of(timeout_s)
        if lease_s is None:
            answer = _wire.call(method, request, timeout)
        else:
            late_s = lease_s or _LATE_S
            answer = _wire.call_for_grant(
                method, request, timeout, late_s, partial(self._give_back_lease, at)
            )
        lease = _lease(at, answer)
        return LookupResult(
            boundary_tokens=answer.boundary_tokens,
            path_tokens=answer.path_tokens,
            branch_tokens=answer.branch_tokens,
            epoch=answer.epoch,
            components=tuple(_match(component) for component in answer.components),
            cursor=_cursor(at, answer),
            lease=lease,
            estimate_us=answer.estimate_us,
            is_lease_limited=answer.is_lease_limited,
        )

    def reserve(
        self,
        tokens: Any,
        wants: Sequence[BlockRange],
        *,
        salt: bytes = b"",
        lora: bytes = b"",
        cursor: Cursor | None = None,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        ticket_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Reservation:
        at = self._attachment()
        _check_generation(at, cursor)
        request = pb.ReserveRequest(
            session=at.handle,
            prefix=_wire.prefix(tokens, salt, lora, cursor, extra_keys),
            ticket_ns=int(ticket_s * _NS_PER_S),
            wants=[
                pb.BlockRange(
                    component=want.component, first_block_idx=want.first, end_block_idx=want.end
                )
                for want in wants
            ],
        )
        client = self.client
        answer = _wire.call_for_grant(
            client.wire().reserve,
            request,
            client.timeout_of(timeout_s),
            ticket_s or _LATE_S,
            partial(self._give_back_ticket, at),
        )
        return Reservation(
            _ticket(at, answer), tuple(answer.states), _cursor(at, answer), answer.epoch
        )

    def promote(
        self,
        moves: Sequence[Moves],
        *,
        lease: Lease | bytes,
        timeout_s: float | None = None,
        policy: Policy = Policy.WAIT_COMPLETE,
        layer_groups: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
        inline: bool = False,
        in_place: bool = False,
    ) -> Op:
        at = self._attachment()
        timeout = self.client.timeout_of(timeout_s)
        if in_place and (inline or on_progress is not None):
            raise errors.InvalidArgument("promote: what is read in place is copied nowhere")
        request = pb.PromoteRequest(
            session=at.handle,
            lease=_handle_of(at, lease),
            target="TARGET_L1" if in_place else "TARGET_ENGINE",
            policy=pb.PromotePolicy.Name(policy),
            timeout_ns=int(timeout * _NS_PER_S) if policy == Policy.TIMEOUT else 0,
            op_id=self.client.op_ids.take(),
            moves=_wire.moves(moves),
            layer_groups=layer_groups if on_progress is not None else 0,
            wants_inline=inline,
            in_place=in_place,
        )
        op = self._begin(at, request.op_id, is_demote=False)
        if in_place:
            with self._lock:
                self._in_place.add(request.lease)
        wire = self.client.wire()
        if on_progress is not None and layer_groups > 1:
            op.start_stream(wire.promote_stream, request, timeout, on_progress)
        else:
            op.start(wire.promote, request, timeout)
        return op

    def demote(
        self,
        moves: Sequence[Moves],
        *,
        ticket: Ticket | bytes | None = None,
        tokens: Any = None,
        salt: bytes = b"",
        lora: bytes = b"",
        cursor: Cursor | None = None,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        timeout_s: float | None = None,
        durable: bool = False,
        inline_data: bytes = b"",
    ) -> Op:
        at = self._attachment()
        _check_generation(at, cursor)
        if (ticket is None) == (tokens is None):
            raise errors.InvalidArgument("demote: give either a ticket or tokens")
        request = pb.DemoteRequest(
            session=at.handle,
            op_id=self.client.op_ids.take(),
            moves=_wire.moves(moves),
            wants_durable=durable,
            inline_data=inline_data,
        )
        if ticket is not None:
            request.ticket = _handle_of(at, ticket)
        else:
            request.prefix.CopyFrom(_wire.prefix(tokens, salt, lora, cursor, extra_keys))
        op = self._begin(at, request.op_id, is_demote=True)
        op.start(self.client.wire().demote, request, self.client.timeout_of(timeout_s))
        return op

    def release(self, handle: Lease | Ticket | bytes, *, surely: bool = False) -> None:
        at = self.current
        if at is None or self._pid != os.getpid():
            return  # whatever it was, it ended with the session
        request = pb.ReleaseRequest(session=at.handle)
        timeout_s = self.client.timeout_of(None)
        if isinstance(handle, Ticket):
            request.ticket = handle.handle
        else:
            request.lease = handle.handle if isinstance(handle, Lease) else handle
            with self._lock:
                surely = surely or request.lease in self._in_place
                self._in_place.discard(request.lease)
        if surely:
            self._release_surely(at, request)
            return
        if isinstance(handle, Lease | Ticket):
            # Nobody waits for it, and a daemon that answers late has to hear of it until the lease
            # would have ended by itself.
            timeout_s = max(timeout_s, handle.lifetime_s)
        call = self.client.wire().release.future(request, timeout=timeout_s)
        call.add_done_callback(self._on_released)

    def _give_back_lease(self, at: Attachment, answer: Any) -> None:
        """An answer came after its caller had gone."""
        lease = _lease(at, answer)
        if lease is not None:
            self.release(lease)

    def _give_back_ticket(self, at: Attachment, answer: Any) -> None:
        ticket = _ticket(at, answer)
        if ticket is not None:
            self.release(ticket)

    def _on_released(self, call: Any) -> None:
        if call.cancelled() or call.exception() is not None:
            with self._lock:
                self._release_errors += 1

    def _release_surely(self, at: Attachment, request: Any) -> None:
        """Until the daemon answered: what it holds under this lease ends in no other way but with
        the engine."""
        if self.current is not at or self._pid != os.getpid():
            return
        call = self.client.wire().release.future(request, timeout=self.client.timeout_of(None))
        call.add_done_callback(partial(self._on_released_surely, at, request))

    def _on_released_surely(self, at: Attachment, request: Any, call: Any) -> None:
        self._on_released(call)
        if call.code() in _NO_ANSWER:
            again = partial(self._release_surely, at, request)
            self.client.dispatcher.call_later(_RELEASE_AGAIN_S, again)

    # ---- operations ------------------------------------------------------------------------------

    def _begin(self, at: Attachment, op_id: int, *, is_demote: bool) -> Transfer:
        op = Transfer(self, at, op_id, is_demote=is_demote)
        with self._lock:
            if self._is_closing:
                raise errors.NotAttached("the session is closed", advice="attach a new one")
            self._ops[op_id] = op
        return op

    def forget(self, op: Transfer) -> None:
        """The operation is finished."""
        with self._changed:
            self._ops.pop(op.op_id, None)
            self._changed.notify_all()

    def unfinished(self) -> list[Transfer]:
        with self._lock:
            return list(self._ops.values())

    def on_daemon_gone(self, process: Process) -> None:
        """The process ended; whatever it was doing for this session is over."""
        for op in self.unfinished():
            if op.at.process is process:
                op.on_daemon_gone()

    # ---- the attacher's side ---------------------------------------------------------------------

    def set_attached(self, at: Attachment) -> None:
        with self._changed:
            self.current = self._last = at
            self._epoch = at.namespace.epoch
            self._error = None
            self._changed.notify_all()
        for op in self.unfinished():
            op.on_attached()
        self._tell(True)

    def set_lost(self, error: errors.KvtierError) -> None:
        with self._changed:
            was_attached = self.current is not None
            self.current = None
            self._error = error
            self._in_place.clear()
            self._changed.notify_all()
        if was_attached:
            self.on_void()
            self._tell(False)

    def on_void(self) -> None:
        """What was read in place is void: a GPU was lost, or the session."""
        with self._lock:
            self._voids += 1
            callbacks = list(self._on_void)
        for fn in callbacks:
            run_safely(fn)

    def on_notice(self, notice: Any) -> None:
        if notice.kind == pb.Notice.QUIESCED:
            with self._lock:
                op = self._ops.get(notice.op_id)
            if op is not None:
                op.on_notice()
        elif notice.kind == pb.Notice.EPOCH:
            self._epoch = notice.epoch
        elif notice.kind == pb.Notice.REGIONS_LOST:
            self.on_void()

    def _tell(self, is_attached: bool) -> None:
        on_change = self._on_change
        if on_change is not None:
            run_safely(lambda: on_change(is_attached))

    def _attachment(self) -> Attachment:
        if self._pid != os.getpid():
            raise errors.NotAttached(
                f"the session belongs to process {self._pid}, which this one was forked from",
                advice="attach a session in this process",
            )
        at = self.current
        if self._is_closing:
            raise errors.NotAttached("the session is closed", advice="attach a new one")
        if at is None:
            raise errors.NotAttached(self._error.text if self._error else "not attached")
        return at

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> None:
        if self._pid != os.getpid():
            return
        with self._changed:
            self._is_closing = True
            ops = list(self._ops.values())
        for op in ops:
            op.cancel()
        self._attacher.stop(timeout_s)
        self.client.drop(self)


def _check_generation(at: Attachment, handle: Cursor | Lease | Ticket | None) -> None:
    if handle is not None and handle.generation != at.generation:
        raise errors.StaleHandle(
            f"a {type(handle).__name__.lower()} of generation {handle.generation}, "
            f"the session is at {at.generation}"
        )


def _handle_of(at: Attachment, handle: Lease | Ticket | bytes) -> bytes:
    if isinstance(handle, bytes):
        return handle
    _check_generation(at, handle)
    return handle.handle


def _lease(at: Attachment, answer: Any) -> Lease | None:
    if not answer.lease:
        return None
    return Lease(answer.lease, answer.lease_ns / _NS_PER_S, at.generation)


def _ticket(at: Attachment, answer: Any) -> Ticket | None:
    if not answer.ticket:
        return None
    return Ticket(answer.ticket, answer.ticket_ns / _NS_PER_S, at.generation)


def _cursor(at: Attachment, answer: Any) -> Cursor | None:
    if not answer.cursor:
        return None
    return Cursor(answer.cursor, answer.cursor_tokens, at.generation)


def _three(numbers: Any) -> tuple[int, int, int]:
    return tuple(numbers) if len(numbers) == 3 else (0, 0, 0)


def _match(component: Any) -> ComponentMatch:
    return ComponentMatch(
        alone_tokens=component.alone_tokens,
        needed_blocks=component.needed_blocks,
        blocks_at=_three(component.blocks_at),
        tokens_at=_three(component.tokens_at),
        why=Why(component.why),
        why_block_idx=component.why_block_idx,
    )
