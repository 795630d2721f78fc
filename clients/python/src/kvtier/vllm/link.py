"""The scheduler's way to the daemon: each call has a deadline, none raises, none is made in vain.

The scheduler's thread runs the whole engine, so a daemon that is late, stopped, dead or never was
there may cost it one deadline now and then (the breaker), and nothing else. What a call could not
do is a word (an outcome of kvtier.vllm.metrics), and the caller goes on as after a miss.

A lease or ticket that a call gave is a `Grant`: given back exactly once, by whatever ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    KvtierError,
    NotAttached,
    NotFound,
    Unavailable,
)
from kvtier.session import Session
from kvtier.types import BlockRange, Cursor, Lease, LookupResult, ModelSpec, Reservation, Role
from kvtier.types import Ticket as TicketHandle
from kvtier.vllm.breaker import Breaker
from kvtier.vllm.keys import RequestKeys, salt_since
from kvtier.vllm.options import Options

logger = logging.getLogger(__name__)

REPEAT_S = 10.0  # between two log lines about one kind of error

# The daemon is not well; other errors are its answers.
_SICK = (DeadlineExceeded, Unavailable, Internal)


class Attacher(Protocol):
    """The part of kvtier.Client that is used here."""

    def attach(
        self,
        spec: ModelSpec,
        *,
        engine_id: bytes,
        role: Role,
        name: str = "",
    ) -> Session: ...

    def close(self) -> None: ...


def wait_attached(session: Session, timeout_s: float) -> None:
    """At the engine's start: give a daemon that is there the moment that attaching takes, so that
    the first prompt is not lost. Returns as soon as it is attached, or it is known why not."""
    until_s = time.monotonic() + timeout_s
    while not session.attached and time.monotonic() < until_s:
        if not isinstance(session.last_error, NotAttached):
            return
        time.sleep(0.005)


class Grant:
    """A lease or a ticket, and the session that it is of."""

    def __init__(self, handle: Lease | TicketHandle, session: Session) -> None:
        self._handle: Lease | TicketHandle | None = handle
        self._session = session
        self.handle = handle.handle
        self.lifetime_s = handle.lifetime_s

    def release(self) -> None:
        """Give it back; the second time and later nothing happens."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._session.release(handle)


@dataclass(frozen=True)
class Looked:
    """What came of a lookup: `outcome` is one of metrics.LOOKUP_OUTCOMES."""

    result: LookupResult | None
    grant: Grant | None
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Reserved:
    """What came of a reserve: `reason` is one of metrics.SKIP_REASONS, or empty."""

    reservation: Reservation | None
    grant: Grant | None
    reason: str


def _outcome(result: LookupResult) -> str:
    """Of a lookup that was answered. "limited" may have found something, or nothing that fits."""
    if result.is_lease_limited:
        return "limited"
    return "hit" if result.boundary_tokens else "miss"


