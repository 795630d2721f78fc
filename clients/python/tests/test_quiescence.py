"""finished() is a promise: from then on the daemon writes no byte of the operation's blocks.

Loads with short deadlines run while the daemon is stopped and continued, operations and whole
streams are cancelled, and the daemon is killed and started again. As soon as an operation is
finished its blocks are painted; whatever is painted must stay so until the blocks are used again.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import numpy as np
import pytest

import engine
import kvtier
from daemon import Daemon
from engine import WAIT_S, Cache

BLOCK_BYTES = 128 << 10  # a load takes longer than the shortest deadline
STORED_BLOCKS = 32
LOAD_BLOCKS = 32  # of one operation
SLOTS = 8  # operations at a time
SECONDS, SECONDS_MAX = 5.0, 60.0  # the latter on a machine that gets little done in the former
FINISHED_MIN = 20  # with fewer the test means little
DRY_S = 0.1  # how long paint is watched
PAINT = 0x5A


class Slots:
    """Engine blocks of operations: free, in use, or painted and watched."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.free = deque(range(SLOTS))
        self._running: list[tuple[int, Any]] = []
        self._painted: deque[tuple[float, int]] = deque()
        self.finished = 0
        self.failed = 0

    def blocks(self, slot: int) -> Any:
        first = STORED_BLOCKS + slot * LOAD_BLOCKS
        return self._cache.blocks[first : first + LOAD_BLOCKS]

    def begin(self, session: Any, lease: Any, timeout_s: float) -> None:
        slot = self.free.popleft()
        first = STORED_BLOCKS + slot * LOAD_BLOCKS
        moves = [kvtier.Moves(0, range(LOAD_BLOCKS), engine.ids(first, LOAD_BLOCKS))]
        try:
            op = session.promote(moves, lease=lease, timeout_s=timeout_s)
        except kvtier.KvtierError:
            self.free.append(slot)
            return
        self._running.append((slot, op))

    def ops(self) -> list[Any]:
        return [op for _, op in self._running]

    def is_worth_more(self, seconds: float) -> bool:
        has_enough = self.finished > FINISHED_MIN and self.failed > 0
        return seconds < (SECONDS if has_enough else SECONDS_MAX)

    def look(self) -> None:
        """Paints what is finished, checks what was painted."""
        now_s = time.monotonic()
        still = []
        for slot, op in self._running:
            if not op.finished():
                still.append((slot, op))
                continue
            self.blocks(slot)[:] = PAINT
            self._painted.append((now_s + DRY_S, slot))
            self.finished += 1
            self.failed += not op.result.all_done
        self._running = still
        while self._painted and self._painted[0][0] <= now_s:
            slot = self._painted.popleft()[1]
            assert (self.blocks(slot) == PAINT).all(), "written after it was finished"
            self.free.append(slot)


def lease_of(session: Any, cache: Cache) -> Any:
    """A lease on the stored prompt, which is stored first if the daemon is a new one."""
    prompt = engine.tokens(STORED_BLOCKS)
    try:
        found = session.lookup(prompt, lease_s=60)
        if found.lease is None:
            moves = [kvtier.Moves(0, range(STORED_BLOCKS), engine.ids(0, STORED_BLOCKS))]
            session.demote(moves, tokens=prompt, timeout_s=WAIT_S).wait(WAIT_S)
            found = session.lookup(prompt, lease_s=60)
    except kvtier.KvtierError:
        return None
    return found.lease


def disturb(dice: random.Random, daemon: Daemon, session: Any, slots: Slots) -> None:
    kind = dice.choice(("stop", "stop", "cancel", "stream", "stop and stream", "kill"))
    if "stop" in kind:
        daemon.stop()
        time.sleep(dice.uniform(0.0, 0.15))
    if "stream" in kind and (stream := session._attacher._stream) is not None:
        stream.cancel()
    if kind == "cancel":
        for op in slots.ops():
            op.cancel()
    if "stop" in kind:
        slots.look()
        daemon.go_on()
    if kind == "kill" and dice.random() < 0.3:
        daemon.kill()
        daemon.start()


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_finished_stays_as_it_is(daemon: Daemon, seed: int) -> None:
    dice = random.Random(seed)
    cache = Cache(STORED_BLOCKS + SLOTS * LOAD_BLOCKS, BLOCK_BYTES)
    slots = Slots(cache)
    with kvtier.Client(daemon.socket, timeout_s=WAIT_S) as client:
        session = engine.attach(client, cache, spec=engine.spec(block_bytes=BLOCK_BYTES))
        content = cache.fill(0, STORED_BLOCKS, seed)
        began_s = time.monotonic()
        disturb_s = 0.0
        while slots.is_worth_more(time.monotonic() - began_s):
            slots.look()
            lease = lease_of(session, cache) if slots.free else None
            while lease is not None and slots.free:
                slots.begin(session, lease, dice.choice((0.001, 0.003, 0.01, 1.0)))
            if time.monotonic() > disturb_s:
                disturb(dice, daemon, session, slots)
                disturb_s = time.monotonic() + dice.uniform(0.02, 0.1)
        assert all(op.wait(WAIT_S) for op in slots.ops())
        slots.look()
        time.sleep(2 * DRY_S)
        slots.look()
        assert np.array_equal(cache.blocks[:STORED_BLOCKS], content)
        assert slots.finished > FINISHED_MIN
        assert slots.failed > 0, "nothing was disturbed"
