"""GPU memory between processes, through the CUDA driver: exporting an engine's, importing L1's.

`export` makes the region of memory that an engine allocated, `Arenas` imports L1 where a daemon
lets engines read it in place (`in_place.py`). Only libcuda.so.1 is called, and only when one of the
two is used. Threads need a current CUDA context, which an engine's threads have once they used the
GPU (torch.cuda.set_device, cudaSetDevice); else CudaError says so.

**Not proven on a GPU**: tested against a fake of the driver, whose memory a real daemon opens.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier.region import CudaIpcRegion
from kvtier.types import Arena

_LOG = logging.getLogger("kvtier")
HANDLE_BYTES = 64
_IS_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_CALLS = (
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetUuid_v2",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
)
_ERRORS = {
    1: "invalid value",
    2: "out of memory",
    3: "CUDA is not initialised in this process (after a fork it cannot be: use spawn)",
    201: "this thread has no CUDA context: set its device first",
    700: "an illegal memory access before it: the context is lost",
    801: "not supported here",
}
_NO_HANDLE = (
    "it was not allocated with cudaMalloc and has no IPC handle: torch's expandable segments "
    "(PYTORCH_CUDA_ALLOC_CONF), cudaMallocAsync, vLLM's sleep mode"
)


class CudaError(RuntimeError):
    """A CUDA call failed; the text says which, and with what number."""


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


def load_driver(name: str = "libcuda.so.1") -> Any:
    """The driver's library. CudaError: there is none, or one without what is called here."""
    try:
        driver = ctypes.CDLL(name)
    except OSError as error:
        raise CudaError(f"{name}: {error}") from error
    for call in _CALLS:
        if not hasattr(driver, call):
            raise CudaError(f"{name} has no {call}: the driver is too old, or a stub")
    return driver


def check(status: int, call: str) -> None:
    """Raises CudaError unless a call answered 0."""
    if status:
        raise CudaError(f"{call}: error {status} ({_ERRORS.get(status, 'see cuda.h')})")


# ---- an engine's memory --------------------------------------------------------------------------


def export(address: int, size: int, *, owner: object = None, driver: Any = None) -> CudaIpcRegion:
    """The region of size bytes of device memory at address.

    They may begin anywhere in their allocation: the handle is of the whole of it, which a process
    that opens it can reach, and the region says where in it they lie. The device is the one that
    the memory is on, whatever the thread's current one is and however CUDA_VISIBLE_DEVICES counts:
    it is named by its UUID. owner: what keeps the memory allocated (a tensor, its storage); the
    region, and a session as long as it has the region, keep it.

    CudaError: the memory cannot be exported, or is not all in one allocation.
    """
    if size < 1:
        raise CudaError(f"export: {size} bytes at 0x{address:x}")
    driver = driver or load_driver()
    base, found = ctypes.c_uint64(), ctypes.c_size_t()
    check(
        driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(found), ctypes.c_uint64(address)
        ),
        "cuMemGetAddressRange",
    )
    offset = address - base.value
    if offset + size > found.value:
        raise CudaError(
            f"export: {size} bytes at 0x{address:x} are not in one allocation: the one there ends "
            f"after {found.value - offset}; {_NO_HANDLE}"
        )
    if _attribute(driver, _IS_IPC_CAPABLE, base.value) == 0:
        raise CudaError(f"export: the memory at 0x{address:x} cannot be shared: {_NO_HANDLE}")
    handle = _Handle()
    status = driver.cuIpcGetMemHandle(ctypes.byref(handle), base)
    if status in (1, 801):
        raise CudaError(f"cuIpcGetMemHandle: error {status}: {_NO_HANDLE}")
    check(status, "cuIpcGetMemHandle")
    return CudaIpcRegion(
        handle=bytes(handle.bytes),
        offset_bytes=offset,
        bytes=size,
        device_uuid=device_uuid(driver, device_of(address, driver=driver)),
        owner=owner,
    )


def device_of(address: int, *, driver: Any = None) -> int:
    """The device that memory is on, as this process counts them (CUDA_VISIBLE_DEVICES)."""
    device = _attribute(driver or load_driver(), _DEVICE_ORDINAL, address)
    if device is None:
        raise CudaError(f"cuPointerGetAttribute: 0x{address:x} is no memory of a GPU")
    return device


