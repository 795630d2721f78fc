"""Engines as processes: vLLM is imported once, here, and each engine is a fork of that.

    parent (runs the cases)                     child (one engine)
    -----------------------                     ------------------
    Engine(...)            --- fork --->        makes vllm.LLM, says "up"
    engine.call("step", ..)  -- JSON line -->   does it
                             <-- JSON line --   {"ok": ...} or {"error": traceback}

The parent never makes an engine and starts no thread of torch's: it could not be forked after
that. Engine core, scheduler and worker of an engine are one process (no second import), so a case
decides step by step how far an engine goes. Every command has a deadline: the child's alarm ends
it, and the parent sees the end of the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # one order of summation
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # the same
    "TORCHDYNAMO_DISABLE": "1",  # else asking for logprobs compiles C++ for half a minute
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}
START_SECONDS_MAX = 90
COMMAND_SECONDS_MAX = 60
LOG_LINES = 40
IDLE_STEP_S = 0.002
PR_SET_PDEATHSIG = 1

Json = Any


class EngineFailed(Exception):
    """An engine ended, or what it was told to do raised; the text is its traceback and log."""


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt; equal when tokens and logprobs are, bit for bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]

    @classmethod
    def of(cls, found: Json) -> Answer:
        return cls(
            tuple(found["tokens"]),
            tuple(tuple((int(t), float(p)) for t, p in step) for step in found["logprobs"]),
        )


@dataclass(frozen=True)
class Result:
    """One finished request. @cached: prompt tokens that were not computed. Seconds since submit."""

    answer: Answer
    cached: int
    seconds: float


@dataclass(frozen=True)
class Request:
    """What is asked of an engine."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    salt: str | None = None
    lora: tuple[str, str] | None = None  # name, directory of the adapter

    def to_json(self) -> Json:
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "salt": self.salt,
            "lora": self.lora,
        }


def prepare_parent() -> None:
    """Imports vLLM, once, with the environment that its children need."""
    os.environ.update(ENVIRONMENT)
    import vllm  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401


# ---- the child ---------------------------------------------------------------------------------


class Child:
    """The engine's side. Each command is a method; its answer has to fit into JSON."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.submitted: dict[str, tuple[str, float]] = {}  # id -> (id within the engine, when)
        self.results: dict[str, Json] = {}
        self.loras: dict[str, int] = {}

    def facts(self) -> Json:
        """The KV cache as the engine laid it out."""
        config = self.core.scheduler.kv_cache_config
        return {
            "blocks": config.num_blocks,
            "groups": [
                {
                    "kind": type(group.kv_cache_spec).__name__,
                    "block_tokens": group.kv_cache_spec.block_size,
                    "page_bytes": group.kv_cache_spec.page_size_bytes,
                    "layers": len(group.layer_names),
                }
                for group in config.kv_cache_groups
            ],
            "alignment": config.cache_hit_alignment_tokens,
        }

    def submit(self, requests: dict[str, Json]) -> None:
        from vllm import SamplingParams

        for name, request in requests.items():
            prompt = {"prompt_token_ids": request["prompt"]}
            if request["salt"] is not None:
                prompt["cache_salt"] = request["salt"]
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                logprobs=3,
                ignore_eos=True,
                detokenize=False,
            )
            inner = self.engine.add_request(
                name, prompt, sampling, lora_request=self.lora(request["lora"])
            )
            self.submitted[name] = (inner, time.monotonic())

    def lora(self, asked: list[str] | None) -> Any:
        if asked is None:
            return None
        from vllm.lora.request import LoRARequest

        number = self.loras.setdefault(asked[0], len(self.loras) + 1)
        return LoRARequest(asked[0], number, asked[1])

    def step(self, count: int) -> Json:
        """At most @count steps; returns whether something is left to do."""
        for _ in range(count):
            if not self.engine.has_unfinished_requests():
                return False
            self.take(self.engine.step())
        return self.engine.has_unfinished_requests()

    def finish(self) -> Json:
        """Steps until every request has ended; returns what has ended since the last call."""
        while self.engine.has_unfinished_requests():
            busy = self.core.scheduler.running
            self.take(self.engine.step())
            if not busy and not self.core.scheduler.running:
                time.sleep(IDLE_STEP_S)  # all of them wait for their KV: leave the others a core
        found, self.results = self.results, {}
        return found

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            if not output.finished or output.request_id not in self.submitted:
                continue
            began = self.submitted.pop(output.request_id)[1]
            completion = output.outputs[0]
            self.results[output.request_id] = {
                "tokens": list(completion.token_ids),
                "logprobs": [
                    sorted((token, chosen.logprob) for token, chosen in step.items())
                    for step in completion.logprobs
                ],
                "cached": output.num_cached_tokens,
                "reason": completion.finish_reason,
                "seconds": time.monotonic() - began,
            }

    def abort(self, names: list[str]) -> None:
        self.engine.abort_request([n for n in names if n in self.submitted])
        for name in names:
            self.submitted.pop(name, None)

    def settle(self, seconds: float) -> Json:
        """Steps until the engine has nothing left, its connector's stores included; or False."""
        until = time.monotonic() + seconds
        while self.core.scheduler.has_requests():
            if time.monotonic() > until:
                return False
            self.take(self.engine.step())
            time.sleep(IDLE_STEP_S)
        return True

    def reset(self) -> Json:
        """Empties the engine's own prefix cache, not the connector's."""
        return self.llm.reset_prefix_cache()

    def reset_all(self) -> Json:
        """Empties both, as for new weights."""
        return self.llm.reset_prefix_cache(reset_connector=True)

    def free_blocks(self) -> Json:
        """Blocks of the pool that nobody holds (block 0 is never one)."""
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def damage_kv(self, block: int) -> None:
        """Inverts every byte of one block of the engine's own KV memory."""
        import torch

        runner = self.core.model_executor.driver_worker.worker.model_runner
        views = runner.kv_caches
        first = views[0][0] if isinstance(views[0], (list, tuple)) else views[0]
        storage = torch.tensor([], dtype=torch.uint8).set_(first.untyped_storage())
        size = storage.numel() // self.core.scheduler.kv_cache_config.num_blocks
        storage[block * size : (block + 1) * size] ^= 0xFF

    def stop_daemon_at_load(self, pid: int) -> None:
        """At the next load from the daemon @pid: it is stopped (SIGSTOP), then the load begins."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        begin = connector.start_load_kv

        def stop_and_begin(*arguments: Any, **keywords: Any) -> None:
            if connector._get_connector_metadata().loads:
                connector.start_load_kv = begin
                os.kill(pid, signal.SIGSTOP)
            begin(*arguments, **keywords)

        connector.start_load_kv = stop_and_begin

    def metrics(self) -> Json:
        """Counters and gauges of vLLM's Prometheus registry, by name."""
        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                values[metric.name] = values.get(metric.name, 0) + metric.value
        return values

    def quit(self) -> None:
        self.engine.engine_core.shutdown()

    def serve(self, commands: Any, answers: Any) -> None:
        for line in commands:
            message = json.loads(line)
            signal.alarm(int(message["seconds"]) + 1)
            try:
                reply = {"ok": getattr(self, message["do"])(*message["with"])}
            except Exception:
                reply = {"error": traceback.format_exc()}
            signal.alarm(0)
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
            if message["do"] == "quit":
                return


