"""Cases (0) to (4): the comparison can fail, hits are as predicted, engines come and go, requests
are given up and preempted."""

from __future__ import annotations

from daemon import Daemon
from engine import Engine, Request, Result
from world import World, block_tokens, reusable

# Shorter than a block; no multiple; exactly a number of blocks, and one more (of either size).
LENGTHS = (37, 300, 512, 705, 769)

# So many blocks of so many bytes that eight requests fit, but not what they generate.
TINY_POOL = {"llama": (66, 3 * 16384), "gemma3": (160, 16384), "qwen3next": (30, 131072)}
NEAR = 0.3  # of logprobs: without a connector it is 0.07 at most, with a damaged block far more


def one_by_one(engine: Engine, requests: dict[str, Request]) -> dict[str, Result]:
    return {name: engine.ask(request) for name, request in requests.items()}


def all_at_once(engine: Engine, requests: dict[str, Request]) -> dict[str, Result]:
    engine.submit(requests)
    return engine.finish()


def whole_prompts(requests: dict[str, Request], block: int) -> dict[str, int]:
    """What a cache gives that has stored all of these prompts."""
    return {name: reusable(len(request.prompt), block) for name, request in requests.items()}


def nothing(requests: dict[str, Request]) -> dict[str, int]:
    return dict.fromkeys(requests, 0)


def comparison_can_fail(world: World) -> None:
    """(0) Without the connector: two processes agree to the bit, however the prompt is cut and
    batched, and one damaged block of the KV cache is seen. Only then do the other cases mean
    something."""
    requests = world.requests(LENGTHS)
    other = world.engine("other", max_num_batched_tokens=256).wait_up()
    world.check(requests, one_by_one(other, requests))
    cached = one_by_one(other, requests)
    world.check(requests, cached)
    assert any(result.cached for result in cached.values()), "its own prefix cache was not used"
    other.call("reset")
    world.check(requests, all_at_once(other, requests))
    for block in range(1, other.facts["blocks"]):
        other.call("damage_kv", block)
    damaged = one_by_one(other, requests)
    for name, result in damaged.items():
        if result.cached:
            is_same = result.answer == world.expected(requests[name])
            assert not is_same, f"{name}: damage to the KV cache changed nothing"
    world.check_after(other)


def cold_then_warm(world: World, engine: Engine, daemon: Daemon) -> None:
    """Nothing is found; then, with the engine's own cache emptied, what was predicted, to the
    token, by vLLM's count too."""
    requests = world.requests(LENGTHS)
    cold = one_by_one(engine, requests)
    world.check(requests, cold)
    world.check_cached(cold, nothing(requests))
    engine.settle()
    engine.call("reset")
    warm = one_by_one(engine, requests)
    world.check(requests, warm)
    predicted = whole_prompts(requests, block_tokens(daemon))
    world.check_cached(warm, predicted)
    hits = engine.metric("vllm:external_prefix_cache_hits")
    assert hits == sum(predicted.values()), f"vLLM counted {hits} external hits"
    assert sum(daemon.hit_tokens()) >= hits, f"the daemon counted {daemon.hit_tokens()}"


def cold_and_warm(world: World) -> None:
    """(1) Hits as predicted; a longer prompt goes on from the end of a shorter one."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon)
    cold_then_warm(world, engine, daemon)
    requests = world.requests((700, 769))
    world.check(requests, all_at_once(engine, requests))
    engine.settle()
    engine.call("reset")
    longer = {
        name: Request(request.prompt[:650] + world.prompt(90)) for name, request in requests.items()
    }
    found = all_at_once(engine, longer)
    world.check(longer, found)
    if len(engine.facts["groups"]) == 1:  # the others can resume only where a prompt had ended
        block = block_tokens(daemon)
        world.check_cached(found, dict.fromkeys(longer, 650 // block * block))
    world.check_after(engine)


def staged(world: World) -> None:
    """(1) The same with the engine's memory not shared: blocks go through a buffer, which is too
    small for a prompt."""
    daemon = world.daemon()
    options = {"memory": "staging", "staging_bytes": "1MiB"}
    engine = world.connected("engine", daemon, options=options)
    cold_then_warm(world, engine, daemon)
    world.check_after(engine)


def loaded_in_step(world: World) -> None:
    """(1) The same with loads that the engine's step waits for."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon, options={"load": "sync"})
    cold_then_warm(world, engine, daemon)
    world.check_after(engine)


def hybrid_manager_off(world: World) -> None:
    """(1) The same with sliding-window layers that the engine keeps as if they were full ones."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon, disable_hybrid_kv_cache_manager=True)
    assert len(engine.facts["groups"]) == 1, engine.facts
    cold_then_warm(world, engine, daemon)
    world.check_after(engine)


def turns(world: World) -> None:
    """(1) A conversation: each prompt is the last one, its answer and something new. What comes
    from the daemon is never less than the last prompt's full blocks."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon, options={"store": "all"})
    prompt = world.prompt(200)
    before = 0
    for turn in range(6):
        engine.call("reset")
        request = Request(prompt, max_tokens=20)
        result = engine.ask(request)
        world.check({f"turn {turn}": request}, {f"turn {turn}": result})
        least = before // block_tokens(daemon) * block_tokens(daemon)
        assert result.cached >= least, f"turn {turn}: {result.cached} cached, not {least}"
        engine.settle()
        before = len(prompt)
        prompt = prompt + result.answer.tokens + world.prompt(60 + turn)
    world.check_after(engine)


