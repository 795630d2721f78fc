"""The engine as users start it: three processes and an HTTP server."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any

import engine
import models
from daemon import Daemon
from engine import Request
from world import BATCHED_TOKENS_MAX, BLOCKS_MEMORY, CONTEXT_TOKENS_MAX, World, connector, reusable

START_SECONDS_MAX = 120
STOP_SECONDS_MAX = 30
MAX_TOKENS = 8
HITS = "vllm:external_prefix_cache_hits_total"


class Server:
    """with Server(...) as server: the HTTP server with the connector, from its start to its end."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        environment = os.environ | engine.ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        self.log: pathlib.Path = world.logs / "server.log"
        options = {
            "model": str(world.directory),
            "port": str(self.port),
            "max-model-len": str(CONTEXT_TOKENS_MAX),
            "max-num-batched-tokens": str(BATCHED_TOKENS_MAX),
            "kv-cache-memory-bytes": str(BLOCKS_MEMORY),
            "seed": "0",
            "kv-transfer-config": json.dumps(connector(daemon.socket)),
        }
        for name, value in models.MODELS[world.model].engine.items():
            options[name.replace("_", "-")] = str(value)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        for name, value in options.items():
            command += [f"--{name}", value]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        """GET, or POST where there is a body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def wait_up(self) -> None:
        until = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server did not come up"
                time.sleep(0.1)

    def complete(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens and their logprobs."""
        body = {
            "model": json.loads(self.get("/v1/models"))["data"][0]["id"],
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 3,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = json.loads(self.get("/v1/completions", body))["choices"]
        return tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])

    def metrics(self) -> dict[str, float]:
        """Sums over labels, by name."""
        values: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if not line.startswith("#") and line.strip():
                name, value = line.rsplit(maxsplit=1)
                name = name.partition("{")[0]
                values[name] = values.get(name, 0) + float(value)
        return values

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(STOP_SECONDS_MAX)


def http_server(world: World) -> None:
    """The server with the documented flag: answers as without it, hits after its own cache is
    emptied, and both vLLM's and the connector's numbers in /metrics."""
    daemon = world.daemon()
    with Server(world, daemon) as server:
        server.wait_up()
        daemon.wait_sessions(2)
        prompt = world.prompt(705)
        expected = world.expected(Request(prompt, MAX_TOKENS))
        chosen = tuple(dict(s)[t] for s, t in zip(expected.logprobs, expected.tokens, strict=True))
        assert server.complete(prompt) == (expected.tokens, chosen), "cold: another answer"
        daemon.wait("everything is stored", lambda: not any(daemon.held().values()))
        assert server.metrics()[HITS] == 0, "external hits without any"
        server.get("/reset_prefix_cache", {})
        assert server.complete(prompt) == (expected.tokens, chosen), "warm: another answer"
        metrics = server.metrics()
        block = int(daemon.stats()["namespaces"][0]["block_tokens"])
        assert metrics[HITS] == reusable(705, block), f"{metrics[HITS]} external hits"
        own = {name for name in metrics if name.startswith("vllm:kvtierd_")}
        assert own, "no vllm:kvtierd_* in /metrics"
        print(f"   {len(own)} series of vllm:kvtierd_*", flush=True)
        server.stop()
    world.check_after()
