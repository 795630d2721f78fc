"""Blocks copied through a buffer that the daemon maps, where the engine's memory is not ours.

The buffer is cut into slots of one kvtier block each. A job is worked off in *batches*: as
many of its blocks as there are free slots (at most a quarter of all, so that copying one
batch overlaps the daemon's work on another)::

    store   engine blocks --copy--> slots --demote--> daemon        slots free again
    load    daemon --promote--> slots --copy--> engine blocks       slots free again

One thread of our own does all the copying, so that the engine's step never waits. That is
sound because a load's blocks belong to a request that is parked until we report, and a
store's blocks are referenced by the scheduler side until we report. No batch holds slots
without an op that ends by itself, so slots always come back; what does not fit waits, until
the job's deadline, and is LATE then.

A slot whose op missed its deadline is not free before the op is quiesced, but the engine's
blocks never depend on it: the daemon only knows the buffer.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier import (
    NO_BLOCK,
    Internal,
    KvtierError,
    Layout,
    MoveResult,
    NotAttached,
    Op,
    Piece,
    Region,
    Session,
)
from kvtier.vllm.layout import KvLayout
from kvtier.vllm.meta import ComponentMoves, LoadJob, StoreJob
from kvtier.vllm.transfer import (
    LOADED,
    STORED,
    Transfer,
    TransferResult,
    as_client_moves,
    engine_blocks_of,
    failed,
    remaining_s,
    tally,
)

logger = logging.getLogger(__name__)

SLOT_ALIGN_BYTES = 4096
Bytes = npt.NDArray[np.uint8]


class BlockCopier(Protocol):
    """Copies kvtier blocks between the engine's memory and slots, in the daemon's order: piece by
    piece, and in each piece the engine blocks in order."""

    def fence(self) -> Any:
        """What the engine has written by now; taken in the step, handed to `gather`."""
        ...

    def gather(self, component: int, engine_blocks: Sequence[int], slot: Bytes, fence: Any) -> None:
        """Engine to slot."""
        ...

    def scatter(
        self, component: int, engine_blocks: Sequence[int], slot: Bytes, fence: Any
    ) -> None:
        """Slot to engine; NO_BLOCK is left out."""
        ...

    def settle(self) -> None:
        """Return when everything begun is done and the engine's next forward pass sees it."""
        ...


class HostCopier:
    """For engines on the CPU: plain memory copies."""

    def __init__(self, layout: KvLayout):
        self._layout = layout
        self._storages: list[Bytes] = [
            np.ctypeslib.as_array((ctypes.c_uint8 * s.bytes).from_address(s.address))
            for s in layout.storages
        ]

    def fence(self) -> None:
        """On the CPU the forward pass is over when the step calls us."""

    def gather(self, component: int, engine_blocks: Sequence[int], slot: Bytes, fence: Any) -> None:
        at = 0
        for piece in self._layout.layouts[component].pieces:
            memory = self._storages[piece.region_idx]
            for block in engine_blocks:
                begin = piece.offset_bytes + block * piece.stride_bytes
                slot[at : at + piece.bytes] = memory[begin : begin + piece.bytes]
                at += piece.bytes

    def scatter(
        self, component: int, engine_blocks: Sequence[int], slot: Bytes, fence: Any
    ) -> None:
        at = 0
        for piece in self._layout.layouts[component].pieces:
            memory = self._storages[piece.region_idx]
            for block in engine_blocks:
                if block != NO_BLOCK:
                    begin = piece.offset_bytes + block * piece.stride_bytes
                    memory[begin : begin + piece.bytes] = slot[at : at + piece.bytes]
                at += piece.bytes

    def settle(self) -> None:
        """Plain copies are done when they return."""


@dataclass(slots=True)
class _Entry:
    """One kvtier block of a job."""

    move_idx: int
    position: int  # in the move
    slot: int = -1


@dataclass(slots=True)
class _Batch:
    """Entries of a job that have slots, and the op that moves them."""

    transfer: StagedTransfer
    entries: list[_Entry]
    op: Op | None = None


class StagedTransfer:
    """A job on its way through the buffer. The copying thread owns all but the two events."""

    def __init__(
        self,
        moves: Sequence[ComponentMoves],
        *,
        timeout_s: float,
        good: frozenset[MoveResult],
        start_op: Callable[[list[ComponentMoves], float], Op],
        fence: Any,
        wake: Callable[[], None],
    ):
        self.moves = list(moves)
        self.timeout_s = timeout_s
        self.started_s = time.monotonic()
        self.good = good
        self.start_op = start_op
        self.fence = fence
        self.is_load = good is LOADED
        self.waiting = deque(
            _Entry(i, k) for i, m in enumerate(self.moves) for k in range(len(m.blocks))
        )
        self.states = [bytearray([MoveResult.ABORTED] * len(m.blocks)) for m in self.moves]
        self.batches: list[_Batch] = []
        self.bytes = 0
        self.error: KvtierError | None = None
        self.is_cancelled = threading.Event()
        self.is_over = threading.Event()
        self._wake = wake
        self._result: TransferResult | None = None

    def finished(self) -> bool:
        return self.is_over.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self.is_over.wait(timeout_s)

    def cancel(self) -> None:
        self.is_cancelled.set()
        self._wake()

    def result(self) -> TransferResult:
        if self._result is None:
            raise RuntimeError("result of a transfer that is not finished")
        return self._result

    def end(self) -> None:
        """Copying thread only: the last entry has its result."""
        out = tally(self.moves, [bytes(s) for s in self.states], self.good)
        out.is_ok = out.is_ok and self.error is None
        out.bytes, out.error = self.bytes, self.error
        out.seconds = time.monotonic() - self.started_s
        self._result = out
        self.is_over.set()


