#!/usr/bin/env python3
"""Stores and loads of KV blocks through the worker half of the connector, beside memcpy.

usage: bench_moves.py [--json] [--quick]

A scheduler and a worker of this process use a daemon of their own, started from the program
that KVTIERD names. The KV memory is laid out as a model of 32 layers with pages of 32 KiB; a
block of 64 tokens is two engine blocks of each layer, 2 MiB. What is measured: from the call
that begins a job until the poll that reports it, for a prompt of 64 blocks (128 MiB), straight
from and to shared memory, and through a staging buffer of 64 MiB. The limit of the same run is
a memcpy of the same pages in random order between two buffers of this process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from kvtier import BlockRange, Component, Kind, Layout, ModelSpec, Piece, Region, Role, Session
from kvtier.client import Client
from kvtier.vllm.layout import KvLayout, Storage
from kvtier.vllm.memory import KvMemory, SharedKv
from kvtier.vllm.meta import ComponentMoves, KvtierMetadata, LoadJob, StoreJob
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.staging import HostCopier, StagingKv
from kvtier.vllm.worker import WorkerSide

LAYERS, PAGE_BYTES, PER_BLOCK, BLOCK_TOKENS = 32, 32 << 10, 2, 64
BLOCKS = 64
ENGINE_BLOCKS = BLOCKS * PER_BLOCK
TOTAL_BYTES = BLOCKS * PER_BLOCK * LAYERS * PAGE_BYTES
STAGING_BYTES = 64 << 20
TIMEOUT_S = 30.0


@dataclass
class Row:
    """A figure for tools/bench, in GB/s."""

    figure: str
    value: float
    limit: float = 0.0

    def print(self, is_json: bool) -> None:
        row = {"figure": self.figure, "value": round(self.value, 3), "unit": "GB/s"}
        if self.limit:
            ratio = round(self.value / self.limit, 4)
            row |= {"limit": "memcpy of the pages", "limit_value": self.limit, "ratio": ratio}
        print(json.dumps(row) if is_json else f"{self.figure}: {row}", flush=True)


def spec(name: str) -> ModelSpec:
    size = PER_BLOCK * LAYERS * PAGE_BYTES
    component = Component(Kind.FULL, size)
    return ModelSpec(BLOCK_TOKENS, 1, (component,), model="bench", tags=(f"way={name}",))


def layout_of(address: int) -> KvLayout:
    layer_bytes = ENGINE_BLOCKS * PAGE_BYTES
    pieces = tuple(Piece(0, PAGE_BYTES, i * layer_bytes, PAGE_BYTES) for i in range(LAYERS))
    return KvLayout((Storage(address, TOTAL_BYTES),), (Layout(0, PER_BLOCK, pieces),))


class Engine:
    """One rank and its scheduler; `memory` is one of the connector's ways to it."""

    def __init__(self, socket: str, name: str, region: Region | None) -> None:
        self.bytes = np.empty(TOTAL_BYTES, np.uint8)
        if region is not None:
            self.bytes = np.frombuffer(region.memory, np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, TOTAL_BYTES, np.uint8)
        layout = layout_of(int(self.bytes.ctypes.data))
        memory: KvMemory
        if region is not None:
            memory = SharedKv([region], layout.layouts)
        else:
            memory = StagingKv(layout, HostCopier(layout), STAGING_BYTES)
        engine_id = os.urandom(16)
        self.client = Client(socket)
        self.scheduler: Session = self.client.attach(
            spec(name), engine_id=engine_id, role=Role.SCHEDULER, wait_s=10.0
        )
        self.worker = WorkerSide(
            spec(name),
            rank=0,
            engine_id=engine_id,
            client=Client(socket),
            stats=KvtierStats(),
        )
        self.worker.register(layout, lambda _layout, _is_refused: memory)
        until_s = time.monotonic() + 10.0
        while not self.worker.is_attached:
            if time.monotonic() > until_s:
                raise SystemExit("bench_moves: the worker did not attach")
            time.sleep(0.01)
        self.jobs = 0

    def run(self, meta: KvtierMetadata) -> float:
        """Seconds from the step that begins a job to the poll that reports it."""
        start_s = time.perf_counter()
        self.worker.begin(meta)
        self.worker.begin_stores(meta)
        while True:
            self.worker.poll()
            report = self.worker.take_report()
            if report is not None:
                break
            time.sleep(0.0001)
        took_s = time.perf_counter() - start_s
        (job,) = report.finished.values()
        if not job.is_ok or job.bytes != TOTAL_BYTES:
            raise SystemExit(f"bench_moves: a job failed: {job}")
        return took_s

    def round(self, tokens: np.ndarray) -> tuple[float, float]:
        """Store a new prompt and load it again; seconds of each."""
        moves = [ComponentMoves(0, list(range(BLOCKS)), list(range(ENGINE_BLOCKS)))]
        wanted = self.scheduler.reserve(tokens, [BlockRange(0, 0, BLOCKS)], timeout_s=5.0)
        if wanted.ticket is None:
            raise SystemExit("bench_moves: nothing to store")
        before = self.bytes[:: 1 << 12].copy()
        self.jobs += 1
        store = StoreJob(self.jobs, "r", wanted.ticket.handle, moves, TIMEOUT_S)
        store_s = self.run(KvtierMetadata(stores=[store]))
        self.bytes[:] = 0
        found = self.scheduler.lookup(tokens, lease_s=30.0, timeout_s=5.0)
        if found.lease is None or found.boundary_tokens != len(tokens):
            raise SystemExit(f"bench_moves: {found.boundary_tokens} tokens of {len(tokens)} found")
        self.jobs += 1
        load = LoadJob(self.jobs, "r", found.lease.handle, moves, TIMEOUT_S, is_sync=False)
        load_s = self.run(KvtierMetadata(loads=[load]))
        self.scheduler.release(found.lease)
        if not np.array_equal(before, self.bytes[:: 1 << 12]):
            raise SystemExit("bench_moves: the loaded bytes are not the stored ones")
        return store_s, load_s

    def close(self) -> None:
        self.worker.shutdown()
        self.client.close()


