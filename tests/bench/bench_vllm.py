"""The connector in a real vLLM on the CPU: what a lookup costs its scheduler, what a warm request
spends in kvtierd, how much sooner the first token comes. Run by tools/bench in vLLM's virtual
environment, with --json (one row an object and line) and --quick.

One engine, everything in one process. A prompt of 2,000 tokens is computed once (cold); then the
engine's own cache is emptied and the same prompt asked again, many times (warm): all but its last
tokens come from kvtierd. Every warm answer is compared with the cold one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
for folder in ("tools/lib", "tests/e2e", "clients/python/src"):
    sys.path.insert(0, str(ROOT / folder))

import numpy as np  # noqa: E402
import wide_model  # noqa: E402
from engine import ENVIRONMENT  # noqa: E402
from models import VOCAB  # noqa: E402
from scratch import Broken, ScratchDaemon, run_script  # noqa: E402

BUILD = str(ROOT / "build-release")
PROMPT_TOKENS, BLOCK_TOKENS = 2000, 32
KV_BYTES = 256 << 20
L2_BYTES, L3_BYTES = 512 << 20, 1 << 30
SETTLE_SECONDS_MAX = 20


@dataclass
class Samples:
    """What was measured, in seconds."""

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    lookups: list[float] = field(default_factory=list)
    empty_calls: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


def make_engine(model: str, socket: str) -> Any:
    from vllm import LLM

    return LLM(
        model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0,
        block_size=BLOCK_TOKENS, max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=4096,
        kv_cache_memory_bytes=KV_BYTES, disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": socket, "name": "bench", "lookup_timeout_ms": 500,
            },
        },
    )  # fmt: skip


def watch(llm: Any, samples: Samples) -> None:
    """Notes how long the scheduler waits for each answer of the connector, and each load."""
    from kvtier.vllm.metrics import KvtierStats

    connector = scheduler_of(llm).connector
    ask = connector.get_num_new_matched_tokens

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        answer = ask(*arguments)
        samples.lookups.append(time.perf_counter() - began)
        return answer

    connector.get_num_new_matched_tokens = timed

    observe = KvtierStats.observe_load

    def noted(self: KvtierStats, seconds: float, size: int, ok: bool) -> None:
        if not ok:
            raise Broken("a load failed")
        samples.loads.append(seconds)
        observe(self, seconds, size, ok)

    KvtierStats.observe_load = noted  # type: ignore[method-assign]


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def ask(llm: Any, prompt: list[int]) -> tuple[list[int], int, float]:
    """Tokens, how many of the prompt's were not computed, seconds until the first (and only)."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    began = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    seconds = time.perf_counter() - began
    return list(found.outputs[0].token_ids), int(found.num_cached_tokens or 0), seconds


def settle(llm: Any) -> None:
    """Steps until the connector has nothing under way."""
    until = time.monotonic() + SETTLE_SECONDS_MAX
    while scheduler_of(llm).has_requests():
        if time.monotonic() > until:
            raise Broken(f"stores did not end in {SETTLE_SECONDS_MAX} s")
        llm.llm_engine.step()
        time.sleep(0.001)


def measure(llm: Any, socket: str, rounds: int, repeats: int) -> Samples:
    """@rounds prompts, each once cold and @repeats times warm."""
    from kvtier import Client

    samples = Samples()
    watch(llm, samples)
    draw = random.Random(11)
    ask(llm, [draw.randrange(3, VOCAB) for _ in range(40)])  # first-use costs
    settle(llm)
    samples.lookups.clear()
    with contextlib.closing(Client(socket)) as client:
        client.serving()
        for _ in range(rounds):
            prompt = [draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)]
            answer, cached, seconds = ask(llm, prompt)
            if cached:
                raise Broken(f"a new prompt had {cached} tokens cached")
            samples.cold.append(seconds)
            settle(llm)
            for _ in range(repeats):
                measure_warm(llm, client, samples, prompt, answer)
    return samples


def measure_warm(
    llm: Any, client: Any, samples: Samples, prompt: list[int], expected: list[int]
) -> None:
    """The prompt again with the engine's own cache empty, and an empty call beside it."""
    if not llm.reset_prefix_cache():
        raise Broken("the engine did not empty its own cache")
    answer, cached, seconds = ask(llm, prompt)
    if answer != expected:
        raise Broken(f"a warm answer is {answer}, the cold one was {expected}")
    if cached < PROMPT_TOKENS * 9 // 10:
        raise Broken(f"only {cached} of {PROMPT_TOKENS} tokens came from kvtierd")
    samples.warm.append(seconds)
    settle(llm)
    began = time.perf_counter()
    client.serving()
    samples.empty_calls.append(time.perf_counter() - began)


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


def row(figure: str, unit: str, value: float, **others: Any) -> dict[str, Any]:
    """As tests/bench/bench.c prints it."""
    found: dict[str, Any] = {"figure": figure, "value": value, "unit": unit, **others}
    if "limit_value" in found:
        found["ratio"] = value / found["limit_value"]
    if "target" in found:
        sign, bound = found["target"].split()[:2]
        measured = found.get("ratio", value)
        found["met"] = measured >= float(bound) if sign == ">=" else measured <= float(bound)
    return found


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    cold, warm = percentile(samples.cold, 0.5), percentile(samples.warm, 0.5)
    lookup, load = percentile(samples.lookups, 0.5), percentile(samples.loads, 0.5)
    prompt = f"{PROMPT_TOKENS:,} tokens"
    rows = [
        row(f"vLLM: first token, prompt of {prompt}, computed", "ms", 1e3 * cold),
        row(f"vLLM: first token, prompt of {prompt}, from kvtierd", "ms", 1e3 * warm),
        row("vLLM: first token, how much sooner", "x", cold / warm, target=">= 5 x"),
        row("vLLM: lookup and load, share of a warm request", "%",
            100 * (lookup + load) / warm,
            note=f"p50 of lookup {1e3 * lookup:.2f} ms and of load {1e3 * load:.2f} ms, in the "
            f"time to the first token"),
    ]  # fmt: skip
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        rows.append(
            row(f"vLLM: lookup of {prompt} as the scheduler sees it, {name}", "us",
                1e6 * percentile(samples.lookups, share),
                limit="empty gRPC call from Python beside it",
                limit_value=1e6 * percentile(samples.empty_calls, share)))  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="does it run at all?")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes to standard output
    rounds, repeats = (1, 3) if options.quick else (6, 40)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as scratch:
        model = wide_model.write(pathlib.Path(scratch, "model"))
        settings = ["tiers.l1.backend=none"]
        with ScratchDaemon(BUILD, 0, L2_BYTES, L3_BYTES, settings=settings) as daemon:
            llm = make_engine(str(model), daemon.socket)
            samples = measure(llm, daemon.socket, rounds, repeats)
            llm.llm_engine.engine_core.shutdown()
    for found in rows_of(samples):
        text = f"{found['figure']:<70} {found['value']:10.4g} {found['unit']}"
        print(json.dumps(found) if options.json else text, file=rows_out)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