@dataclass(slots=True)
class _Queues:
    """Jobs that still have entries without a slot. Loads go first: somebody waits for them."""

    loads: deque[StagedTransfer] = field(default_factory=deque)
    stores: deque[StagedTransfer] = field(default_factory=deque)

    def first(self) -> StagedTransfer | None:
        for jobs in (self.loads, self.stores):
            if jobs:
                return jobs[0]
        return None

    def all(self) -> list[StagedTransfer]:
        return [*self.loads, *self.stores]

    def of(self, transfer: StagedTransfer) -> deque[StagedTransfer]:
        return self.loads if transfer.is_load else self.stores


class StagingKv:
    """The buffer, its slots and the copying thread."""

    name = "staging"

    def __init__(
        self,
        layout: KvLayout,
        copier: BlockCopier,
        staging_bytes: int,
        create: Callable[[int], Region] = Region.create,
    ):
        """Raises ValueError when not even one block fits into `staging_bytes`."""
        self._block_bytes = [layout.bytes_per_block(i) for i in range(len(layout.layouts))]
        slot_bytes = -(-max(self._block_bytes) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        slots = staging_bytes // slot_bytes
        if slots < 1:
            raise ValueError(
                f"staging_bytes={staging_bytes} is less than one block of {slot_bytes} bytes"
            )
        self._slot_bytes = slot_bytes
        self._copier = copier
        self._region = create(slots * slot_bytes)
        self._memory: Bytes = np.frombuffer(self._region.memory, dtype=np.uint8)
        self._free = list(range(slots))
        self._batch_max = max(1, slots // 4)
        self._queues = _Queues()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.regions = (self._region,)
        self.layouts = tuple(
            Layout(
                component=i,
                engine_blocks_per_block=1,
                pieces=(Piece(region_idx=0, bytes=n, offset_bytes=0, stride_bytes=slot_bytes),),
            )
            for i, n in enumerate(self._block_bytes)
        )

    # ---- called by the step ------------------------------------------------------------------

    def load(self, session: Session, job: LoadJob) -> Transfer:
        def start(moves: list[ComponentMoves], timeout_s: float) -> Op:
            return session.promote(as_client_moves(moves), lease=job.lease, timeout_s=timeout_s)

        return self._submit(session, job, LOADED, start)

    def store(self, session: Session, job: StoreJob) -> Transfer:
        def start(moves: list[ComponentMoves], timeout_s: float) -> Op:
            return session.demote(as_client_moves(moves), ticket=job.ticket, timeout_s=timeout_s)

        return self._submit(session, job, STORED, start)

    def close(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(timeout_s)

    def _submit(
        self,
        session: Session,
        job: LoadJob | StoreJob,
        good: frozenset[MoveResult],
        start: Callable[[list[ComponentMoves], float], Op],
    ) -> Transfer:
        if not session.attached:
            return failed(job.moves, _not_attached(session))
        if self._thread is None:  # not in the constructor: the engine may fork after it
            self._thread = threading.Thread(target=self._run, name="kvtier-staging", daemon=True)
            self._thread.start()
        transfer = StagedTransfer(
            job.moves,
            timeout_s=job.timeout_s,
            good=good,
            start_op=start,
            fence=self._copier.fence(),
            wake=lambda: self._events.put(self._pump),
        )
        self._events.put(lambda: self._admit(transfer))
        return transfer

    # ---- the copying thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._next_event()) is not None:
            event()

    def _next_event(self) -> Callable[[], None] | None:
        """The next event; while jobs wait for slots, look at their deadlines now and then."""
        timeout_s = 0.05 if self._queues.first() else None
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return self._pump

    def _admit(self, transfer: StagedTransfer) -> None:
        if transfer.waiting:
            self._queues.of(transfer).append(transfer)
            self._pump()
        else:
            transfer.end()

    def _pump(self) -> None:
        """Give slots to who waits, and end what has no time left."""
        for transfer in self._queues.all():
            if transfer.is_cancelled.is_set():
                self._give_up(transfer, MoveResult.ABORTED)
            elif not remaining_s(transfer.started_s, transfer.timeout_s):
                self._give_up(transfer, MoveResult.LATE)
        while self._free and (first := self._queues.first()) is not None:
            self._start_batch(first)

    def _give_up(self, transfer: StagedTransfer, state: MoveResult) -> None:
        """Begin no more of a job: its waiting entries get `state`, its ops are cancelled."""
        for entry in transfer.waiting:
            transfer.states[entry.move_idx][entry.position] = state
        transfer.waiting.clear()
        jobs = self._queues.of(transfer)
        if transfer in jobs:
            jobs.remove(transfer)
        for batch in transfer.batches:
            if batch.op is not None and transfer.is_cancelled.is_set():
                batch.op.cancel()
        if not transfer.batches:
            transfer.end()

    def _start_batch(self, transfer: StagedTransfer) -> None:
        count = min(len(self._free), self._batch_max, len(transfer.waiting))
        entries = [transfer.waiting.popleft() for _ in range(count)]
        for entry in entries:
            entry.slot = self._free.pop()
        if not transfer.waiting:
            self._queues.of(transfer).remove(transfer)
        batch = _Batch(transfer, entries)
        transfer.batches.append(batch)
        try:
            if not transfer.is_load:
                self._gather(batch)
            left_s = remaining_s(transfer.started_s, transfer.timeout_s)
            batch.op = transfer.start_op(_slot_moves(transfer.moves, entries), left_s)
        except KvtierError as error:
            self._end_batch(batch, (), error)
        except Exception as error:  # a copy failed: no reason to leave the request waiting for ever
            logger.exception("kvtier: copying blocks out of the engine failed")
            self._end_batch(batch, (), Internal(f"copy to the staging buffer: {error}"))
        else:
            batch.op.add_done_callback(lambda op: self._events.put(lambda: self._finish(batch, op)))

    def _finish(self, batch: _Batch, op: Op) -> None:
        outcome = op.result
        if outcome is None:
            self._end_batch(batch, (), Internal("the operation ended without an outcome"))
        else:
            batch.transfer.bytes += outcome.moved_bytes
            self._end_batch(batch, outcome.results, outcome.error)
        self._pump()

    def _end_batch(
        self, batch: _Batch, results: Sequence[bytes], error: KvtierError | None
    ) -> None:
        """Record what became of the entries, bring home what a load got, free the slots."""
        transfer = batch.transfer
        answered = _by_entry(batch.entries, results)
        for entry, state in zip(batch.entries, answered, strict=True):
            transfer.states[entry.move_idx][entry.position] = state
        if transfer.is_load:
            done = [e for e, s in zip(batch.entries, answered, strict=True) if s == MoveResult.DONE]
            error = self._scatter(transfer, done) or error
        self._free += [entry.slot for entry in batch.entries]
        transfer.batches.remove(batch)
        if error is not None:
            transfer.error = transfer.error or error
            self._give_up(transfer, MoveResult.ABORTED)
        elif not transfer.batches and not transfer.waiting:
            transfer.end()

    def _gather(self, batch: _Batch) -> None:
        for entry in batch.entries:
            moves = batch.transfer.moves[entry.move_idx]
            self._copier.gather(
                moves.component,
                engine_blocks_of(moves, entry.position),
                self._slot(entry.slot, moves.component),
                batch.transfer.fence,
            )
        self._copier.settle()

    def _scatter(self, transfer: StagedTransfer, entries: Sequence[_Entry]) -> KvtierError | None:
        try:
            for entry in entries:
                moves = transfer.moves[entry.move_idx]
                self._copier.scatter(
                    moves.component,
                    engine_blocks_of(moves, entry.position),
                    self._slot(entry.slot, moves.component),
                    transfer.fence,
                )
            self._copier.settle()
        except Exception as error:  # the load failed; the request computes its blocks
            logger.exception("kvtier: copying blocks into the engine failed")
            return Internal(f"copy from the staging buffer: {error}")
        return None

    def _slot(self, slot: int, component: int) -> Bytes:
        begin = slot * self._slot_bytes
        return self._memory[begin : begin + self._block_bytes[component]]


def _slot_moves(moves: Sequence[ComponentMoves], entries: Sequence[_Entry]) -> list[ComponentMoves]:
    """The entries as the daemon sees them: slots are the engine blocks. Entries are in the job's
    order, so there is one part for each of the job's moves that occurs, in order."""
    out: dict[int, ComponentMoves] = {}
    for entry in entries:
        move = moves[entry.move_idx]
        part = out.setdefault(
            entry.move_idx, ComponentMoves(component=move.component, blocks=[], engine_blocks=[])
        )
        part.blocks.append(move.blocks[entry.position])
        part.engine_blocks.append(entry.slot)
    return list(out.values())


def _by_entry(entries: Sequence[_Entry], results: Sequence[bytes]) -> list[int]:
    """The result of each entry out of the answer to `_slot_moves`; ABORTED where there is none."""
    parts = list(dict.fromkeys(entry.move_idx for entry in entries))
    rows = {part: iter(row) for part, row in zip(parts, results, strict=False)}
    return [next(rows.get(e.move_idx, iter(())), int(MoveResult.ABORTED)) for e in entries]


def _not_attached(session: Session) -> KvtierError:
    return session.last_error or NotAttached("the session is not attached")
