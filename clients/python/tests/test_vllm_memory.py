"""The three ways to the engine's KV memory: they give the daemon the same payload, and what goes
wrong on the way ends a transfer as failed, never as hanging, never early."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier import NO_BLOCK, CudaIpcRegion, KvtierError, MoveResult, Region, Unavailable
from kvtier.cuda import CudaError
from kvtier.vllm.cuda import CudaIpcKv, TorchCopier, cuda_regions
from kvtier.vllm.layout import KvLayout, Storage, describe
from kvtier.vllm.memory import SharedAllocation, SharedKv, shared_memory
from kvtier.vllm.meta import ComponentMoves, LoadJob, StoreJob
from kvtier.vllm.staging import HostCopier, StagingKv
from kvtier.vllm.transfer import Transfer
from worker_fakes import FakeDaemon, FakeSession, FakeStorage, FakeTensor, contiguous

BLOCKS, PAGE, LAYERS = 32, 192, 3
WAIT_S = 60.0


@dataclass
class Page:
    page_bytes: int


@dataclass
class Shape:
    engine_blocks_per_block: int
    layer_names: tuple[tuple[str, ...], ...]

    @property
    def places(self) -> list[Page]:
        return [Page(PAGE)] * len(self.layer_names[0])


class Engine:
    """KV memory of a hybrid engine: a full component, and two merged window groups over it."""

    def __init__(self, region: Region | None = None, seed: int = 3):
        size = LAYERS * BLOCKS * PAGE
        self.region = region
        memory = np.zeros(size, np.uint8)
        if region is not None:
            memory = np.frombuffer(region.memory, np.uint8)
        memory[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        self.memory = memory
        self.storage = FakeStorage(memory)
        shape = (BLOCKS, 2, 8, PAGE // 16)
        groups = [tuple(f"{g}{i}" for i in range(LAYERS)) for g in "fab"]
        self.tensors = {
            name: FakeTensor(self.storage, shape, contiguous(shape), i * BLOCKS * PAGE)
            for names in groups
            for i, name in enumerate(names)
        }
        self.layout: KvLayout = describe(
            self.tensors, [Shape(2, (groups[0],)), Shape(4, tuple(groups[1:]))], BLOCKS
        )

    def pages(self, blocks: list[int]) -> bytes:
        return b"".join(self.tensors[f"f{i}"].page(b) for i in range(LAYERS) for b in blocks)

    def wipe(self) -> None:
        self.memory[:] = 0


MOVES = [
    ComponentMoves(component=0, blocks=[0, 1, 2], engine_blocks=[1, 2, 3, 4, 5, 6]),
    ComponentMoves(component=1, blocks=[1, 2], engine_blocks=[10, 11, 12, 13, 14, 15, 16, 17]),
]


def load(moves: list[ComponentMoves], job_id: int = 1, timeout_s: float = 60.0) -> LoadJob:
    return LoadJob(job_id, "r", b"lease", moves, timeout_s, is_sync=False)


def store(moves: list[ComponentMoves], job_id: int = 2, timeout_s: float = 60.0) -> StoreJob:
    return StoreJob(job_id, "r", b"ticket", moves, timeout_s)


def session_of(memory: SharedKv | StagingKv, daemon: FakeDaemon | None) -> Any:
    session = FakeSession(daemon)
    session.attach_args = {"regions": memory.regions, "layouts": memory.layouts}
    return session


def staging(engine: Engine, slots: int) -> StagingKv:
    return StagingKv(engine.layout, HostCopier(engine.layout), slots * 4096)


def ended(transfer: Transfer) -> bool:
    return transfer.wait(WAIT_S)


def test_payload_is_the_same_shared_and_staged() -> None:
    """What one way stored, the other can load: they share a namespace."""
    size = LAYERS * BLOCKS * PAGE
    shared_engine, staged_engine = Engine(Region.create(size)), Engine()
    assert shared_engine.region is not None
    shared = SharedKv([shared_engine.region], shared_engine.layout.layouts)
    staged = staging(staged_engine, slots=3)
    one, other = FakeDaemon(), FakeDaemon()
    assert ended(shared.store(session_of(shared, one), store(MOVES)))
    transfer = staged.store(session_of(staged, other), store(MOVES))
    assert ended(transfer)
    assert transfer.result().is_ok
    assert transfer.result().bytes == 3 * 2 * LAYERS * PAGE + 2 * 4 * LAYERS * PAGE
    assert one.blocks == other.blocks
    assert one.blocks[0, 1] == shared_engine.pages([3, 4])
    assert one.blocks[1, 2] == shared_engine.pages([14, 15, 16, 17])
    staged.close(WAIT_S)


@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_staged_load_fills_the_blocks_and_no_others(slots: int) -> None:
    engine, daemon = Engine(), FakeDaemon()
    memory = staging(engine, slots)
    session = session_of(memory, daemon)
    assert ended(memory.store(session, store(MOVES)))
    before = {b: engine.pages([b]) for b in range(BLOCKS)}
    engine.wipe()
    moves = [
        ComponentMoves(0, [0, 1, 2], [1, 2, 3, NO_BLOCK, 5, 6]),
        ComponentMoves(1, [1, 2], [10, 11, 12, 13, 14, 15, 16, 17]),
    ]
    transfer = memory.load(session, load(moves))
    assert ended(transfer)
    assert transfer.result().is_ok
    written = {1, 2, 3, 5, 6, *range(10, 18)}
    for block in range(BLOCKS):
        assert engine.pages([block]) == (
            before[block] if block in written else bytes(LAYERS * PAGE)
        )
    memory.close(WAIT_S)


def test_staged_load_with_a_miss_names_the_engine_blocks() -> None:
    engine, daemon = Engine(), FakeDaemon()
    memory = staging(engine, 4)
    session = session_of(memory, daemon)
    assert ended(memory.store(session, store(MOVES)))
    daemon.lost = {(0, 1), (1, 2)}
    transfer = memory.load(session, load(MOVES))
    assert ended(transfer)
    result = transfer.result()
    assert not result.is_ok
    assert result.results == {MoveResult.DONE: 3, MoveResult.MISS: 2}
    assert sorted(result.bad_engine_blocks) == [3, 4, 14, 15, 16, 17]
    memory.close(WAIT_S)


def test_staging_waits_for_slots_and_goes_on() -> None:
    """Two jobs of five blocks through two slots, the daemon slow: loads first, all arrive."""
    engine, daemon = Engine(), FakeDaemon()
    memory = staging(engine, 2)
    session = session_of(memory, daemon)
    assert ended(memory.store(session, store(MOVES)))
    daemon.hold()
    first = memory.store(session, store(MOVES, 3))
    second = memory.load(session, load(MOVES, 4))
    assert not first.wait(0.1)
    assert not second.finished()
    daemon.let_go()
    assert ended(first)
    assert ended(second)
    assert first.result().is_ok
    assert second.result().is_ok
    memory.close(WAIT_S)


def test_staged_job_that_gets_no_slot_in_time_is_late() -> None:
    engine, daemon = Engine(), FakeDaemon()
    memory = staging(engine, 1)
    session = session_of(memory, daemon)
    daemon.hold()
    first = memory.store(session, store(MOVES, timeout_s=60.0))
    second = memory.store(session, store(MOVES, 3, timeout_s=0.1))
    assert ended(second)
    assert second.result().results == {MoveResult.LATE: 5}
    assert not first.finished()  # its slot is the daemon's
    first.cancel()
    time.sleep(0.05)
    assert not first.finished()
    daemon.let_go()
    assert ended(first)
    assert first.result().results == {MoveResult.DONE: 1, MoveResult.ABORTED: 4}
    memory.close(WAIT_S)


def test_staged_op_that_fails_ends_the_job_and_frees_the_slots() -> None:
    engine, daemon = Engine(), FakeDaemon()
    memory = staging(engine, 1)
    session = session_of(memory, daemon)
    session.raises = Unavailable("gone")
    transfer = memory.store(session, store(MOVES))
    assert ended(transfer)
    assert isinstance(transfer.result().error, Unavailable)
    session.raises = None
    assert ended(again := memory.store(session, store(MOVES)))
    assert again.result().is_ok
    memory.close(WAIT_S)


def test_staged_copy_that_fails_is_a_failed_job_not_a_hung_one() -> None:
    engine, daemon = Engine(), FakeDaemon()
    memory = staging(engine, 4)
    session = session_of(memory, daemon)
    outside = [ComponentMoves(0, [0], [1, BLOCKS + 7])]
    transfer = memory.store(session, store(outside))
    assert ended(transfer)
    assert not transfer.result().is_ok
    assert ended(good := memory.store(session, store(MOVES)))
    assert good.result().is_ok
    memory.close(WAIT_S)


def test_staging_without_a_daemon_fails_at_once() -> None:
    engine = Engine()
    memory = staging(engine, 4)
    session = session_of(memory, None)
    session.attached = False
    transfer = memory.load(session, load(MOVES))
    assert transfer.finished()
    assert not transfer.result().is_ok


def test_staging_smaller_than_a_block_is_refused() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="staging_bytes=4095 is less than one block of 4096"):
        StagingKv(engine.layout, HostCopier(engine.layout), 4095)


# ---- the engine's own allocation ---------------------------------------------------------------


def test_allocation_is_caught_once() -> None:
    allocation = SharedAllocation(4096)
    assert allocation.take(100) is None  # another tensor
    region = allocation.take(4096)
    assert region is not None
    allocation.note(0x1000, region)
    assert allocation.regions_for([Storage(0x1000, 4096)]) == [region]
    assert allocation.take(4096) is None
    assert "more than once" in allocation.reason


def test_memory_that_was_not_caught_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    allocation = SharedAllocation(4096)
    assert shared_memory(allocation, engine.layout) is None
    assert "not allocated through torch.zeros" in caplog.text


def test_no_memfd_is_no_end() -> None:
    def create(size: int) -> Region:
        raise OSError(24, "too many files")

    allocation = SharedAllocation(4096, create)
    assert allocation.take(4096) is None
    assert "too many files" in allocation.reason


def test_torch_allocates_in_the_region() -> None:
    torch = pytest.importorskip("torch")
    allocation = SharedAllocation(8192)
    with allocation.context():
        other = torch.zeros(16, dtype=torch.float32)
        tensor = torch.zeros(8192, dtype=torch.int8, device="cpu")
    outside = torch.zeros(8192, dtype=torch.int8)
    regions = allocation.regions_for([Storage(tensor.data_ptr(), 8192)])
    assert regions is not None
    tensor[5] = 7
    assert regions[0].memory[5] == 7
    assert not tensor[6:].any()
    assert other.shape == (16,)
    assert allocation.regions_for([Storage(outside.data_ptr(), 8192)]) is None


def test_torch_copier_copies_as_the_host_copier_does() -> None:
    torch = pytest.importorskip("torch")
    engine = Engine()
    plain = HostCopier(engine.layout)
    copier = TorchCopier(torch, engine.layout, [torch.from_numpy(engine.memory)])
    size = engine.layout.bytes_per_block(1)
    one, other = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    plain.gather(1, [3, 9, 1, 4], one, None)
    copier.gather(1, [3, 9, 1, 4], other, copier.fence())
    copier.settle()
    assert one.tobytes() == other.tobytes()
    copier.scatter(1, [20, NO_BLOCK, 21, 22], other, None)
    assert engine.pages([20, 21, 22]) == engine.pages([3, 1, 4])


# ---- CUDA, with fakes --------------------------------------------------------------------------


def test_copies_run_on_the_engines_device() -> None:
    """The copying thread's own device is the first one, also in the worker of another rank."""
    device = SimpleNamespace(type="cuda", index=3)
    made: list[Any] = []

    def make_stream(device: Any = None) -> object:
        made.append(device)
        return object()

    cuda = SimpleNamespace(Stream=make_stream, stream=nullcontext)
    copier = TorchCopier(
        SimpleNamespace(cuda=cuda), Engine().layout, [SimpleNamespace(device=device)]
    )
    with copier._side_stream(None):
        pass
    assert made == [device]


