"""Cases (10) to (12): a reset of the connector's cache, damage to what a step waits for, and
components that the daemon keeps quantised."""

from __future__ import annotations

import math

from cases_basic import LENGTHS, all_at_once, nothing, one_by_one, whole_prompts
from cases_faults import ONLY_L2, damage_each, errors
from engine import Request, Result
from world import World, block_tokens

# Of the logprobs of first tokens: 0.06 to 0.31 with 8-bit caches, over seeds; the answers to two
# different prompts have none of their likeliest tokens in common.
QUANTISED_NEAR = 1.0


def cache_reset(world: World) -> None:
    """(10) A reset of the connector's cache (new weights) while the engine runs: nothing of before
    is found, the engine goes on under a root of its own, and an engine that
    was not reset still has the old one."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon)
    requests = world.requests(LENGTHS)
    world.check(requests, one_by_one(engine, requests))
    engine.settle()
    block = block_tokens(daemon)
    assert engine.call("reset_all") is True
    again = one_by_one(engine, requests)
    world.check(requests, again)
    world.check_cached(again, nothing(requests))
    engine.settle()
    engine.call("reset")
    warm = one_by_one(engine, requests)
    world.check(requests, warm)
    world.check_cached(warm, whole_prompts(requests, block))
    other = world.connected("other", daemon)
    old = one_by_one(other, requests)
    world.check(requests, old)
    world.check_cached(old, whole_prompts(requests, block))
    world.check_after(engine, other)


def damaged_in_step(world: World) -> None:
    """(11) `load: sync`: damaged blocks fail the load of their request within the step, and that of
    those that share its blocks in that step: all are computed, and nothing that was computed from
    the damage is stored."""
    daemon = world.daemon(*ONLY_L2, "tiers.l2.verify=always")
    engine = world.connected("engine", daemon, options={"load": "sync"})
    requests = world.requests((512, 705, 640, 300))
    world.check(requests, one_by_one(engine, requests))
    engine.settle()
    engine.call("reset")
    block = block_tokens(daemon)
    before = errors(daemon, 2)
    damage_each(world, daemon.l2_path(), requests, block)
    longer = {f"{n}+": Request(r.prompt + world.prompt(40)) for n, r in requests.items()}
    world.check({**requests, **longer}, all_at_once(engine, {**requests, **longer}))
    assert errors(daemon, 2) - before >= len(requests), "the damage was not seen"
    engine.settle()
    engine.call("reset")
    healed = one_by_one(engine, requests)
    world.check(requests, healed)
    world.check_cached(healed, whole_prompts(requests, block))
    world.check_after(engine)


def quantised(world: World) -> None:
    """(12) `quantise`: hits as predicted, the same answers to the bit after each hit, through
    shared memory and through a buffer, and near what was computed; the daemon keeps half."""
    kinds = {"full": "fp8_e4m3"}
    if "sliding_attention" in world.kinds:
        kinds["sliding_window"] = "int8"
    daemon = world.daemon()
    shared = world.connected("shared", daemon, dtype="bfloat16", options={"quantise": kinds})
    requests = world.requests(LENGTHS)
    cold = one_by_one(shared, requests)
    world.check_cached(cold, nothing(requests))
    predicted = whole_prompts(requests, block_tokens(daemon))
    staging = {"quantise": kinds, "memory": "staging", "staging_bytes": "1MiB"}
    staged = world.connected("staged", daemon, dtype="bfloat16", options=staging)
    warm: dict[str, Result] = {}
    for engine in (shared, shared, staged):
        engine.settle()
        engine.call("reset")
        found = one_by_one(engine, requests)
        world.check_cached(found, predicted)
        warm = warm or found
        for name, result in found.items():
            assert result.answer == warm[name].answer, f"{name}: {engine.name} answers otherwise"
    differ = 0
    for name, result in warm.items():
        computed, loaded = cold[name].answer, result.answer
        differ += computed != loaded
        first, other = dict(computed.logprobs[0]), dict(loaded.logprobs[0])
        common = first.keys() & other.keys()
        apart = max((abs(first[token] - other[token]) for token in common), default=math.inf)
        assert apart < QUANTISED_NEAR, f"{name}: {apart} between first tokens computed and loaded"
    assert differ > 0, "nothing was quantised: loaded answers are those computed to the bit"
    for component in daemon.stats()["namespaces"][0]["components"]:
        kind = {"full": "full", "window": "sliding_window"}[component["kind"]]
        assert component["quantisation"] == kinds[kind], component
        assert component["stored_bytes_per_block"] < 0.53 * component["bytes_per_block"], component
    world.check_after(shared, staged)
