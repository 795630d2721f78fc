"""The connector's worker half with KV memory on a GPU, against a real daemon: both on the fake CUDA
runtime. torch is played (streams and events are the fake's, which does things late); the bytes in
GPU memory are real, and each is compared with what was there before."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpu
import kvtier
import kvtier.vllm.cuda
from daemon import Daemon
from engine import WAIT_S, wait_until
from kvtier.vllm.backing import Backing
from kvtier.vllm.layout import describe
from kvtier.vllm.meta import ComponentMoves, JobReport, KvtierMetadata, LoadJob, StoreJob
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.options import Options
from kvtier.vllm.worker import WorkerSide
from test_vllm_memory import BLOCKS, LAYERS, PAGE, Shape
from worker_fakes import FakeStorage, FakeTensor, contiguous

DEVICE = 1  # not the one that a thread begins with
BLOCK_TOKENS = 16
SPEC = kvtier.ModelSpec(
    BLOCK_TOKENS,
    1,
    (
        kvtier.Component(kvtier.Kind.FULL, 2 * LAYERS * PAGE, name="full"),
        kvtier.Component(kvtier.Kind.SLIDING_WINDOW, 4 * LAYERS * PAGE, BLOCK_TOKENS, name="w"),
    ),
    "vllm on a GPU",
)
#: Engine blocks of a prompt of three blocks: first where it was computed, then where it is loaded.
COMPUTED = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10])
LOADED = ([11, 12, 13, 14, 15, 16], [17, 18, 19, 20])

pytestmark = pytest.mark.skipif(not (gpu.PROGRAM and gpu.LIBRARY), reason=gpu.NOT_BUILT)


class GpuStorage(FakeStorage):
    """A torch storage: a part of a larger allocation, as from torch's caching allocator."""

    def __init__(self, size: int) -> None:
        self.allocation = gpu.Allocation(size + (1 << 16), DEVICE)
        self._address = self.allocation.address + 512
        super().__init__(gpu.view(self._address, size))

    def data_ptr(self) -> int:
        return self._address