def engine_restarted(world: World) -> None:
    """(2) What one engine computed serves the next one, and one that was killed holds nothing."""
    daemon = world.daemon()
    first = world.connected("first", daemon)
    requests = world.requests(LENGTHS)
    world.check(requests, one_by_one(first, requests))
    first.settle()
    first.quit()
    daemon.wait_sessions(0)
    daemon.wait_nothing_held()
    second = world.connected("second", daemon)
    warm = all_at_once(second, requests)
    world.check(requests, warm)
    world.check_cached(warm, whole_prompts(requests, block_tokens(daemon)))
    second.call("reset")
    second.submit(requests)
    second.call("step", 1)
    second.kill()
    daemon.wait_sessions(0)
    daemon.wait_nothing_held()
    third = world.connected("third", daemon)
    again = all_at_once(third, requests)
    world.check(requests, again)
    world.check_cached(again, whole_prompts(requests, block_tokens(daemon)))
    world.check_after(third)


def two_engines(world: World) -> None:
    """(3) Two engines at once, with the same and with different prompts; then each has what the
    other one computed."""
    daemon = world.daemon()
    engines = [world.connected(name, daemon) for name in ("left", "right")]
    shared = world.requests((300, 512, 705))
    for turn in range(2):
        own = [world.requests((400 + 100 * turn, 641)) for _ in engines]
        for engine, mine in zip(engines, own, strict=True):
            engine.submit({f"own {n}": r for n, r in mine.items()} | shared)
            engine.send("finish")
        for engine, mine in zip(engines, own, strict=True):
            results = engine.results()
            world.check({f"own {n}": r for n, r in mine.items()} | shared, results)
        for engine in engines:
            engine.settle()
            engine.call("reset")
        block = block_tokens(daemon)
        for engine, others in zip(engines, reversed(own), strict=True):
            results = all_at_once(engine, others)
            world.check(others, results)
            world.check_cached(results, whole_prompts(others, block))
            engine.call("reset")
    world.check_after(*engines)


def drop_half(world: World, engine: Engine, requests: dict[str, Request]) -> dict[str, Request]:
    """Submits all, gives up half of them a few steps apart; returns the others."""
    names = sorted(requests)
    dropped = world.random.sample(names, len(names) // 2)
    engine.submit(requests)
    for name in dropped:
        engine.call("step", world.random.randrange(5))
        engine.call("abort", [name])
    return {name: request for name, request in requests.items() if name not in dropped}


def aborted(world: World) -> None:
    """(4) Half of the requests are given up: in the queue, while their blocks come, while they are
    computed, while they are stored. Half of the rounds have hits, half have none."""
    daemon = world.daemon()
    engine = world.connected("engine", daemon, max_num_seqs=6)
    for turn in range(4):
        requests = world.requests((700, 300, 705, 512, 420, 769, 600, 650))
        for _ in range(2):
            kept = drop_half(world, engine, requests)
            results = engine.finish()
            world.check(kept, {name: results[name] for name in kept})
            if turn % 2 == 1:
                engine.settle()
            engine.call("reset")
    engine.settle()
    warm = one_by_one(engine, requests)
    world.check(requests, warm)
    world.check_after(engine)


def preempted(world: World) -> None:
    """(4) A KV pool that is too small for what runs: requests lose their blocks, while these are
    stored or loaded too, and begin again; half of them are given up."""
    daemon = world.daemon()
    blocks, block_bytes = TINY_POOL[world.model]
    engine = world.connected(
        "engine",
        daemon,
        kv_cache_memory_bytes=blocks * block_bytes,
        max_model_len=500,
        max_num_seqs=8,
    )
    preemptions = 0.0
    for turn in range(3):
        requests = world.requests((250, 190, 310, 128, 220, 280, 199, 256), max_tokens=100)
        if turn % 2 == 0:
            kept = requests
            engine.submit(requests)
        else:
            kept = drop_half(world, engine, requests)
        results = engine.finish()
        for name, request in kept.items():
            check_preempted(world, name, request, results[name])
        preemptions = engine.metric("vllm:num_preemptions")
    assert preemptions > 0, "the pool was large enough: nothing was preempted"
    engine.settle()
    engine.call("reset")
    short = {name: Request(request.prompt) for name, request in requests.items()}
    warm = one_by_one(engine, short)
    world.check(short, warm)
    assert sum(result.cached for result in warm.values()) > 0, "nothing had been stored"
    world.check_after(engine)


def check_preempted(world: World, name: str, request: Request, result: Result) -> None:
    """As any other; but the CPU's recurrent layers compute a token that was generated before other
    bits when it comes in a prompt. There only the first token is compared bit for bit, and the
    others, up to one that is another choice, to be near."""
    if "linear_attention" not in world.kinds:
        world.check({name: request}, {name: result})
        return
    expected = world.expected(request)
    assert result.answer.logprobs[0] == expected.logprobs[0], f"{name}: another first token"
    steps = zip(result.answer.logprobs, expected.logprobs, strict=True)
    for idx, (found, right) in enumerate(steps):
        common = dict(found).keys() & dict(right).keys()
        far = max((abs(dict(found)[t] - dict(right)[t]) for t in common), default=NEAR)
        assert far < NEAR, f"{name}: token {idx} is far off: {found}, not {right}"
        if result.answer.tokens[idx] != expected.tokens[idx]:
            return
