"""A promote or demote under way, as its caller sees it.

An interface, so that tests of an engine can put a fake in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtier.types import Outcome


class Op(Protocol):
    """What `Session.promote` and `Session.demote` give back. Any thread may use it.

    Two things happen to an operation, and the first does not imply the second: it gets a `result`
    (an answer, an error, or its deadline passed), and it is `finished()`: from then on no thread
    of the daemon touches the engine's memory on its behalf, and the blocks are the caller's again.
    """

    op_id: int
    #: On time.monotonic().
    started_s: float

    @property
    def result(self) -> Outcome | None:
        """None while the operation runs within its deadline."""

    def finished(self) -> bool:
        """True when there is a result and the operation is quiesced: the daemon said so, or its
        process ended. Never becomes false again."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until finished, at most timeout_s; whether it is."""

    def add_done_callback(self, fn: Callable[[Op], None]) -> None:
        """Calls fn(op) once finished, from a thread of the client (soon, if it is already). fn
        must not block; what it raises is logged."""

    def cancel(self) -> None:
        """Asks the daemon to drop what has not begun. finished() still waits for the rest."""