class Worker:
    """A worker of vLLM: its tensors on a GPU, its stream, and the connector's worker half."""

    def __init__(self, socket: str) -> None:
        size = LAYERS * BLOCKS * PAGE
        self.storage = GpuStorage(size)
        shape = (BLOCKS, 2, 8, PAGE // 16)
        groups = [tuple(f"{g}{i}" for i in range(LAYERS)) for g in "fw"]
        self.tensors: dict[str, Any] = {
            name: FakeTensor(self.storage, shape, contiguous(shape), i * BLOCKS * PAGE)
            for names in groups
            for i, name in enumerate(names)
        }
        layout = describe(self.tensors, [Shape(2, (groups[0],)), Shape(4, (groups[1],))], BLOCKS)
        gpu.set_device(DEVICE)
        self.stream = gpu.Stream()
        self.engine_id = os.urandom(16)
        self.side = WorkerSide(
            SPEC,
            rank=0,
            engine_id=self.engine_id,
            client=kvtier.Client(socket, timeout_s=5.0),
            stats=KvtierStats(),
        )
        torch = SimpleNamespace(
            cuda=SimpleNamespace(
                set_device=gpu.set_device, current_stream=lambda device: self.stream_of(device)
            )
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "torch", torch)
            patch.setattr(kvtier.vllm.cuda, "load_driver", gpu.library)
            self.side.register(layout, Backing(Options(), "cuda", self.tensors, None))
        self.job_ids = itertools.count(1)

    def stream_of(self, device: int) -> gpu.Stream:
        assert device == DEVICE
        return self.stream

    def page_address(self, block: int, layer: int) -> int:
        return self.storage.data_ptr() + (layer * BLOCKS + block) * PAGE

    def pages(self, blocks: list[int]) -> bytes:
        return b"".join(self.tensors[f"f{i}"].page(b) for i in range(LAYERS) for b in blocks)

    def compute(self, blocks: list[int], seed: int) -> None:
        """A forward pass: it is only launched when this is over."""
        for block, layer in itertools.product(blocks, range(LAYERS)):
            value = (17 * block + 5 * layer + seed) % 255 + 1
            self.stream.fill(self.page_address(block, layer), value, PAGE)

    def zero(self, blocks: list[int]) -> None:
        """As vLLM does with new blocks; launched, too."""
        for block, layer in itertools.product(blocks, range(LAYERS)):
            self.stream.fill(self.page_address(block, layer), 0, PAGE)

    def begin_store(self, ticket: kvtier.Ticket) -> int:
        job = StoreJob(next(self.job_ids), "r", ticket.handle, moves(COMPUTED), 10.0)
        self.side.begin_stores(KvtierMetadata(stores=[job]))
        return job.job_id

    def begin_load(self, lease: kvtier.Lease) -> int:
        job = LoadJob(next(self.job_ids), "r", lease.handle, moves(LOADED), 10.0, is_sync=False)
        self.side.begin(KvtierMetadata(loads=[job]))
        return job.job_id

    def take(self, job_id: int) -> JobReport | None:
        self.side.poll()
        report = self.side.take_report()
        return None if report is None else report.finished[job_id]

    def end(self, job_id: int) -> JobReport:
        """The report of the one job that runs."""
        until_s = time.monotonic() + WAIT_S
        while (report := self.take(job_id)) is None:
            assert time.monotonic() < until_s, "the job does not end"
            time.sleep(0.001)
        return report

    def close(self) -> None:
        self.side.shutdown()
        gpu.set_device(DEVICE)
        self.stream.synchronize()
        self.stream.free()
        self.storage.allocation.free()


def moves(engine_blocks: tuple[list[int], list[int]]) -> list[ComponentMoves]:
    full, window = engine_blocks
    return [ComponentMoves(0, [0, 1, 2], full), ComponentMoves(1, [2], window)]


def tokens(seed: int) -> Any:
    return np.arange(3 * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(1000 * seed)


class Engine:
    """The worker, and the scheduler's session."""

    def __init__(self, socket: str) -> None:
        self.worker = Worker(socket)
        self.client = kvtier.Client(socket, timeout_s=5.0)
        self.scheduler = self.client.attach(
            SPEC,
            engine_id=self.worker.engine_id,
            role=kvtier.Role.SCHEDULER,
            wait_s=WAIT_S,
        )

    def reserve(self, seed: int) -> kvtier.Ticket | None:
        wants = [kvtier.BlockRange(0, 0, 3), kvtier.BlockRange(1, 2, 3)]
        return self.scheduler.reserve(tokens(seed), wants).ticket

    def lookup(self, seed: int) -> kvtier.Lease | None:
        found = self.scheduler.lookup(tokens(seed), lease_s=30.0)
        return found.lease if found.boundary_tokens == 3 * BLOCK_TOKENS else None

    def round_trip(self, seed: int, is_lossy: bool = False) -> bool:
        """Computes and stores a prompt, zeroes other blocks and loads it there. Whether it came
        back; if so, it is right."""
        worker = self.worker
        ticket = self.reserve(seed)
        if ticket is None and is_lossy:
            return False
        assert ticket is not None
        blocks = [*COMPUTED[0], *COMPUTED[1]]
        worker.compute(blocks, seed)
        report = worker.end(worker.begin_store(ticket))
        self.scheduler.release(ticket)
        assert report.is_ok or is_lossy, report
        lease = self.lookup(seed)
        if lease is None and is_lossy:
            return False
        assert lease is not None
        into = [*LOADED[0], *LOADED[1]]
        worker.zero(into)
        report = worker.end(worker.begin_load(lease))
        self.scheduler.release(lease)
        assert report.is_ok or is_lossy, report
        if report.is_ok:
            assert worker.pages(into) == worker.pages(blocks)
            assert 0 not in worker.pages(blocks)
        return report.is_ok

    def is_attached(self) -> bool:
        return self.worker.side.is_attached and self.scheduler.attached

    def close(self) -> None:
        self.worker.close()
        self.client.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with gpu.serving(gpu.daemon_on_fake()) as one:
        yield one


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    one = Engine(daemon.socket)
    yield one
    one.close()


def test_blocks_come_back(engine: Engine) -> None:
    for seed in range(5):
        assert engine.round_trip(seed)
    stats = engine.client.stats()
    used = [sum(path.bytes for path in g.paths) for g in stats.gpus if g.index == DEVICE]
    assert used[0] > 0


def frozen(do: Callable[[], int], worker: Worker) -> JobReport:
    """A job that begins while the engine's stream stands still: it does not end before it moves."""
    gpu.library().kvt_fake_engine_freeze(True)
    try:
        job_id = do()
        time.sleep(0.1)
        assert worker.take(job_id) is None
    finally:
        gpu.library().kvt_fake_engine_freeze(False)
    return worker.end(job_id)


def test_stores_and_loads_keep_to_the_engines_stream(engine: Engine) -> None:
    """The daemon must not read before the forward pass wrote, nor write before the zeroing did:
    streams of two processes know nothing of each other."""
    worker = engine.worker
    ticket = engine.reserve(1)
    assert ticket is not None
    blocks, into = [*COMPUTED[0], *COMPUTED[1]], [*LOADED[0], *LOADED[1]]

    def store() -> int:
        worker.compute(blocks, 1)
        return worker.begin_store(ticket)

    assert frozen(store, worker).is_ok
    lease = engine.lookup(1)
    assert lease is not None

    def load() -> int:
        worker.zero(into)
        return worker.begin_load(lease)

    assert frozen(load, worker).is_ok
    worker.stream.synchronize()
    assert worker.pages(into) == worker.pages(blocks)
    assert 0 not in worker.pages(into)


def test_daemon_that_restarts(daemon: Daemon, engine: Engine) -> None:
    assert engine.round_trip(1)
    daemon.kill()
    wait_until(lambda: not engine.is_attached())
    report = engine.worker.end(engine.worker.begin_load(kvtier.Lease(b"l" * 24, 1.0, 1)))
    assert not report.is_ok
    daemon.start()
    wait_until(engine.is_attached)
    assert engine.round_trip(1)


def test_gpu_that_is_lost_again_and_again() -> None:
    one = gpu.daemon_on_fake(fake="lose_every=600,late=1")
    try:
        one.start()
        engine = Engine(one.socket)
        until_s = time.monotonic() + 60.0
        right = losses = seed = 0
        while losses < 2 or right == 0:
            assert time.monotonic() < until_s, (losses, right)
            seed += 1
            try:
                right += engine.round_trip(seed, is_lossy=True)
            except kvtier.KvtierError:
                time.sleep(0.01)
            losses = sum(g.losses for g in engine.client.stats().gpus)
        wait_until(engine.is_attached)
        print(f"{seed} rounds, {right} right loads, {losses} losses")
        engine.close()
        assert one.terminate() == 0, one.log()
    finally:
        one.close()
