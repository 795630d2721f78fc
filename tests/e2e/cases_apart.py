"""Case (7): what must not share a cache does not; and the engine as users start it, over HTTP."""

from __future__ import annotations

import dataclasses
from typing import Any

import models
from cases_basic import all_at_once, nothing, one_by_one, whole_prompts
from engine import Request
from world import World, block_tokens

LENGTHS = (300, 512, 705)


def salts_apart(world: World) -> None:
    """(7) The same prompts under two salts and none: each finds only its own."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon)
    plain = world.requests(LENGTHS)
    salted = [
        {name: dataclasses.replace(request, salt=salt) for name, request in plain.items()}
        for salt in (None, "tenant a", "tenant b")
    ]
    for requests in salted:
        engine.call("reset")
        results = one_by_one(engine, requests)
        world.check(requests, results)
        world.check_cached(results, nothing(requests))
        engine.settle()
    for requests in salted:
        engine.call("reset")
        results = all_at_once(engine, requests)
        world.check(requests, results)
        world.check_cached(results, whole_prompts(requests, block_tokens(daemon)))
    world.check_after(engine)


def adapters_apart(world: World) -> None:
    """(7) The same prompts with two LoRA adapters and none: each finds only its own."""
    daemon = world.daemon()
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": models.ADAPTER_RANK,
    }
    plain = world.requests(LENGTHS)
    reference = world.engine("reference", **arguments).wait_up()
    engine = world.connected("engine", daemon, **arguments)
    adapted: list[dict[str, Request]] = [plain]
    for seed, name in enumerate(("first", "second")):
        path = models.write_adapter(world.logs / name, world.model, seed)
        adapted.append(
            {n: dataclasses.replace(r, lora=(name, str(path))) for n, r in plain.items()}
        )
    right = [one_by_one(reference, requests) for requests in adapted]
    assert len({str(r[sorted(plain)[0]].answer) for r in right}) == 3, "the adapters do nothing"
    for expected in (nothing, lambda requests: whole_prompts(requests, block_tokens(daemon))):
        for requests, answers in zip(adapted, right, strict=True):
            engine.call("reset")
            results = one_by_one(engine, requests)
            world.check_cached(results, expected(requests))
            for name, result in results.items():
                assert result.answer == answers[name].answer, f"{name}: another answer"
            engine.settle()
    reference.quit()
    world.check_after(engine)


def models_apart(world: World) -> None:
    """(7) Two models of one shape, other weights, the same prompts, one daemon."""
    daemon = world.daemon()
    other_directory = world.bench.model_directory(world.model, models.WEIGHTS_SEED + 1)
    engines = [
        (world.directory, world.connected("engine", daemon)),
        (other_directory, world.connected("other", daemon, directory=other_directory)),
    ]
    requests = world.requests(LENGTHS)
    for directory, engine in engines:
        results = one_by_one(engine, requests)
        world.check(requests, results, directory)
        world.check_cached(results, nothing(requests))
        engine.settle()
    spaces = daemon.stats()["namespaces"]
    assert len(spaces) == 2, f"{len(spaces)} namespaces for two models"
    for directory, engine in engines:
        engine.call("reset")
        results = all_at_once(engine, requests)
        world.check(requests, results, directory)
        block = int(spaces[0]["block_tokens"])
        world.check_cached(results, whole_prompts(requests, block))
    world.check_after(*(engine for _, engine in engines))
