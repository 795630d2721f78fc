"""One job's movement of bytes on one rank, whichever way they take.

A transfer is begun by a memory (`memory.KvMemory`) and owned by `worker.WorkerSide`.
It is *finished* when it has a result and when nobody but the engine touches the
engine's blocks of the job any more: not before, whatever deadline passed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtier import NO_BLOCK, Internal, KvtierError, MoveResult, Moves, Op
from kvtier.vllm.meta import ComponentMoves

#: Results that mean "the block is where it should be".
LOADED = frozenset({MoveResult.DONE})
STORED = frozenset({MoveResult.DONE, MoveResult.PRESENT})


@dataclass(slots=True)
class TransferResult:
    """What became of a job on this rank. `results` counts kvtier blocks by MoveResult value;
    `error` is set when a call failed."""

    is_ok: bool
    bytes: int = 0
    results: dict[int, int] = field(default_factory=dict)
    bad_engine_blocks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    error: KvtierError | None = None


class Transfer(Protocol):
    """A movement under way."""

    def finished(self) -> bool:
        """It is over and the engine's blocks are the engine's again."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for `finished`, at most so long; answers what `finished` would."""
        ...

    def cancel(self) -> None:
        """Begin no more of it. It still finishes by itself."""
        ...

    def result(self) -> TransferResult:
        """Valid once finished."""
        ...


def engine_blocks_of(moves: ComponentMoves, position: int) -> list[int]:
    """The engine blocks of the kvtier block at a position of the moves, in order."""
    per = len(moves.engine_blocks) // len(moves.blocks)
    return moves.engine_blocks[position * per : (position + 1) * per]


def as_client_moves(moves: Sequence[ComponentMoves]) -> list[Moves]:
    return [
        Moves(
            component=m.component,
            blocks=m.blocks,
            engine_blocks=np.asarray(m.engine_blocks, dtype=np.uint64),
        )
        for m in moves
    ]


def tally(
    moves: Sequence[ComponentMoves], results: Sequence[bytes], good: frozenset[MoveResult]
) -> TransferResult:
    """Sum up one MoveResult byte a block. A block without a byte was not answered for: ABORTED."""
    out = TransferResult(is_ok=True)
    for i, component_moves in enumerate(moves):
        states = results[i] if i < len(results) else b""
        for position in range(len(component_moves.blocks)):
            state = states[position] if position < len(states) else int(MoveResult.ABORTED)
            out.results[state] = out.results.get(state, 0) + 1
            if state not in good:
                out.is_ok = False
                out.bad_engine_blocks += [
                    b for b in engine_blocks_of(component_moves, position) if b != NO_BLOCK
                ]
    return out


class OpTransfer:
    """A job that is one call to the daemon, which copies from and to the engine's blocks."""

    def __init__(self, op: Op, moves: Sequence[ComponentMoves], good: frozenset[MoveResult]):
        self._op = op
        self._moves = moves
        self._good = good

    def finished(self) -> bool:
        return self._op.finished()

    def wait(self, timeout_s: float) -> bool:
        return self._op.wait(timeout_s)

    def cancel(self) -> None:
        self._op.cancel()

    def result(self) -> TransferResult:
        outcome = self._op.result
        if outcome is None:
            error = Internal("the operation ended without an outcome")
            return failed(self._moves, error).result()
        out = tally(self._moves, outcome.results, self._good)
        out.is_ok = out.is_ok and outcome.error is None
        out.bytes, out.seconds, out.error = outcome.moved_bytes, outcome.seconds, outcome.error
        return out


class EndedTransfer:
    """A job that was over before anything began: nothing touched the engine's blocks."""

    def __init__(self, result: TransferResult):
        self._result = result

    def finished(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def cancel(self) -> None:
        return

    def result(self) -> TransferResult:
        return self._result


def failed(moves: Sequence[ComponentMoves], error: KvtierError) -> EndedTransfer:
    """A job that could not begin. Names all its engine blocks as bad, also those that a job which
    was given up lists without saying what they were to hold."""
    result = tally(moves, (), frozenset())
    result.is_ok, result.error = False, error
    result.bad_engine_blocks = [b for m in moves for b in m.engine_blocks if b != NO_BLOCK]
    return EndedTransfer(result)


def remaining_s(started_s: float, timeout_s: float) -> float:
    """Seconds that are left of a timeout, at least 0."""
    return max(0.0, started_s + timeout_s - time.monotonic())
