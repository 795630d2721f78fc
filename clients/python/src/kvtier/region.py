"""Memory that the daemon may read and write.

A `Region` is a memfd with the seals that the daemon demands: it can neither shrink nor grow, so a
copy never runs past its end. The engine maps it too and lays its KV cache into it. Its descriptor
goes to the daemon through the region socket whenever a session attaches; the memory itself lives as
long as anybody maps it, daemons may come and go.
"""

from __future__ import annotations

import builtins
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass, field

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Region:
    """A sealed memfd, mapped shared. Make one with `Region.create`.

    Attributes:
        bytes: its size.
        fd: the descriptor, not inherited over exec. Closed by `close()`, or when nobody has the
            region any more: an open descriptor keeps all of the memory.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Takes over descriptor fd of a memfd that has its seals and at least size bytes."""
        self.fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        self._closer.atexit = False
        self.bytes = size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory: memoryview | None = memoryview(self._map)

    @classmethod
    def create(cls, bytes: int, *, name: str = "kvtier") -> Region:
        """A new region of so many bytes, all zero.

        All of its memory is allocated here: the daemon takes no region with holes, which could
        fail under its copies. Raises ValueError for a size below 1, OSError when the kernel
        refuses (ENOSPC: /dev/shm's kind of memory is limited, or used up).
        """
        if bytes < 1:
            raise ValueError(f"a region has at least 1 byte, not {bytes}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, bytes)

    @property
    def memory(self) -> memoryview:
        """All of it, writable, one byte an element."""
        if self._memory is None:
            raise ValueError("the region is closed")
        return self._memory

    def close(self) -> None:
        """Unmaps and closes; may be repeated. The daemon's mapping is its own and stays until the
        session ends.

        Raises BufferError while somebody still uses `memory` (a numpy array over it): then nothing
        has changed.
        """
        if self._memory is None:
            return
        self._memory.release()
        try:
            self._map.close()
        except BufferError:
            self._memory = memoryview(self._map)
            raise
        self._memory = None
        self._closer()
        self.fd = -1

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class CudaIpcRegion:
    """Memory of a GPU by its CUDA IPC handle: what `kvtier.cuda.export` makes. For daemons whose L1
    is on that GPU; others refuse the attach with FAILED_PRECONDITION.

    handle: 64 bytes, of the whole allocation. offset_bytes: where in it the region begins; bytes:
    its size. device_uuid: 16 bytes. owner: what keeps the allocation alive. It must not be freed
    before the session has ended: CUDA leaves open what a copy does then, and the daemon may lose
    the GPU. A region is of one allocation: for memory that was allocated anew, attach anew.
    ValueError for numbers that no region has.
    """

    handle: builtins.bytes
    offset_bytes: int
    bytes: int
    device_uuid: builtins.bytes
    owner: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.handle) != 64 or len(self.device_uuid) != 16:
            raise ValueError("a CUDA IPC handle has 64 bytes, a device UUID 16")
        if self.bytes < 1 or self.offset_bytes < 0 or self.offset_bytes + self.bytes >= 2**63:
            raise ValueError(f"a region of {self.bytes} bytes at {self.offset_bytes} cannot be")


@dataclass(frozen=True)
class InlineRegion:
    """No memory: payload travels in the messages, at most 4 MiB in one. For tests and far clients;
    `bytes` is the room that the layout may address."""

    bytes: int = 1 << 46


AnyRegion = Region | CudaIpcRegion | InlineRegion
