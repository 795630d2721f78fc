"""KV memory on a GPU: registered by CUDA IPC handle, or copied through pinned host memory.

**Not proven on a GPU.** `CudaIpcKv` is tested with a real daemon on a CUDA runtime in ordinary
memory, `TorchCopier` with fakes of its calls; nobody has run them with a device and an engine yet.

The order that makes it right without ever blocking the step:

* a store may read its blocks only after the forward pass that wrote them is through on the
  engine's stream, and a load may write its blocks only after the engine's zeroing of new
  blocks, launched there before, is through. So an event is recorded there when a job is
  begun, and the daemon is asked only once the event is over (`CudaIpcKv`), or the copying
  stream waits for it (`TorchCopier`);
* a load is finished when the daemon's copy (or ours, synchronised) is complete; the engine
  launches the forward pass that reads it only after it was reported, so nothing is needed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvtier import NO_BLOCK, Aborted, CudaIpcRegion, Layout, Session
from kvtier.cuda import CudaError, check, device_of, export, load_driver
from kvtier.vllm.layout import KvLayout
from kvtier.vllm.memory import begin_load, begin_store
from kvtier.vllm.meta import LoadJob, StoreJob
from kvtier.vllm.transfer import Transfer, TransferResult, failed

logger = logging.getLogger(__name__)

POLL_S = 0.0002


class CudaEvent(Protocol):
    """What was launched on a stream up to now."""

    def query(self) -> bool:
        """All of it is done."""
        ...


class CudaApi(Protocol):
    """The CUDA calls that are needed, so that tests can do without a device."""

    def export(self, address: int, size: int) -> CudaIpcRegion:
        """The region of so many bytes of the engine's memory. Raises CudaError."""
        ...

    def use_device(self) -> None:
        """In a thread of ours, before anything else: its device is the engine's. A thread's own one
        is the first, and to ask for an event there would make a context on it."""
        ...

    def record_event(self) -> CudaEvent:
        """An event behind all that the engine launched; in the engine's thread."""
        ...


class TorchCuda:
    """The calls through torch and the CUDA driver, for KV memory of one GPU.

    address: of any of it: its device is the one that counts, whatever this thread's current one is.
    Raises CudaError.
    """

    def __init__(self, torch: Any, address: int, driver: Any = None) -> None:
        self._torch = torch
        self._driver = driver or load_driver()
        self._device = device_of(address, driver=self._driver)

    def export(self, address: int, size: int) -> CudaIpcRegion:
        device = device_of(address, driver=self._driver)
        if device != self._device:
            raise CudaError(f"KV memory lies on GPUs {self._device} and {device}")
        return export(address, size, driver=self._driver)

    def use_device(self) -> None:
        self._torch.cuda.set_device(self._device)

    def record_event(self) -> CudaEvent:
        event: CudaEvent = self._torch.cuda.current_stream(self._device).record_event()
        return event


def cuda_regions(layout: KvLayout, cuda: CudaApi) -> list[CudaIpcRegion]:
    """A region for each storage. Raises CudaError for memory that cannot be exported (pools of
    virtual memory: vLLM's sleep mode, torch's expandable segments)."""
    return [cuda.export(storage.address, storage.bytes) for storage in layout.storages]


class GatedTransfer:
    """A job that waits for what the engine's stream has to do first. Thread-safe."""

    def __init__(
        self, job: LoadJob | StoreJob, event: CudaEvent, begin: Callable[[], Transfer]
    ) -> None:
        self._job = job
        self._event = event
        self._begin = begin
        self._deadline_s = time.monotonic() + job.timeout_s
        self._lock = threading.Lock()
        self._begun: Transfer | None = None
        self._has_begun = threading.Event()
        self._is_cancelled = False

    def try_begin(self) -> bool:
        """Begin if the event is over, or give up if it is too late. Answers: no longer waiting."""
        with self._lock:
            if self._is_cancelled or time.monotonic() >= self._deadline_s:
                self._fail("given up before the engine's stream got to it")
            else:
                try:
                    if not self._event.query():
                        return False
                    self._begun = self._begin()
                except Exception as error:  # a broken CUDA context must not hang the request
                    logger.exception("kvtier: a job waited for the engine's stream")
                    self._fail(f"the stream's event: {error}")
        self._has_begun.set()
        return True

    def _fail(self, why: str) -> None:
        self._begun = failed(self._job.moves, Aborted(why))

    def finished(self) -> bool:
        return self._begun is not None and self._begun.finished()

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        if not self._has_begun.wait(timeout_s) or self._begun is None:
            return False
        return self._begun.wait(max(0.0, until_s - time.monotonic()))

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._begun is not None:
                self._begun.cancel()

    def result(self) -> TransferResult:
        if self._begun is None:
            raise RuntimeError("result of a transfer that is not finished")
        return self._begun.result()


