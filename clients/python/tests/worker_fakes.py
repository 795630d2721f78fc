"""Stand-ins for the worker half's surroundings: engine tensors, sessions, and a daemon that copies.

`FakeDaemon` keeps block payloads by (component, block) and moves them between its store and the
regions exactly as docs/api.md describes layouts, so that a test sees the bytes a real one would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import (
    NO_BLOCK,
    KvtierError,
    Layout,
    MoveResult,
    Moves,
    Op,
    Outcome,
    Region,
)

Bytes = npt.NDArray[np.uint8]


class FakeStorage:
    def __init__(self, memory: Bytes):
        self.memory = memory

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)

    def nbytes(self) -> int:
        return self.memory.nbytes


class FakeTensor:
    """A torch tensor's shape over one allocation; strides and offset are in elements."""

    def __init__(
        self,
        storage: FakeStorage,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int = 0,
        element_size: int = 1,
    ):
        self._storage = storage
        self.shape = tuple(shape)
        self._strides = tuple(strides)
        self._offset = offset
        self._element_size = element_size

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._element_size

    def data_ptr(self) -> int:
        return self._storage.data_ptr() + self._offset * self._element_size

    def untyped_storage(self) -> FakeStorage:
        return self._storage

    def page(self, block: int, parts: int = 1) -> bytes:
        """The bytes of a block, in the order of their addresses."""
        view = np.lib.stride_tricks.as_strided(
            self._storage.memory[self._offset * self._element_size :],
            shape=(*self.shape, self._element_size),
            strides=(*(s * self._element_size for s in self._strides), 1),
        )
        rows = view[block * parts : (block + 1) * parts]
        order = sorted(range(rows.ndim), key=lambda axis: -rows.strides[axis])
        return rows.transpose(order).tobytes()


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for count in reversed(shape[1:]):
        strides.insert(0, strides[0] * count)
    return tuple(strides)


class FakeOp:
    """An op that ends when the test says so."""

    def __init__(self, op_id: int = 1):
        self.op_id = op_id
        self.started_s = 0.0
        self.result: Outcome | None = None
        self.is_cancelled = False
        self._finished = threading.Event()
        self._callbacks: list[Callable[[Op], None]] = []

    def finished(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)

    def add_done_callback(self, fn: Callable[[Op], None]) -> None:
        if self.finished():
            fn(self)
        else:
            self._callbacks.append(fn)

    def cancel(self) -> None:
        self.is_cancelled = True

    def answer(
        self, results: Sequence[bytes], moved_bytes: int = 0, error: KvtierError | None = None
    ) -> None:
        """The daemon answered (or the deadline passed), but is not out of our memory yet."""
        self.result = Outcome(tuple(results), moved_bytes, (0, 0, 0), error, 0.25)

    def finish(
        self, results: Sequence[bytes], moved_bytes: int = 0, error: KvtierError | None = None
    ) -> None:
        self.answer(results, moved_bytes, error)
        self.quiesce()

    def quiesce(self) -> None:
        self._finished.set()
        for fn in self._callbacks:
            fn(self)


class FakeSession:
    """Records calls; with a daemon, it also does them."""

    def __init__(self, daemon: FakeDaemon | None = None):
        self.attached = True
        self.generation = 1
        self.epoch = 1
        self.daemon_pid: int | None = 4711
        self.last_error: KvtierError | None = None
        self.daemon = daemon
        self.raises: KvtierError | None = None
        self.is_closed = False
        self.calls: list[tuple[str, tuple[Moves, ...], bytes, float | None]] = []
        self.ops: list[FakeOp] = []
        self.on_op: Callable[[FakeOp], None] = lambda op: None  # an operation has begun
        self.attach_args: dict[str, Any] = {}

    def promote(
        self, moves: Sequence[Moves], *, lease: bytes, timeout_s: float | None = None
    ) -> FakeOp:
        return self._call("promote", moves, lease, timeout_s)

    def demote(
        self, moves: Sequence[Moves], *, ticket: bytes, timeout_s: float | None = None
    ) -> FakeOp:
        return self._call("demote", moves, ticket, timeout_s)

    def _call(
        self, name: str, moves: Sequence[Moves], handle: bytes, timeout_s: float | None
    ) -> FakeOp:
        if self.raises is not None:
            raise self.raises
        self.calls.append((name, tuple(moves), handle, timeout_s))
        op = FakeOp(len(self.calls))
        self.ops.append(op)
        if self.daemon is not None:
            self.daemon.do(name, self, moves, op)
        self.on_op(op)
        return op

    def close(self, timeout_s: float = 5.0) -> None:
        self.is_closed = True


class FakeClient:
    """Gives sessions; keeps what they were attached with."""

    def __init__(self, daemon: FakeDaemon | None = None):
        self.daemon = daemon
        self.sessions: list[FakeSession] = []
        self.is_closed = False
        self.is_there = True

    def attach(self, spec: Any, **args: Any) -> Any:
        session = FakeSession(self.daemon)
        session.attached = self.is_there
        session.generation = int(self.is_there)
        session.attach_args = {"spec": spec, **args}
        self.sessions.append(session)
        return session

    def close(self) -> None:
        self.is_closed = True


class FakeDaemon:
    """Copies between regions and a dict, at once or when the test lets it."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], bytes] = {}
        self.lost: set[tuple[int, int]] = set()
        self.held: list[Callable[[], None]] | None = None

    def hold(self) -> None:
        """From now on ops wait for `let_go`."""
        self.held = []

    def let_go(self) -> None:
        held, self.held = self.held or [], None
        for do in held:
            do()

    def do(self, name: str, session: FakeSession, moves: Sequence[Moves], op: FakeOp) -> None:
        def run() -> None:
            args = session.attach_args
            results, moved = [], 0
            for m in moves:
                row = bytearray()
                for i, block in enumerate(m.blocks):
                    result, size = self._move(name, args["regions"], args["layouts"], m, i, block)
                    row.append(result)
                    moved += size
                results.append(bytes(row))
            op.finish(results, moved)

        if self.held is None:
            run()
        else:
            self.held.append(run)

    def _move(
        self,
        name: str,
        regions: Sequence[Region],
        layouts: Sequence[Layout],
        moves: Moves,
        position: int,
        block: int,
    ) -> tuple[int, int]:
        layout = layouts[moves.component]
        per = layout.engine_blocks_per_block
        ids = [int(b) for b in moves.engine_blocks[position * per : (position + 1) * per]]
        key = (moves.component, block)
        if name == "demote":
            self.blocks[key] = b"".join(
                regions[p.region_idx].memory[o : o + p.bytes].tobytes()
                for p in layout.pieces
                for o in (p.offset_bytes + b * p.stride_bytes for b in ids)
            )
            return MoveResult.DONE, len(self.blocks[key])
        payload = None if key in self.lost else self.blocks.get(key)
        if payload is None:
            return MoveResult.MISS, 0
        at = 0
        for p in layout.pieces:
            for b in ids:
                if b != NO_BLOCK:
                    o = p.offset_bytes + b * p.stride_bytes
                    regions[p.region_idx].memory[o : o + p.bytes] = payload[at : at + p.bytes]
                at += p.bytes
        return MoveResult.DONE, len(payload)
