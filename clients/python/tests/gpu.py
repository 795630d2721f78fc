"""A GPU for tests: the fake CUDA runtime of tests/common, as a process of an engine sees it.

Its "GPU memory" is shared memory that another process on the same fake opens by IPC handle, so that
a real daemon (kvtierd-fake-cuda) really reads and writes what Python lends it. Copies and fills are
queued on streams and happen late, and each call of CUDA in a thread without a device ends the
process, or answers as the driver does.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

import engine
import kvtier
from daemon import Daemon
from kvtier import cuda

PROGRAM = os.environ.get("KVTIERD_FAKE_CUDA", "")
LIBRARY = os.environ.get("KVT_FAKE_CUDA_LIBRARY", "")
NOT_BUILT = (
    "KVTIERD_FAKE_CUDA and KVT_FAKE_CUDA_LIBRARY name no daemon on the fake CUDA runtime "
    "(tools/python test sets them where build/ has both)"
)
DEVICES = 2
MIB = 1 << 20
_FILL_MAX = 4096
_OFFSET = 4096 + 256  # of a region in its allocation

_SETTINGS = (
    "tiers.l1.backend=cuda",
    "tiers.l1.headroom=1MiB",
    "tiers.l1.staging=2MiB",
    "tiers.l1.retry_min=20ms",
    "tiers.l1.retry_max=100ms",
    "tiers.l1.export=true",
)

Bytes = npt.NDArray[np.uint8]


@functools.cache
def library() -> Any:
    """The fake, with its two GPUs, also in the place of libcuda.so.1; one for all tests."""
    fake = ctypes.CDLL(LIBRARY)
    fake.kvt_fake_engine_memory.restype = ctypes.c_void_p
    fake.kvt_fake_engine_alloc_pinned.argtypes = [ctypes.c_uint64]
    fake.kvt_fake_engine_alloc_pinned.restype = ctypes.c_void_p
    fake.kvt_fake_engine_stream.restype = ctypes.c_void_p
    fake.kvt_fake_engine_record.restype = ctypes.c_void_p
    fake.kvt_fake_engine_imports.restype = ctypes.c_uint64
    words = f"devices={DEVICES},seed={os.getpid()}"
    assert fake.kvt_fake_engine_init(words.encode()), words
    return fake


def daemon_on_fake(*settings: str, fake: str = "", l1: str = "8MiB") -> Daemon:
    """A daemon with L1 on both GPUs; fake: words of KVT_FAKE_CUDA."""
    words = ",".join(filter(None, (f"devices={DEVICES},seed={os.getpid()}", fake)))
    print(f"KVT_FAKE_CUDA={words}")
    return Daemon(
        *_SETTINGS,
        f"tiers.l1.bytes={l1}",
        *settings,
        program=PROGRAM,
        environment={"KVT_FAKE_CUDA": words},
    )


def set_device(device: int) -> None:
    """Of this thread, as torch.cuda.set_device."""
    cuda.check(library().kvt_fake_engine_set_device(device), "set_device")


def view(address: int, size: int) -> Bytes:
    """Device memory, where this process sees it."""
    at = library().kvt_fake_engine_memory(ctypes.c_uint64(address), ctypes.c_uint64(size))
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at))


class Allocation:
    """What one cudaMalloc gave."""

    def __init__(self, size: int, device: int = 0) -> None:
        set_device(device)
        address = ctypes.c_uint64()
        status = library().kvt_fake_engine_alloc(ctypes.c_uint64(size), ctypes.byref(address))
        cuda.check(status, "alloc")
        self.address, self.bytes, self.device = address.value, size, device
        self.memory = view(self.address, size)

    def free(self) -> None:
        set_device(self.device)
        cuda.check(library().kvt_fake_engine_free(ctypes.c_uint64(self.address)), "free")


class GpuCache(engine.Cache):
    """An engine's blocks in memory of a GPU, somewhere in an allocation."""

    def __init__(self, blocks: int, block_bytes: int = engine.BLOCK_BYTES, device: int = 0) -> None:
        size = blocks * block_bytes
        self.allocation = Allocation(_OFFSET + size + 512, device)
        self.address = self.allocation.address + _OFFSET
        self._region = cuda.export(self.address, size, owner=self.allocation, driver=library())
        self.blocks = view(self.address, size).reshape(blocks, block_bytes)
        self.layouts = (kvtier.Layout(0, 1, (kvtier.Piece(0, block_bytes, 0, block_bytes),)),)

    @property
    def lent(self) -> kvtier.CudaIpcRegion:
        return self._region

    def free(self) -> None:
        self.allocation.free()


@contextmanager
def serving(one: Daemon) -> Iterator[Daemon]:
    """Started, and ended in order: the fake ends a daemon that left anything open on a GPU with an
    abort, and so the test."""
    try:
        one.start()
        yield one
        assert one.terminate() == 0, one.log()
    finally:
        one.close()


class Stream:
    """An engine's stream on the current device."""

    def __init__(self) -> None:
        self._stream = ctypes.c_void_p(library().kvt_fake_engine_stream())
        # Row v is full of v: what is queued reads it when its turn comes.
        self._values = ctypes.c_void_p(library().kvt_fake_engine_alloc_pinned(256 * _FILL_MAX))
        rows = (ctypes.c_uint8 * (256 * _FILL_MAX)).from_address(self._values.value or 0)
        np.ctypeslib.as_array(rows).reshape(256, _FILL_MAX)[:] = np.arange(256)[:, None]

    def fill(self, address: int, value: int, size: int) -> None:
        """Queues it, as a kernel that writes; at most _FILL_MAX bytes."""
        row = ctypes.c_void_p((self._values.value or 0) + value * _FILL_MAX)
        status = library().kvt_fake_engine_write(
            ctypes.c_uint64(address), row, ctypes.c_uint64(size), self._stream
        )
        cuda.check(status, "write")

    def record_event(self) -> Event:
        return Event(ctypes.c_void_p(library().kvt_fake_engine_record(self._stream)))

    def synchronize(self) -> None:
        event = self.record_event()
        while not event.query():
            pass

    def free(self) -> None:
        library().kvt_fake_engine_stream_free(self._stream)
        library().kvt_fake_engine_free_pinned(self._values)


class Event:
    def __init__(self, event: ctypes.c_void_p) -> None:
        self._event = event

    def query(self) -> bool:
        status = library().kvt_fake_engine_query(self._event)
        if status == 600:  # cudaErrorNotReady
            return False
        cuda.check(status, "query")
        return True