class FakeEvent:
    def __init__(self) -> None:
        self.is_over = False
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_over


class FakeCuda:
    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.can_export = True
        self.threads: set[str] = set()

    def export(self, address: int, size: int) -> CudaIpcRegion:
        if not self.can_export:
            raise CudaError("cuIpcGetMemHandle: error 801")
        return CudaIpcRegion(b"h" * 64, 512, size, b"u" * 16)

    def use_device(self) -> None:
        self.threads.add(threading.current_thread().name)

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


def cuda_kv() -> tuple[FakeCuda, CudaIpcKv]:
    cuda, engine = FakeCuda(), Engine()
    return cuda, CudaIpcKv(cuda_regions(engine.layout, cuda), engine.layout.layouts, cuda)


def test_cuda_region_is_the_storage_within_its_allocation() -> None:
    _, memory = cuda_kv()
    (region,) = memory.regions
    assert (region.offset_bytes, region.bytes) == (512, LAYERS * BLOCKS * PAGE)
    memory.close(WAIT_S)


def test_cuda_memory_that_cannot_be_exported() -> None:
    cuda = FakeCuda()
    cuda.can_export = False
    with pytest.raises(CudaError, match="801"):
        cuda_regions(Engine().layout, cuda)


def test_cuda_jobs_begin_when_the_stream_is_there() -> None:
    """The daemon must not read before the forward pass wrote, nor write before the zeroing did."""
    cuda, memory = cuda_kv()
    session: Any = FakeSession()
    first = memory.store(session, store(MOVES))
    second = memory.load(session, load(MOVES))
    assert not first.wait(0.02)
    assert session.calls == []
    cuda.events[0].is_over = True
    deadline_s = time.monotonic() + WAIT_S
    while not session.ops and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert [call[0] for call in session.calls] == ["demote"]
    assert not first.finished()
    session.ops[0].finish([bytes(3), bytes(2)], 100)
    assert ended(first)
    assert first.result().is_ok
    cuda.events[1].is_over = True
    while len(session.ops) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    session.ops[1].finish([bytes(3), bytes(2)], 100)
    assert ended(second)
    assert cuda.threads == {"kvtier-events"}
    memory.close(WAIT_S)


@pytest.mark.parametrize("how", ["late", "cancel", "error"])
def test_cuda_store_that_never_gets_its_turn_ends(how: str) -> None:
    cuda, memory = cuda_kv()
    session: Any = FakeSession()
    timeout_s = 0.05 if how == "late" else 60.0
    transfer = memory.store(session, store(MOVES, timeout_s=timeout_s))
    if how == "cancel":
        transfer.cancel()
    if how == "error":
        cuda.events[0].error = RuntimeError("an illegal memory access was encountered")
    assert ended(transfer)
    assert isinstance(transfer.result().error, KvtierError)
    assert session.calls == []
    memory.close(WAIT_S)
