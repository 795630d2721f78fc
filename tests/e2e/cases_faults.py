"""Cases (5), (6) and (8): the daemon is killed or stopped, stored bytes are damaged."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import corrupt
from cases_basic import LENGTHS, nothing, one_by_one, whole_prompts
from daemon import Daemon
from engine import Engine, Request, Result
from world import World, block_tokens, reusable

IMPATIENT_MS = 20  # the default of the connector's lookup_timeout_ms
BACK_SECONDS_MAX = 30
STALL_SECONDS = 5.0  # a machine may be busy; what waits for the daemon waits for half a minute
Damage = Callable[[Daemon, dict[str, Request]], None]
ONLY_L2 = ("tiers.l1.backend=none", "tiers.l1.bytes=0B")


def wait_back(world: World, engine: Engine, daemon: Daemon, requests: dict[str, Request]) -> None:
    """The connector comes back by itself: within a bound it stores and finds everything again."""
    until = time.monotonic() + BACK_SECONDS_MAX
    daemon.wait_sessions(2)
    while True:
        engine.settle()
        engine.call("reset")
        results = one_by_one(engine, requests)
        world.check(requests, results)
        predicted = whole_prompts(requests, block_tokens(daemon))
        if {name: result.cached for name, result in results.items()} == predicted:
            return
        assert time.monotonic() < until, (
            f"{BACK_SECONDS_MAX} s after the daemon's return its hits are "
            f"{ {name: result.cached for name, result in results.items()} }, not {predicted}"
        )
        time.sleep(0.2)


def stop_with_load(engine: Engine, daemon: Daemon, requests: dict[str, Request]) -> None:
    """Everything is in the daemon; then it stops just as the first loads begin."""
    engine.settle()
    engine.call("reset")
    engine.call("stop_daemon_at_load", daemon.process.pid)
    engine.submit(requests)
    engine.call("step", 3)


def daemon_killed(world: World) -> None:
    """(5) kill -9 while prompts are computed and stored, then with loads in flight, each time
    followed by a new daemon: every request finishes with the right answer, and the connector is
    back without help."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon)
    requests = world.requests(LENGTHS)
    engine.submit(requests)
    engine.call("step", world.random.randrange(1, 6))
    daemon.kill()
    world.check(requests, engine.finish())
    world.check(requests, one_by_one(engine, requests))
    daemon.start()
    wait_back(world, engine, daemon, requests)

    stop_with_load(engine, daemon, requests)
    daemon.kill()
    world.check(requests, engine.finish())
    daemon.start()
    wait_back(world, engine, daemon, requests)
    world.check_after(engine)


def lookups_late(world: World) -> None:
    """(8) A daemon that does not answer costs a request its lookup's deadline and no more; when it
    answers again there are hits again."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon, options={"lookup_timeout_ms": IMPATIENT_MS})
    requests = world.requests((300, 512, 705, 420, 600, 333))
    warm_up = one_by_one(engine, world.requests((705, 700, 690)))
    compute_seconds = max(result.seconds for result in warm_up.values())
    engine.settle()
    daemon.pause()
    results = one_by_one(engine, requests)
    world.check(requests, results)
    world.check_cached(results, nothing(requests))
    seconds = [result.seconds for result in results.values()]
    bound = 2 * IMPATIENT_MS / 1000 + 3 * compute_seconds + 0.2
    usual, slowest = statistics.median(seconds), max(seconds)
    assert usual < bound, f"a request took {usual:.2f} s, computing one {compute_seconds:.2f} s"
    assert slowest < STALL_SECONDS, f"a request took {slowest:.2f} s"
    daemon.resume()
    wait_back(world, engine, daemon, requests)
    world.check_after(engine)


def loads_late(world: World) -> None:
    """(8) The daemon stops with loads in flight. Their blocks may still be written, so the requests
    wait; when it goes on they finish with the right answers, and others went on meanwhile."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon)
    requests = world.requests((300, 512, 705))
    world.check(requests, one_by_one(engine, requests))
    stop_with_load(engine, daemon, requests)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert engine.call("step", 10), "a request finished although the daemon may still write"
    daemon.resume()
    world.check(requests, engine.finish())
    wait_back(world, engine, daemon, requests)

    stop_with_load(engine, daemon, requests)
    dropped = sorted(requests)[0]
    engine.call("abort", [dropped])
    other = world.requests((37, 50))  # shorter than a block: these ask nobody
    engine.submit(other)
    for _ in range(60):
        engine.call("step", 1)
    daemon.resume()
    results = engine.finish()
    kept = {name: r for name, r in requests.items() if name != dropped} | other
    world.check(kept, {name: r for name, r in results.items() if name != dropped})
    wait_back(world, engine, daemon, requests)
    world.check_after(engine)