def run_child(arguments: dict[str, Any], commands_fd: int, answers_fd: int, log: str) -> None:
    """Everything a child does; never returns to the parent's code."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no engine outlives the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(START_SECONDS_MAX)
        with os.fdopen(commands_fd) as commands, os.fdopen(answers_fd, "w") as answers:
            child = Child(arguments)
            signal.alarm(0)
            answers.write(json.dumps({"ok": child.facts()}) + "\n")
            answers.flush()
            child.serve(commands, answers)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the parent's exit handlers are not the child's


# ---- the parent --------------------------------------------------------------------------------


class Engine:
    """The parent's handle of one engine process."""

    def __init__(self, name: str, arguments: dict[str, Any], log: pathlib.Path) -> None:
        self.name, self.log = name, log
        commands_out, self.commands = os.pipe()
        self.answers, answers_in = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.commands)
            os.close(self.answers)
            run_child(arguments, commands_out, answers_in, str(log))
        os.close(commands_out)
        os.close(answers_in)
        self.reader = os.fdopen(self.answers)
        self.facts: Json = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_up(self) -> Engine:
        self.facts = self.receive()
        return self

    def send(self, do: str, *arguments: Json, seconds: float = COMMAND_SECONDS_MAX) -> None:
        """Tells it to do something, without waiting."""
        line = json.dumps({"do": do, "with": arguments, "seconds": seconds}) + "\n"
        try:
            data = line.encode()
            while data:
                data = data[os.write(self.commands, data) :]
        except BrokenPipeError:
            raise EngineFailed(f"{self.name} has ended\n{self.log_tail()}") from None

    def receive(self) -> Json:
        line = self.reader.readline()
        if not line:
            raise EngineFailed(f"{self.name} ended by itself\n{self.log_tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{self.name}: {reply['error']}\n{self.log_tail()}")
        return reply["ok"]

    def call(self, do: str, *arguments: Json, seconds: float = COMMAND_SECONDS_MAX) -> Json:
        self.send(do, *arguments, seconds=seconds)
        return self.receive()

    def submit(self, requests: dict[str, Request]) -> None:
        self.call("submit", {name: request.to_json() for name, request in requests.items()})

    def results(self) -> dict[str, Result]:
        """What a "finish" that was sent gives."""
        return {
            name: Result(Answer.of(found), found["cached"], found["seconds"])
            for name, found in self.receive().items()
        }

    def finish(self, seconds: float = COMMAND_SECONDS_MAX) -> dict[str, Result]:
        self.send("finish", seconds=seconds)
        return self.results()

    def ask(self, request: Request) -> Result:
        """One request, alone, to its end."""
        self.submit({"one": request})
        return self.finish()["one"]

    def settle(self, seconds: float = 20) -> None:
        if not self.call("settle", seconds):
            raise EngineFailed(f"{self.name} is not idle after {seconds} s\n{self.log_tail()}")

    def metric(self, name: str) -> float:
        return float(self.call("metrics").get(name, 0))

    def quit(self) -> None:
        self.call("quit")
        self.reader.close()
        os.close(self.commands)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if status != 0:
            raise EngineFailed(f"{self.name} ended with status {status}\n{self.log_tail()}")

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        if self.pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0
        self.reader.close()
        os.close(self.commands)

    def log_tail(self) -> str:
        if not self.log.exists():
            return "(no log)"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- end of {self.log}", *lines[-LOG_LINES:]])
