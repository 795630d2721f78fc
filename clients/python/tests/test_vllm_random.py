"""The scheduler half in random but legal orders of calls, against the engine and daemon of the
tests. What is checked is in those: no wrong content is read, no block is reused while a job uses
it, nothing is offered that is not there, everything is given back exactly once."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest

from kvtier.types import Kind
from kvtier.vllm.options import Options
from kvtier.vllm.scheduler import SchedulerSide
from vllm_daemon import Clock, FakeClient, FakeDaemon
from vllm_engine import FakeEngine
from vllm_pool import geometry_of

FULL = (Kind.FULL, 0, 1, 4)
SHAPES: dict[str, Any] = {
    "full": (8, [FULL]),
    "full_equal_blocks": (8, [(Kind.FULL, 0, 1, 8)]),
    "hybrid": (8, [(Kind.SLIDING_WINDOW, 10, 3, 4), FULL]),
    "narrow_window": (16, [(Kind.SLIDING_WINDOW, 3, 1, 4), FULL]),
    "window_only": (8, [(Kind.SLIDING_WINDOW, 13, 2, 8)]),
    "state": (8, [(Kind.STATE, 0, 2, 8), (Kind.FULL, 0, 1, 8)]),
    "everything": (8, [(Kind.STATE, 0, 1, 8), (Kind.SLIDING_WINDOW, 11, 2, 4), FULL]),
}


def make(shape: str, seed: int, **options: Any) -> tuple[FakeEngine, Clock]:
    rng = Random(seed)
    block_tokens, components = SHAPES[shape]
    ranks = rng.choice([1, 1, 2, 3])
    groups = sum(component[2] for component in components)  # the longest prompt just fits
    geometry = geometry_of(
        block_tokens, components, ranks, pool_blocks=rng.choice([45, 60, 100]) * groups
    )
    daemon, clock = FakeDaemon(), Clock()
    side = SchedulerSide(
        Options(store_blocks_max=rng.choice([0.1, 0.25, 1.0]), **options),
        geometry,
        b"e" * 16,
        lambda: FakeClient(daemon),
        clock=clock,
    )
    engine = FakeEngine(
        geometry,
        side,
        daemon,
        rng,
        chunk=rng.choice([5, 16, 32]),
        running_max=rng.choice([1, 2, 4]),
        has_own_cache=rng.random() < 0.6,
        lends_pool=rng.random() < 0.8,
    )
    daemon.on_call = lambda: clock.sleep(rng.choice([0.0, 0.0, 0.001, 0.015]))
    engine.workers.failure_rate = rng.choice([0.0, 0.0, 0.1, 0.5])
    return engine, clock


def prompt(rng: Random, size: int) -> list[int]:
    """Of a few families, so that prompts share beginnings of every length."""
    family = Random(rng.randrange(3))
    base = [family.randrange(50) for _ in range(10 * size)]
    cut = rng.randrange(1, 7 * size)
    if rng.random() < 0.3:
        cut = cut // size * size or size
    return base[:cut] + [rng.randrange(50) for _ in range(rng.choice([0, 0, 1, size, 2 * size]))]


def event(engine: FakeEngine, clock: Clock, number: int) -> None:
    rng, daemon = engine.rng, engine.daemon
    dice = rng.random()
    if dice < 0.25:
        salt = rng.choice([None, None, "a"])
        engine.add(
            f"r{number}",
            prompt(rng, engine.geometry.block_tokens),
            rng.choice([1, 2, 20]),
            cache_salt=salt,
        )
    elif dice < 0.32:
        alive = [*engine.waiting, *engine.running]
        if alive:
            engine.abort(rng.choice(alive).id)
    elif dice < 0.34:
        daemon.restart()
    elif dice < 0.40:
        for session in daemon.sessions:
            session.reattach()
    elif dice < 0.42:
        daemon.is_late = not daemon.is_late
    elif dice < 0.43:
        daemon.no_room = not daemon.no_room
    elif dice < 0.45 and engine.running:
        engine.preempt(rng.choice(engine.running))
    elif dice < 0.46:
        evict(engine)
    elif dice < 0.464:
        engine.new_weights()
    else:
        clock.sleep(rng.choice([0.0, 0.01, 0.3, 2.0, 20.0]))
        engine.step()


def evict(engine: FakeEngine) -> None:
    """The daemon drops components that no lease holds."""
    daemon = engine.daemon
    held = {key for lease in daemon.leases.values() for key in lease.path}
    for key in [k for k in daemon.blocks if k not in held and engine.rng.random() < 0.3]:
        daemon.blocks[key].pop(engine.rng.randrange(len(engine.geometry.components)), None)
        if not daemon.blocks[key]:
            del daemon.blocks[key]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"store": "all", "window_store": "all"}, {"load": "sync"}],
    ids=["default", "all", "sync"],
)
def test_random_orders(shape: str, options: dict[str, Any]) -> None:
    first = int(os.environ.get("KVTIER_TEST_SEED", "1"))
    rounds = int(os.environ.get("KVTIER_TEST_ROUNDS", "6"))
    loaded = 0
    for seed in range(first, first + rounds):
        print(f"seed {seed}")  # pytest shows it when the test fails
        engine, clock = make(shape, seed, **options)
        for number in range(250):
            event(engine, clock, number)
        engine.daemon.is_late = engine.daemon.no_room = False
        for session in engine.daemon.sessions:
            session.reattach()
        clock.sleep(60.0)
        engine.drain()
        loaded += engine.loaded_tokens
    assert loaded > 0 or options.get("load") == "sync"