def device_uuid(driver: Any, device: int) -> bytes:
    """Its 16 bytes: what the daemon knows the GPU by."""
    handle, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    check(driver.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(driver.cuDeviceGetUuid_v2(uuid, handle), "cuDeviceGetUuid")
    return bytes(uuid)


def _attribute(driver: Any, attribute: int, address: int) -> int | None:
    """None: the driver does not know it of this pointer."""
    value = ctypes.c_int(0)
    status = driver.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
    if status == 201:
        check(status, "cuPointerGetAttribute")
    return None if status else value.value


# ---- L1 ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Import:
    """Begins as being opened, by the first that took it. In the table until the closer takes it out
    to close it: the same arena may be opened anew meanwhile, the driver counts."""

    readers: int
    address: int | None = None  # None: being opened
    context: Any = None
    is_retired: bool = False

    @property
    def is_due(self) -> bool:
        """To be closed: nobody reads there, and it is not being opened."""
        return self.is_retired and self.readers == 0 and self.address is not None


class Arenas:
    """L1's arenas in this process: each opened once, and closed in time. One for each session.

    An import has to be closed soon after its arena was lost or the daemon is gone: its memory may
    stay taken as long as anybody maps it. But not under a reader. So what was retired is closed
    when the last of its readers has given it back, at once when there is none.

    A call of the driver may hang, above all on a GPU that is being lost. So the lock is never held
    over one: take() opens in the thread of its caller, and a thread of this object, which starts
    with the first import and ends by close(), closes, in the context that opened. Nothing but
    take() and close() waits, whatever hangs. Thread-safe.
    """

    def __init__(self, driver: Any = None) -> None:
        """driver: stands for libcuda.so.1 in tests."""
        self._driver = driver
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._imports: dict[Arena, _Import] = {}
        self._closing = 0  # taken out of the table, and not yet closed
        self._closer: threading.Thread | None = None
        self._is_closed = False

    def take(self, arena: Arena) -> int:
        """Where it begins in this process; give_back() it once for each time. Opens it if need be,
        on the current device, which has to be the arena's or a peer of it; then earlier arenas of
        the same GPU are retired. CudaError: it does not open; also in the daemon's own process, and
        in one of another PID or IPC namespace; or close() was called. Waits as long as the driver
        does, also where another thread opens the same arena."""
        self._driver = self._driver or load_driver()
        with self._changed:
            found = self._wait_opened(arena)
            if found is not None and found.address is not None:
                found.readers += 1
                found.is_retired = False
                return found.address
            self._start()
            self._retire([a for a in self._imports if a.device_uuid == arena.device_uuid])
            found = self._imports[arena] = _Import(readers=1)
        try:
            address, context = self._open(arena)
        except BaseException:
            with self._changed:
                del self._imports[arena]
                self._changed.notify_all()
            raise
        with self._changed:
            found.address, found.context = address, context
            self._changed.notify_all()
        return address

    def give_back(self, arena: Arena) -> None:
        """A reader has ended, its stream synchronised."""
        with self._changed:
            self._imports[arena].readers -= 1
            self._changed.notify_all()

    def retire(self) -> None:
        """All of them are of nothing any more: a GPU was lost, or the session has ended."""
        with self._changed:
            self._retire(list(self._imports))

    def count(self) -> int:
        """How many are open, being opened or being closed."""
        with self._lock:
            return len(self._imports) + self._closing

    def close(self, timeout_s: float = 5.0) -> None:
        """No arena is taken any more, and all are closed as soon as nobody reads there; waits for
        that, at most timeout_s. What takes longer goes on by itself."""
        with self._changed:
            self._is_closed = True
            self._retire(list(self._imports))
            closer = self._closer
        if closer is not None and closer is not threading.current_thread():
            closer.join(timeout_s)

    # ---- under the lock --------------------------------------------------------------------------

    def _wait_opened(self, arena: Arena) -> _Import | None:
        """The import once it is open; None: there is none (any more)."""

        def is_decided() -> bool:
            found = self._imports.get(arena)
            return self._is_closed or found is None or found.address is not None

        self._changed.wait_for(is_decided)
        if self._is_closed:
            raise CudaError("the table of arenas is closed")
        return self._imports.get(arena)

    def _retire(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            self._imports[arena].is_retired = True
        self._changed.notify_all()

    def _start(self) -> None:
        if self._closer is None:
            closer = threading.Thread(target=self._run, name="kvtier-arenas", daemon=True)
            closer.start()
            self._closer = closer

    def _next_due(self) -> Arena | None:
        return next((arena for arena, found in self._imports.items() if found.is_due), None)

    # ---- without the lock ------------------------------------------------------------------------

    def _open(self, arena: Arena) -> tuple[int, Any]:
        """Address and context."""
        driver = self._driver
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        check(driver.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if not context:
            check(201, "cuCtxGetCurrent")
        handle = _Handle.from_buffer_copy(arena.handle)
        check(
            driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _LAZY_PEER_ACCESS),
            "cuIpcOpenMemHandle",
        )
        return address.value, context

    def _run(self) -> None:
        """The closer."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._is_closed and not self._imports) or self._next_due() is not None
                )
                arena = self._next_due()
                if arena is None:
                    return
                found = self._imports.pop(arena)
                self._closing += 1
            self._shut(found)
            with self._changed:
                self._closing -= 1

    def _shut(self, found: _Import) -> None:
        try:
            with _current(self._driver, found.context):
                status = self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(found.address or 0))
                check(status, "cuIpcCloseMemHandle")
        except CudaError as error:  # of a context that is lost: it goes with the process
            _LOG.warning("an import of L1 stays open: %s", error)


@contextmanager
def _current(driver: Any, context: Any) -> Iterator[None]:
    check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