class Memcpy:
    """The same pages copied in random order between two buffers of this process."""

    def __init__(self) -> None:
        self.source, self.target = np.ones(TOTAL_BYTES, np.uint8), np.ones(TOTAL_BYTES, np.uint8)
        pages = TOTAL_BYTES // PAGE_BYTES
        self.offsets = (np.random.default_rng(2).permutation(pages) * PAGE_BYTES).tolist()

    def round(self) -> float:
        """Seconds."""
        source, target = self.source.ctypes.data, self.target.ctypes.data
        start_s = time.perf_counter()
        for offset in self.offsets:
            ctypes.memmove(target + offset, source + offset, PAGE_BYTES)
        return time.perf_counter() - start_s


def measure(socket: str, rounds: int, is_json: bool) -> None:
    """All ways in turn in every round; the best round of each counts, since a busy machine is not
    what is measured."""
    engines = {
        "shared": Engine(socket, "shared", Region.create(TOTAL_BYTES)),
        "staging": Engine(socket, "staging", None),
    }
    memcpy = Memcpy()
    seconds: dict[str, list[float]] = {}
    for i in range(rounds + 1):  # the first one warms up
        tokens = np.full(BLOCKS * BLOCK_TOKENS, i + 1, np.uint32)
        took = {"memcpy": memcpy.round()}
        for name, engine in engines.items():
            took[f"Store, {name}"], took[f"Load, {name}"] = engine.round(tokens)
        for name, value_s in took.items() if i else ():
            seconds.setdefault(name, []).append(value_s)
    for engine in engines.values():
        engine.close()
    rate = {name: TOTAL_BYTES / min(s) / 1e9 for name, s in seconds.items()}
    copy = rate.pop("memcpy")
    for name, value in rate.items():
        what, _, how = name.partition(", ")
        Row(f"{what} of 128 MiB through the vLLM connector, {how}", value, copy).print(is_json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-") as directory:
        socket = f"{directory}/kvtierd.sock"
        settings = [
            f"server.socket={socket}",
            f"server.admin_socket={directory}/admin.sock",
            "tiers.l2.bytes=1GiB",
            "tiers.l2.pages=plain",
        ]
        command = [os.environ["KVTIERD"], *(w for s in settings for w in ("--set", s))]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
            try:
                measure(socket, 2 if options.quick else 15, options.json)
            finally:
                daemon.terminate()


if __name__ == "__main__":
    main()
