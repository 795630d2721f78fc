"""A session with the daemon: what an engine's scheduler or worker holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

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


class Session(Protocol):
    """What `Client.attach` gives back; every call is thread-safe and bounded by its timeout."""

    @property
    def attached(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def daemon_pid(self) -> int | None: ...

    @property
    def last_error(self) -> KvtierError | None: ...

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
    ) -> LookupResult: ...

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
    ) -> Reservation: ...

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
    ) -> Op: ...

    def demote(
        self,
        moves: Sequence[Moves],
        *,
        ticket: Ticket | bytes | None = None,
        tokens: Any = None,
        salt: bytes = b"",
        lora: bytes = b"",
        cursor: Cursor | None = None,
        timeout_s: float | None = None,
        durable: bool = False,
        inline_data: bytes = b"",
    ) -> Op: ...

    def release(self, handle: Lease | Ticket | bytes) -> None: ...

    def close(self, timeout_s: float = 5.0) -> None: ...
