"""What the cases share: prompts, models on disk, engines with and without the connector, what an
engine without it answers, and the checks after each case."""

from __future__ import annotations

import contextlib
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import models
import shm
from daemon import Daemon
from engine import Answer, Engine, Request, Result

BLOCKS_MEMORY = 48 << 20  # bytes of an engine's KV memory, unless a case wants it small
BATCHED_TOKENS_MAX = 512  # shorter than most prompts: these are computed in parts
CONTEXT_TOKENS_MAX = 2048
# Up to here an engine computes the same bits however a prompt is cut into steps and whatever else
# is in the batch (from 1,100 on, the order of summation in the CPU's attention depends on it).
PROMPT_TOKENS_MAX = 800
LOOKUP_PATIENT_MS = 1000  # where a case says which hits there are, a busy machine changes nothing

Arguments = dict[str, Any]


def base_arguments(directory: pathlib.Path, model: str) -> Arguments:
    return {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": CONTEXT_TOKENS_MAX,
        "max_num_seqs": 4,
        "max_num_batched_tokens": BATCHED_TOKENS_MAX,
        "seed": 0,
        "kv_cache_memory_bytes": BLOCKS_MEMORY,
        "disable_log_stats": False,
        **models.MODELS[model].engine,
    }


def connector(socket: str, **options: Any) -> Arguments:
    """The configuration that a user gives, as the engine's argument."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": socket,
            "lookup_timeout_ms": LOOKUP_PATIENT_MS,
            **options,
        },
    }


class Bench:
    """What one run of the program keeps between cases: models, and reference engines with what
    they have answered."""

    def __init__(self, build: str, scratch: pathlib.Path) -> None:
        self.build, self.scratch = build, scratch
        self.engines: dict[pathlib.Path, Engine] = {}
        self.answers: dict[tuple[pathlib.Path, Request], Answer] = {}

    def model_directory(self, model: str, seed: int = models.WEIGHTS_SEED) -> pathlib.Path:
        directory = self.scratch / "models" / f"{model}-{seed}"
        if not directory.exists():
            models.write_model(directory, model, seed)
        return directory

    def reference(self, directory: pathlib.Path, model: str) -> Engine:
        """The engine without the connector; it lives until the end of the run."""
        if directory not in self.engines:
            log = self.scratch / f"reference-{directory.name}.log"
            arguments = base_arguments(directory, model)
            self.engines[directory] = Engine(f"reference {directory.name}", arguments, log)
            self.engines[directory].wait_up()
        return self.engines[directory]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()


class World:
    """One case: a model, a seed, a directory for logs, engines and daemons that end with it."""

    def __init__(self, bench: Bench, name: str, model: str, seed: int) -> None:
        self.bench, self.model = bench, model
        self.random = random.Random(f"{name} {seed}")
        self.logs = bench.scratch / name
        self.logs.mkdir(parents=True)
        self.directory = bench.model_directory(model)
        self.stack = contextlib.ExitStack()
        self.segments = shm.segments()
        self.daemons: list[Daemon] = []

    # ---- what is asked ---------------------------------------------------------------------------

    def prompt(self, tokens: int) -> tuple[int, ...]:
        assert tokens <= PROMPT_TOKENS_MAX
        return tuple(self.random.randrange(models.FIRST_WORD, models.VOCAB) for _ in range(tokens))

    def requests(self, lengths: Iterable[int], **options: Any) -> dict[str, Request]:
        """A request a length, named by its number and length."""
        return {
            f"{idx}-{tokens}": Request(self.prompt(tokens), **options)
            for idx, tokens in enumerate(lengths)
        }

    # ---- engines and daemons ---------------------------------------------------------------------

    def daemon(self, *settings: str, is_verifying: bool = True) -> Daemon:
        daemon = Daemon(self.bench.build, *settings, is_verifying=is_verifying)
        self.stack.enter_context(daemon)
        self.daemons.append(daemon)
        return daemon

    def engine(self, name: str, directory: pathlib.Path | None = None, **arguments: Any) -> Engine:
        """An engine that is coming up: wait_up() waits for it."""
        all_arguments = base_arguments(directory or self.directory, self.model) | arguments
        engine = Engine(name, all_arguments, self.logs / f"{name}.log")
        self.stack.push(engine.__exit__)
        return engine

    def connected(self, name: str, daemon: Daemon, **arguments: Any) -> Engine:
        """An engine with the connector, when both of its sides are attached."""
        options = arguments.pop("options", {})
        before = daemon.stats()["sessions"]
        engine = self.engine(
            name, kv_transfer_config=connector(daemon.socket, **options), **arguments
        )
        engine.wait_up()
        daemon.wait_sessions(before + 2)
        return engine

    # ---- what is right ---------------------------------------------------------------------------

    def expected(self, request: Request, directory: pathlib.Path | None = None) -> Answer:
        """What an engine without the connector answers, its own cache empty."""
        where = directory or self.directory
        key = (where, Request(request.prompt, request.max_tokens, lora=request.lora))
        if key not in self.bench.answers:
            reference = self.bench.reference(where, self.model)
            reference.call("reset")
            result = reference.ask(key[1])
            assert result.cached == 0, "the reference engine had some of it cached"
            self.bench.answers[key] = result.answer
        return self.bench.answers[key]

    @property
    def kinds(self) -> set[str]:
        """Kinds of attention that the model's layers have: a component of the cache each."""
        return set(models.MODELS[self.model].config.get("layer_types", ["full_attention"]))

    def check(
        self,
        requests: dict[str, Request],
        results: dict[str, Result],
        directory: pathlib.Path | None = None,
    ) -> None:
        """Every request was answered, as by an engine without the connector."""
        assert set(results) == set(requests), (
            f"asked {sorted(requests)}, answered {sorted(results)}"
        )
        for name, request in requests.items():
            differs = difference(results[name].answer, self.expected(request, directory))
            assert differs is None, f"{name} ({results[name].cached} tokens cached): {differs}"

    def check_cached(self, results: dict[str, Result], expected: dict[str, int]) -> None:
        found = {name: result.cached for name, result in results.items()}
        assert found == expected, f"tokens from caches: {found}, predicted: {expected}"

    def check_after(self, *engines: Engine) -> None:
        """Nothing is held when the engines are idle, and nothing when they have ended."""
        for engine in engines:
            engine.settle()
        for daemon in self.daemons:
            daemon.wait_nothing_held()
        for engine in engines:
            engine.call("reset")
            free, blocks = engine.call("free_blocks"), engine.facts["blocks"]
            assert free == blocks - 1, f"{engine.name}: {free} of {blocks} - 1 blocks are free"
            engine.quit()
        for daemon in self.daemons:
            daemon.wait_sessions(0)
            daemon.wait_nothing_held()
            daemon.check_alive()
            mapped = daemon.foreign_memory()
            assert not mapped, f"the daemon still has memory of engines: {mapped}"
        left = shm.segments() - self.segments
        assert not left, f"left in {shm.DIRECTORY}: {sorted(left)}"

    def close(self) -> None:
        self.stack.close()

    def log_tails(self) -> str:
        """The ends of all logs of this case, for a failure."""
        parts = [f"--- daemon\n{daemon.log_tail(40)}" for daemon in self.daemons]
        for path in sorted(self.logs.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- end of {path}", *lines[-40:]]))
        return "\n".join(parts)


def block_tokens(daemon: Daemon) -> int:
    """Tokens in a block of the one namespace that the daemon has."""
    (space,) = daemon.stats()["namespaces"]
    return int(space["block_tokens"])


def reusable(tokens: int, block: int) -> int:
    """Of a prompt of so many tokens that is stored whole: the last one is always computed."""
    return (tokens - 1) // block * block


def difference(found: Answer, expected: Answer) -> str | None:
    """In words; None when they are equal to the bit."""
    for idx, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        if a != b:
            return f"token {idx} is {a}, not {b}"
        if found.logprobs[idx] != expected.logprobs[idx]:
            return (
                f"logprobs of token {idx} are {found.logprobs[idx]}, not {expected.logprobs[idx]}"
            )
    return None


@contextlib.contextmanager
def world(bench: Bench, name: str, model: str, seed: int) -> Iterator[World]:
    here = World(bench, name, model, seed)
    try:
        yield here
    finally:
        here.close()
