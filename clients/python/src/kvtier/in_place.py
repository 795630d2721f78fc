"""Reading blocks of L1 where they are: docs/api.md, Reading L1 in place.

    with kvtier.read_in_place(session, moves, lease=found.lease, arenas=arenas) as reading:
        for block in reading.blocks(0):
            launch(stream, block.address, block.bytes)   # reads, never writes
        stream.synchronize()                             # before the end of the with
        is_good = reading.confirm()                      # else a GPU was lost: read for nothing

What a reader has to keep to, because nobody can see it read:

* never write: an arena holds the blocks of every model and tenant;
* the bytes are complete when the `with` begins, whatever stream reads them;
* wait for the stream before the `with` ends: from then on the slots are others';
* ask `confirm` after that wait, before what was read is used: an arena that was lost may have been
  anything meanwhile. `is_void` says the same without a question, as soon as the notice came: good
  for giving up early, too late to rely on.

Leaving the block gives the lease back and lets go of the arenas, also by an exception; an import
that was lost meanwhile is closed soon after, others stay open for the next reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvtier.errors import DeadlineExceeded, FailedPrecondition, KvtierError
from kvtier.session import Session
from kvtier.types import Arena, Lease, MoveResult, Moves, Outcome, Policy

_LATE_S = 1.0  # how much longer than its deadline an answer is waited for


class ArenaTable(Protocol):
    """Where arenas are opened: `kvtier.cuda.Arenas`, or an engine's own."""

    def take(self, arena: Arena) -> int:
        """Where it begins in this process; opens it if need be."""
        ...

    def give_back(self, arena: Arena) -> None:
        """Once for each take: its reader has ended."""
        ...

    def retire(self) -> None:
        """All are of nothing any more: close each as soon as nobody reads there. Called in a thread
        of the session, too, which has to go on: only note it, and close in another thread, a GPU
        that is being lost may hang."""
        ...


@dataclass(frozen=True)
class PlacedBlock:
    """A block of the session's rank in L1.

    block_idx: its number, counted from the root. address: of its first byte, on the GPU and in this
    process. The payload is contiguous from there, `Component.stored_bytes` of it: as Layout
    describes it, or codes and scales if the component is quantised.
    """

    block_idx: int
    address: int
    arena: Arena
    offset_bytes: int


class Reading:
    """Blocks that are held in place, as long as the `with` of read_in_place lasts."""

    def __init__(
        self,
        session: Session,
        moves: Sequence[Moves],
        lease: Lease | bytes,
        outcome: Outcome,
        voids: int,
    ) -> None:
        self.outcome = outcome
        self._lease = lease
        self._session = session
        self._moves = moves
        self._voids = voids
        self._places = _places(outcome)
        self.addresses: dict[int, int] = {}  # by zone

    @property
    def is_void(self) -> bool:
        """The daemon lost a GPU, or the session ended, since the blocks were asked for: what was
        read of them is to be thrown away, and nothing more to be read. Never becomes false again.
        """
        return self._session.voids != self._voids

    def confirm(self, timeout_s: float = 1.0) -> bool:
        """Asks the daemon: every block of this reading is still where it was told to be, so what
        was read of them until this call is good. False: it is not, or the daemon did not say so
        within timeout_s, or the namespace was reset: throw away what was read. Never raises
        KvtierError.
        """
        if self.is_void:
            return False
        try:
            op = self._session.promote(
                self._moves,
                lease=self._lease,
                timeout_s=timeout_s,
                policy=Policy.BEST_EFFORT,
                in_place=True,
            )
        except KvtierError:
            return False
        if not op.wait(timeout_s) or op.result is None or op.result.error is not None:
            return False
        pairs = zip(self._places, _places(op.result), strict=True)
        return not self.is_void and all(was in (None, now) for was, now in pairs)

    def blocks(self, move: int) -> list[PlacedBlock]:
        """Those of a Moves, by its position, that are there. A block that is not among them is a
        miss (`outcome.results` says why: NO_ROOM, MISS, ABORTED if the lease had ended)."""
        before = sum(len(m.blocks) for m in self._moves[:move])
        found = []
        for block_idx, place in zip(self._moves[move].blocks, self._places[before:], strict=False):
            if place is not None:
                arena, offset = place
                address = self.addresses[arena.zone] + offset
                found.append(PlacedBlock(int(block_idx), address, arena, offset))
        return found


def _places(outcome: Outcome) -> list[tuple[Arena, int] | None]:
    """Of each block, in order, where it is, or None."""
    arenas = {arena.zone: arena for arena in outcome.arenas}
    places: list[tuple[Arena, int] | None] = []
    for move, row in enumerate(outcome.results):
        for i, result in enumerate(row):
            if result == MoveResult.DONE:
                place = outcome.in_place[move]
                places.append((arenas[place.zones[i]], place.offsets_bytes[i]))
            else:
                places.append(None)
    return places


@contextmanager
def read_in_place(
    session: Session,
    moves: Sequence[Moves],
    *,
    lease: Lease | bytes,
    arenas: ArenaTable,
    timeout_s: float = 5.0,
    policy: Policy = Policy.WAIT_COMPLETE,
) -> Iterator[Reading]:
    """Brings blocks of a lease to L1 if they are not there, and holds them there to be read.

    moves: as in promote, without engine blocks. lease: taken over: it is given back at the end,
    whatever happens; the session of a worker gives its rank's part back, and the lease ends when
    all ranks, or the scheduler, did. arenas: of this session alone; opened with the current device
    of this thread. timeout_s: for the blocks to come; what is late is no part of the reading.

    Raises what promote raises and what its answer says: FailedPrecondition where L1 is not
    exported, InvalidArgument for blocks that the lease is not of, DeadlineExceeded, Unavailable;
    and CudaError when an arena does not open. In each case nothing is held.
    """
    taken: list[Arena] = []
    session.add_void_callback(arenas.retire)
    voids = session.voids  # before it is sent: a loss that is heard of later may be of these
    try:
        op = session.promote(moves, lease=lease, timeout_s=timeout_s, policy=policy, in_place=True)
        op.wait(timeout_s + _LATE_S)
        outcome = op.result
        if outcome is None:
            raise DeadlineExceeded(f"no answer within {timeout_s + _LATE_S:g} s")
        if outcome.error is not None:
            raise outcome.error
        if len(outcome.in_place) != len(moves) and MoveResult.DONE in b"".join(outcome.results):
            raise FailedPrecondition(
                "the daemon does not say where blocks lie: it knows nothing of in_place",
                advice="run a newer kvtierd",
            )
        reading = Reading(session, moves, lease, outcome, voids)
        for arena in outcome.arenas:
            reading.addresses[arena.zone] = arenas.take(arena)
            taken.append(arena)
        yield reading
    finally:
        for arena in taken:
            arenas.give_back(arena)
        if session.voids != voids:
            arenas.retire()  # what was opened after the session had told of it
        session.release(lease, surely=True)