# ---- damage ------------------------------------------------------------------------------------


def last_block(request: Request, component: int, block: int) -> corrupt.Chooser:
    """The last block that a lookup of the whole prompt needs, of one component."""
    last = reusable(len(request.prompt), block) // block - 1
    tokens = request.prompt[last * block : (last + 1) * block]

    def choose(slot: corrupt.Slot) -> bool:
        is_there = (slot.component, slot.block_idx) == (component, last)
        return is_there and slot.tokens == tokens

    return choose


def damage_each(world: World, path: str, requests: dict[str, Request], block: int) -> None:
    """One slot of each request: of component 0 of the first one, of component 1 of the second."""
    components = min(2, len(world.kinds))
    for idx, request in enumerate(requests.values()):
        count = corrupt.damage(path, last_block(request, idx % components, block))
        assert count >= 1, f"component {idx % components} of request {idx} is not in {path}"


def check_differs(world: World, requests: dict[str, Request], results: dict[str, Result]) -> None:
    """The damage was loaded, and is seen in each answer."""
    for name, request in requests.items():
        assert results[name].cached > 0, f"{name} was not loaded"
        is_same = results[name].answer == world.expected(request)
        assert not is_same, f"{name}: the damage changed nothing, so it would not be noticed"


def errors(daemon: Daemon, tier: int) -> int:
    (found,) = (t["errors"] for t in daemon.stats()["tiers"] if t["tier"] == tier)
    return int(found)


def check_damage(world: World, tier: int, settings: tuple[str, ...], damage: Damage) -> None:
    """Damage is a miss that is counted and healed; from a daemon that verifies nothing (a program
    of the tests) it comes through, and the answers differ: the comparison can fail."""
    for is_verifying in (True, False):
        daemon = world.daemon(*ONLY_L2, *settings, is_verifying=is_verifying)
        engine = world.connected(f"engine-{is_verifying}", daemon)
        requests = world.requests((512, 705))
        world.check(requests, one_by_one(engine, requests))
        engine.settle()
        engine.call("reset")
        damage(daemon, requests)
        before = errors(daemon, tier)
        results = one_by_one(engine, requests)
        if is_verifying:
            world.check(requests, results)
            found = errors(daemon, tier) - before
            assert found >= len(requests), f"{found} errors, {len(requests)} slots damaged"
            wait_back(world, engine, daemon, requests)
        else:
            check_differs(world, requests, results)
        world.check_after(engine)


def l2_damaged(world: World) -> None:
    """(6) A slot of each component in host memory, with `verify: always`."""

    def damage(daemon: Daemon, requests: dict[str, Request]) -> None:
        damage_each(world, daemon.l2_path(), requests, block_tokens(daemon))

    check_damage(world, 2, ("tiers.l2.verify=always",), damage)


def l3_damaged(world: World) -> None:
    """(6) A slot of each component in the file of L3, while the daemon is down."""

    def damage(daemon: Daemon, requests: dict[str, Request]) -> None:
        block = block_tokens(daemon)
        daemon.stop()
        damage_each(world, daemon.l3_paths[0], requests, block)
        daemon.start()
        daemon.wait_sessions(2)

    check_damage(world, 3, ("tiers.l3.write=through",), damage)