class Link:
    """Belongs to the scheduler's thread."""

    def __init__(
        self,
        options: Options,
        spec: ModelSpec,
        engine_id: bytes,
        client: Attacher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._client = client
        self._clock = clock
        self._resets = 0
        self._reset_tag = b""
        # By kind of error: when it was said, and how often it came since.
        self._said: dict[tuple[str, type[KvtierError]], tuple[float, int]] = {}
        self.breaker = Breaker()
        self._session = client.attach(
            spec, engine_id=engine_id, role=Role.SCHEDULER, name=options.name
        )

    def wait_attached(self, timeout_s: float) -> None:
        """See the function of this name."""
        wait_attached(self._session, timeout_s)

    @property
    def is_attached(self) -> bool:
        """The daemon knows this engine at this moment."""
        return self._session.attached

    @property
    def era(self) -> tuple[int, int]:
        """Changes when what was got before is worth nothing: the daemon is away or another one, or
        the cache was reset."""
        return (self._resets, self._session.generation if self.is_attached else -1)

    def reset(self, tag: bytes) -> None:
        """From now on under roots of its own, which are empty. No call, no waiting."""
        self._resets += 1
        self._reset_tag = tag

    def close(self) -> None:
        """The engine ends: the session, and the client."""
        self._session.close()
        self._client.close()

    # ---- calls ---------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why no call can be made now ("unavailable", "breaker_open"), or empty. While the breaker
        is open, an empty answer is the one call that may be made."""
        if not self.is_attached:
            return "unavailable"
        return "" if self.breaker.allows(self._clock()) else "breaker_open"

    def lookup(
        self, keys: RequestKeys, tokens: Any, extra_keys: Sequence[tuple[int, bytes]], limit: int
    ) -> Looked:
        """How much of the prompt's first `limit` tokens the daemon has, under a lease."""
        refusal = self.refusal()
        if refusal:
            return Looked(None, None, refusal, 0.0)
        began_s = self._clock()
        try:
            result = self._session.lookup(
                tokens,
                salt=salt_since(self._reset_tag, keys.salt),
                lora=keys.lora,
                extra_keys=extra_keys,
                limit_tokens=limit,
                lease_s=self._options.lease_s,
                timeout_s=self._options.lookup_timeout_s,
            )
        except KvtierError as error:
            outcome = self._failed("lookup", error)
            return Looked(None, None, outcome, self._clock() - began_s)
        self.breaker.succeeded()
        grant = None if result.lease is None else Grant(result.lease, self._session)
        return Looked(result, grant, _outcome(result), self._clock() - began_s)

    def reserve(
        self,
        keys: RequestKeys,
        tokens_from: Callable[[int], Any],
        wants: Sequence[BlockRange],
        cursor: Cursor | None,
    ) -> Reserved:
        """Ask to store blocks. tokens_from(n): the prompt's tokens from n up to where the wanted
        blocks end. With a cursor only what follows it is sent; if the daemon forgot the cursor,
        everything, once."""
        refusal = self.refusal()
        if refusal:
            reason = "not_attached" if refusal == "unavailable" else refusal
            return Reserved(None, None, reason)
        try:
            try:
                reservation = self._reserve(keys, tokens_from, wants, cursor)
            except (NotFound, FailedPrecondition):
                if cursor is None:
                    raise
                reservation = self._reserve(keys, tokens_from, wants, None)
        except KvtierError as error:
            self._failed("reserve", error)
            return Reserved(None, None, "error")
        self.breaker.succeeded()
        grant = None if reservation.ticket is None else Grant(reservation.ticket, self._session)
        return Reserved(reservation, grant, "")

    def _reserve(
        self,
        keys: RequestKeys,
        tokens_from: Callable[[int], Any],
        wants: Sequence[BlockRange],
        cursor: Cursor | None,
    ) -> Reservation:
        start = 0 if cursor is None else cursor.tokens
        tokens = tokens_from(start)
        first_block = start // keys.block_tokens
        return self._session.reserve(
            tokens,
            wants,
            salt=salt_since(self._reset_tag, keys.salt),
            lora=keys.lora,
            cursor=cursor,
            extra_keys=keys.extra(first_block, first_block + len(tokens) // keys.block_tokens),
            timeout_s=self._options.lookup_timeout_s,
        )

    def _failed(self, what: str, error: KvtierError) -> str:
        """Note it, and say which outcome of a lookup it is."""
        if not isinstance(error, _SICK):
            self.breaker.succeeded()
            self._say(what, error)
            return "error"
        was_open = self.breaker.is_open
        self.breaker.failed(self._clock())
        if self.breaker.is_open and not was_open:
            logger.warning("kvtier: the daemon does not answer, asking it less often: %s", error)
        return "timeout" if isinstance(error, DeadlineExceeded) else "unavailable"

    def _say(self, what: str, error: KvtierError) -> None:
        """A kind of error may be the answer to every request: it is said now and then."""
        kind, now_s = (what, type(error)), self._clock()
        said_s, more = self._said.get(kind, (-REPEAT_S, 0))
        if now_s - said_s < REPEAT_S:
            self._said[kind] = (said_s, more + 1)
            return
        self._said[kind] = (now_s, 0)
        also = f" ({more} more since the last such line)" if more else ""
        logger.warning("kvtier: %s: %s%s", what, error, also)
