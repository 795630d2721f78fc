"""A daemon in memory, with the session and client that the connector sees, for tests.

A naive model: a stored block is a set of components under the hash of everything before it; lookup
tries every boundary. It accounts for what it gave out, so that a test can ask at its end that
nothing is held, and it breaks the test when a handle is released twice.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvtierError,
    NotFound,
)
from kvtier.types import (
    BlockRange,
    ComponentMatch,
    Cursor,
    Kind,
    Lease,
    LookupResult,
    ModelSpec,
    Reservation,
    ReserveState,
    Ticket,
    Why,
)

Key = bytes
#: What a store read of a block: what the test laid into engine memory, one for each engine block.
Payload = tuple[Any, ...]


@dataclass
class Held:
    """A lease or ticket that is out: the blocks that it is for."""

    session: FakeSession
    path: list[Key]
    cells: set[tuple[int, int]] = field(default_factory=set)
    root: bytes = b""


class FakeDaemon:
    """What survives sessions; `restart` forgets everything, as a daemon without L3 does."""

    def __init__(self) -> None:
        self.boot = 1
        self.is_up = True
        self.is_late = False
        self.no_room = False
        self.lease_blocks_max = 1 << 30  # of one lease
        self.on_call: Callable[[], None] = lambda: None  # what time a call takes
        self.blocks: dict[Key, dict[int, Payload]] = {}
        self.leases: dict[bytes, Held] = {}
        self.tickets: dict[bytes, Held] = {}
        self.calls: list[str] = []
        self.sessions: list[FakeSession] = []
        self._handles = itertools.count(1)

    def restart(self) -> None:
        self.boot += 1
        self.blocks.clear()
        self.leases.clear()
        self.tickets.clear()

    def new_handle(self) -> bytes:
        return next(self._handles).to_bytes(24, "little")

    def path_of(
        self,
        spec: ModelSpec,
        root: bytes,
        tokens: Any,
        extra: dict[int, bytes],
        before: Key | None = None,
    ) -> list[Key]:
        """The name of each whole block: a hash of all that leads to it."""
        key = before or hashlib.sha256(repr(spec).encode() + root).digest()
        size = spec.block_tokens
        array = np.asarray(tokens, dtype="<u4")
        path = []
        for at in range(len(array) // size):
            part = array[at * size : (at + 1) * size].tobytes() + extra.get(at, b"")
            key = hashlib.sha256(key + part).digest()
            path.append(key)
        return path

    def has(self, path: Sequence[Key], block: int, component: int) -> bool:
        return component in self.blocks.get(path[block], {})

    def accepts(self, spec: ModelSpec, path: Sequence[Key], blocks: int) -> bool:
        """Whether an engine may resume after so many blocks."""
        return all(
            self.has(path, block, number)
            for number, component in enumerate(spec.components)
            for block in needed(spec, component, blocks)
        )

    def demote(self, ticket: bytes, component: int, block: int, payload: Payload) -> bool:
        """A worker gives a block; all ranks at once."""
        held = self.tickets.get(ticket)
        if held is None or (component, block) not in held.cells:
            return False
        self.blocks.setdefault(held.path[block], {})[component] = payload
        held.cells.discard((component, block))
        return True

    def promote(self, lease: bytes, component: int, block: int) -> Payload | None:
        """A worker takes a block."""
        held = self.leases.get(lease)
        if held is None or block >= len(held.path):
            return None
        return self.blocks.get(held.path[block], {}).get(component)


def needed(spec: ModelSpec, component: Any, blocks: int) -> range:
    """Blocks of a component that a boundary needs; the daemon's rule."""
    if blocks == 0:
        return range(0)
    if component.kind is Kind.STATE:
        return range(blocks - 1, blocks)
    if component.kind is Kind.SLIDING_WINDOW:
        tokens = blocks * spec.block_tokens
        return range(max(0, tokens - component.window_tokens) // spec.block_tokens, blocks)
    return range(blocks)


class FakeSession:
    """A scheduler's session; it attaches to a restarted daemon when a test says so."""

    def __init__(self, daemon: FakeDaemon, spec: ModelSpec) -> None:
        self.daemon = daemon
        self.spec = spec
        self.generation = 1
        self.boot = daemon.boot
        self.is_closed = False
        self.epoch = 0
        self.daemon_pid: int | None = 1
        self.last_error: KvtierError | None = None
        self.cursors: dict[bytes, tuple[bytes, list[Key]]] = {}
        self.sent_tokens: list[int] = []  # of each call

    @property
    def attached(self) -> bool:
        return self.daemon.is_up and not self.is_closed and self.boot == self.daemon.boot

    def reattach(self) -> None:
        if self.boot != self.daemon.boot:
            self.boot = self.daemon.boot
            self.generation += 1
            self.cursors.clear()

    def _enter(self, call: str) -> None:
        assert not self.is_closed
        self.daemon.calls.append(call)
        self.daemon.on_call()
        if self.daemon.is_late:
            raise DeadlineExceeded("late")
        if not self.attached:
            raise FailedPrecondition("not attached")

    def _path(
        self,
        root: bytes,
        tokens: Any,
        extra_keys: Sequence[tuple[int, bytes]],
        cursor: Cursor | None,
    ) -> tuple[bytes, list[Key]]:
        before: list[Key] = []
        self.sent_tokens.append(len(tokens))
        if cursor is not None:
            if cursor.generation != self.generation:
                raise FailedPrecondition("cursor of another generation")
            if cursor.handle not in self.cursors:
                raise NotFound("cursor stale: send the whole prefix")
            root, before = self.cursors[cursor.handle]
            assert len(before) * self.spec.block_tokens == cursor.tokens
        last = before[-1] if before else None
        path = self.daemon.path_of(self.spec, root, tokens, dict(extra_keys), last)
        return root, before + path

    def _cursor(self, root: bytes, path: list[Key]) -> Cursor | None:
        if not path:
            return None
        handle = self.daemon.new_handle()
        self.cursors[handle] = (root, path)
        return Cursor(handle, len(path) * self.spec.block_tokens, self.generation)

    def lookup(
        self,
        tokens: Any,
        *,
        salt: bytes = b"",
        lora: bytes = b"",
        cursor: Cursor | None = None,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        limit_tokens: int = 0,
        lease_s: float | None = None,
        timeout_s: float | None = None,
        **_: Any,
    ) -> LookupResult:
        self._enter("lookup")
        assert timeout_s is not None
        size = self.spec.block_tokens
        root, path = self._path(repr((salt, lora)).encode(), tokens, extra_keys, cursor)
        known = next((i for i, key in enumerate(path) if key not in self.daemon.blocks), len(path))
        limit = (limit_tokens or len(path) * size) // size
        most = min(known, limit)
        blocks = next((b for b in range(most, 0, -1) if self.daemon.accepts(self.spec, path, b)), 0)
        matches = []
        for number in range(len(self.spec.components)):
            alone = next((i for i in range(known) if not self.daemon.has(path, i, number)), known)
            matches.append(ComponentMatch(alone * size, 0, (0, 0, 0), (0, 0, 0), Why.NONE, 0))
        is_limited = lease_s is not None and blocks > self.daemon.lease_blocks_max
        blocks = min(blocks, self.daemon.lease_blocks_max) if is_limited else blocks
        lease = None
        if blocks and lease_s is not None:
            lease = Lease(self.daemon.new_handle(), lease_s, self.generation)
            self.daemon.leases[lease.handle] = Held(self, path[:blocks])
        full = [
            m.alone_tokens
            for m, c in zip(matches, self.spec.components, strict=True)
            if c.kind is Kind.FULL
        ]
        return LookupResult(
            blocks * size,
            known * size,
            min(full, default=0),
            0,
            tuple(matches),
            self._cursor(root, path[:known]),
            lease,
            0,
            is_limited,
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
        timeout_s: float | None = None,
        **_: Any,
    ) -> Reservation:
        self._enter("reserve")
        assert timeout_s is not None
        root, path = self._path(repr((salt, lora)).encode(), tokens, extra_keys, cursor)
        pending = {(h.path[b], c) for h in self.daemon.tickets.values() for c, b in h.cells}
        held = Held(self, path, root=root)
        states = []
        assert len(wants) <= 32
        for want in wants:
            if not 0 <= want.first <= want.end <= len(path):
                raise InvalidArgument(f"blocks {want.first}..{want.end} of {len(path)}")
            row = []
            for block in range(want.first, want.end):
                if self.daemon.has(path, block, want.component):
                    row.append(ReserveState.PRESENT)
                elif (path[block], want.component) in pending:
                    row.append(ReserveState.PENDING)
                elif self.daemon.no_room:
                    row.append(ReserveState.NO_ROOM)
                else:
                    row.append(ReserveState.MISSING)
                    held.cells.add((want.component, block))
            states.append(bytes(row))
        ticket = None
        if held.cells:
            ticket = Ticket(self.daemon.new_handle(), 30.0, self.generation)
            self.daemon.tickets[ticket.handle] = held
        return Reservation(ticket, tuple(states), self._cursor(root, path), 0)

    def release(self, handle: Lease | Ticket | bytes) -> None:
        assert not isinstance(handle, bytes)
        table = self.daemon.leases if isinstance(handle, Lease) else self.daemon.tickets
        if handle.generation != self.generation or self.boot != self.daemon.boot:
            return  # of a daemon that is gone
        assert handle.handle in table, "released twice, or never given"
        del table[handle.handle]

    def close(self, timeout_s: float = 5.0) -> None:
        self.is_closed = True


class FakeClient:
    """Attaches at once."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.sessions: list[FakeSession] = []
        self.is_closed = False

    def attach(self, spec: ModelSpec, **_: Any) -> Any:
        session = FakeSession(self.daemon, spec)
        self.sessions.append(session)
        self.daemon.sessions.append(session)
        return session

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


Factory = Callable[[], FakeClient]