class CudaIpcKv:
    """The daemon opens the engine's KV memory on the GPU."""

    name = "cuda_ipc"

    def __init__(
        self, regions: Sequence[CudaIpcRegion], layouts: Sequence[Layout], cuda: CudaApi
    ) -> None:
        self.regions = tuple(regions)
        self.layouts = tuple(layouts)
        self._cuda = cuda
        self._waiting: deque[GatedTransfer] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def load(self, session: Session, job: LoadJob) -> Transfer:
        return self._gate(job, lambda: begin_load(session, job))

    def store(self, session: Session, job: StoreJob) -> Transfer:
        return self._gate(job, lambda: begin_store(session, job))

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _gate(self, job: LoadJob | StoreJob, begin: Callable[[], Transfer]) -> Transfer:
        transfer = GatedTransfer(job, self._cuda.record_event(), begin)
        with self._changed:
            self._waiting.append(transfer)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="kvtier-events", daemon=True)
            self._thread.start()
        return transfer

    def _poll(self) -> None:
        """Begin jobs whose event is over, in their order: the events are of one stream."""
        try:
            self._cuda.use_device()
        except Exception:  # a context that is lost: each job's event says so
            logger.exception("kvtier: the thread that waits for the engine's stream")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
            if self._waiting[0].try_begin():
                self._waiting.popleft()
            else:
                time.sleep(POLL_S)


class TorchCopier:
    """Copies between device tensors and pinned slots, on a stream of its own (see
    `staging.BlockCopier`). `storages` are the engine's KV storages as flat uint8 tensors."""

    def __init__(self, torch: Any, layout: KvLayout, storages: Sequence[Any]):
        self._torch = torch
        self._layout = layout
        self._storages = list(storages)
        self._is_cuda = bool(storages) and storages[0].device.type == "cuda"
        self._stream: Any = None  # made in the copying thread

    def fence(self) -> Any:
        return self._torch.cuda.current_stream().record_event() if self._is_cuda else None

    def gather(self, component: int, engine_blocks: Sequence[int], slot: Any, fence: Any) -> None:
        with self._side_stream(fence):
            at = 0
            for piece in self._layout.layouts[component].pieces:
                for block in engine_blocks:
                    self._host(slot, at, piece.bytes).copy_(
                        self._page(piece, block), non_blocking=True
                    )
                    at += piece.bytes

    def scatter(self, component: int, engine_blocks: Sequence[int], slot: Any, fence: Any) -> None:
        with self._side_stream(fence):
            at = 0
            for piece in self._layout.layouts[component].pieces:
                for block in engine_blocks:
                    if block != NO_BLOCK:
                        self._page(piece, block).copy_(
                            self._host(slot, at, piece.bytes), non_blocking=True
                        )
                    at += piece.bytes

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _page(self, piece: Any, block: int) -> Any:
        begin = piece.offset_bytes + block * piece.stride_bytes
        return self._storages[piece.region_idx][begin : begin + piece.bytes]

    def _host(self, slot: Any, at: int, size: int) -> Any:
        return self._torch.from_numpy(slot[at : at + size])

    def _side_stream(self, fence: Any) -> Any:
        if not self._is_cuda:
            return self._torch.no_grad()
        if self._stream is None:
            # Of the engine's device: a thread's own one is the first, whatever rank this is, and
            # what is copied on another device's stream is not done when this one is through.
            self._stream = self._torch.cuda.Stream(device=self._storages[0].device)
        if fence is not None:
            self._stream.wait_event(fence)
        return self._torch.cuda.stream(self._stream)


def pin(torch: Any, memory: Any) -> None:
    """Lock a staging buffer for the device's copy engine; raises CudaError."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    check(int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)), "cudaHostRegister")
