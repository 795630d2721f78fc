"""A promote or demote under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtier.types import Outcome


class Op(Protocol):
    """What `Session.promote` and `Session.demote` give back.

    started_s is on time.monotonic(). result is None until the daemon answered or the deadline
    passed; that alone does not give the client's memory back, finished() does.
    """

    op_id: int
    started_s: float

    @property
    def result(self) -> Outcome | None: ...

    def finished(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool: ...

    def add_done_callback(self, fn: Callable[[Op], None]) -> None: ...

    def cancel(self) -> None: ...
