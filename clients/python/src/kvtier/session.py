"""A session with the daemon, as an engine's scheduler or worker sees it.

An interface, so that tests of an engine can put a fake in its place; `Client.attach` gives the real
one. Every call is thread-safe and bounded by its timeout_s (None: the client's). Calls that need an
attached session raise NotAttached when there is none at this moment; nothing waits for one.

tokens are ids that fit 32 bits: a numpy array of u32 (copied once), another integer array, a list,
or bytes that hold little-endian u32 already. With a cursor they are those that follow it, and
extra_keys count blocks from the cursor too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from kvtier.errors import KvtierError
from kvtier.op import Op
from kvtier.types import (
    BlockRange,
    Cursor,
    Lease,
    LookupResult,
    Moves,
    Policy,
    Reservation,
    Ticket,
)

_Handle = TypeVar("_Handle", Lease, Ticket, bytes)


@contextmanager
def held(session: Session, handle: _Handle) -> Iterator[_Handle]:
    """A lease or ticket that is given back at the end of the block:

        with held(session, found.lease) as lease:
            session.promote(moves, lease=lease).wait(10)

    Wait inside for operations that use it: those still running may be aborted.
    """
    try:
        yield handle
    finally:
        session.release(handle)


class Session(Protocol):
    """What `Client.attach` gives back."""

    @property
    def attached(self) -> bool:
        """There is a daemon at this moment, and it knows this session."""

    @property
    def generation(self) -> int:
        """How often the session was attached: 0 before the first time. Handles of an earlier
        generation are refused."""

    @property
    def epoch(self) -> int:
        """Of the namespace; raised by each Reset."""

    @property
    def daemon_pid(self) -> int | None:
        """Of the daemon it is, or was last, attached to; None in another pid namespace."""

    @property
    def last_error(self) -> KvtierError | None:
        """Why the last attempt to attach failed, or why the session was lost; None while
        attached."""

    @property
    def release_errors(self) -> int:
        """How many calls of release() the daemon did not answer with OK."""

    @property
    def voids(self) -> int:
        """How often everything that the engine reads in place became void: the daemon lost a GPU
        with some of it, or the session ended. Blocks that were asked for when it was n are good as
        long as it is n, and what was read of them when it no longer is was read for nothing."""

    def add_void_callback(self, fn: Callable[[], None]) -> None:
        """Calls fn() after each change of `voids`, from a thread of the session, as long as the
        session lives; to add it again changes nothing. fn must not block; what it raises is
        logged."""

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
        """How far a prompt is cached.

        limit_tokens: the boundary is at most this, counted from the beginning (prompt_len - 1);
        0: no limit. tiers: bits of Tier that count as resident; 0: all. lease_s: take a lease that
        ends after so long without use (0: the daemon's default; None: no lease). With one the
        boundary may be less than is there, and `is_lease_limited` says so. why: fill in why each
        component stopped. prefetch: bring what is lower up to L2 in the background.

        Raises StaleHandle or NotFound for a stale cursor (send all tokens once), InvalidArgument,
        ResourceExhausted, DeadlineExceeded, Unavailable. A miss is no error.
        """

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
        """Asks for the right to store blocks of a prompt, and which of them are missing.

        wants: at most 32 ranges and 65,536 blocks, counted from the beginning. ticket_s: the ticket
        ends after so long without use; 0: the daemon's default. Errors as in lookup.
        """

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
        """Begins to copy blocks of a lease into the engine's blocks; does not wait.

        timeout_s: what has not begun by then is dropped (LATE). layer_groups and on_progress:
        on_progress(group, groups) is called, from a thread of this operation, when groups of
        layers 0 .. group of every block are in place. inline: the bytes come back in
        `Outcome.inline_data`, at most 4 MiB.

        in_place: nothing is copied to the engine. `Outcome.in_place` says where each block that is
        DONE lies in L1, and from then on it stays there until the lease is released, the engine
        ends, or the GPU is lost: the lease ends no more by time, also when the answer was lost or
        not waited for. `read_in_place` does all of that; FailedPrecondition where the daemon does
        not export L1 (tiers.l1.export).

        What fails before anything was sent is raised (NotAttached, StaleHandle, InvalidArgument),
        everything later is in `Op.result`.
        """

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
        """Begins to store engine blocks, by ticket or else by prompt; does not wait.

        durable: the answer comes when data and index are on disk. inline_data: the payload of the
        moves one after the other, at most 4 MiB, for sessions with an inline region. Errors as in
        promote.
        """

    def release(self, handle: Lease | Ticket | bytes, *, surely: bool = False) -> None:
        """Gives a lease (as bytes: a lease's) or a ticket back. Neither waits nor raises: what is
        not given back ends by itself.

        Not so a lease under which blocks are held in place. It is asked for again until the daemon
        answers, or the session has ended, if this session began to hold under it; surely: also if
        another session of the engine did.
        """

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the session: operations under way are cancelled and waited for, then everything
        that the engine holds by this session is given up. When operations are not finished within
        timeout_s, the stream stays open in the background until they are."""
