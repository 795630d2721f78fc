"""How the daemon reaches the engine's KV memory: three ways behind one protocol.

=============  =====================================================================
`SharedKv`     the memory itself is a sealed memfd of ours that the daemon maps too: it
               copies straight from and to the engine's blocks. On the CPU, where
               `SharedAllocation` catches the engine's one allocation.
`StagingKv`    (staging.py) a buffer of configured size that both sides see; blocks are
               copied through it. Where the memory is not ours.
`CudaIpcKv`    (cuda.py) CUDA memory that the daemon opens by an IPC handle.
=============  =====================================================================

All of them take jobs and give transfers; who waits, cancels and reports is
`worker.WorkerSide`. Nothing here is called by more than one thread at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvtier import CudaIpcRegion, KvtierError, Layout, Region, Session
from kvtier.vllm.layout import KvLayout, Storage
from kvtier.vllm.meta import LoadJob, StoreJob
from kvtier.vllm.transfer import LOADED, STORED, OpTransfer, Transfer, as_client_moves, failed

logger = logging.getLogger(__name__)


class KvMemory(Protocol):
    """What a worker attaches with, and what begins its jobs."""

    @property
    def name(self) -> str:
        """For people: "shared", "staging", "cuda_ipc"."""
        ...

    @property
    def regions(self) -> Sequence[Region | CudaIpcRegion]: ...

    @property
    def layouts(self) -> Sequence[Layout]:
        """One a component; `region_idx` counts `regions`."""
        ...

    def load(self, session: Session, job: LoadJob) -> Transfer:
        """Begin to fill the job's engine blocks. Never waits, never raises KvtierError."""
        ...

    def store(self, session: Session, job: StoreJob) -> Transfer:
        """Begin to store the job's engine blocks, whose bytes the forward pass before this call
        wrote. Never waits for the daemon, never raises KvtierError."""
        ...

    def close(self, timeout_s: float) -> None:
        """Stop threads of its own, at most so long. Call when all transfers are finished or given
        up; the engine's mapping stays valid."""
        ...


def begin_load(session: Session, job: LoadJob) -> Transfer:
    """Have the daemon write straight into the engine's blocks."""
    try:
        op = session.promote(as_client_moves(job.moves), lease=job.lease, timeout_s=job.timeout_s)
    except KvtierError as error:
        return failed(job.moves, error)
    return OpTransfer(op, job.moves, LOADED)


def begin_store(session: Session, job: StoreJob) -> Transfer:
    """Have the daemon read straight from the engine's blocks."""
    try:
        op = session.demote(as_client_moves(job.moves), ticket=job.ticket, timeout_s=job.timeout_s)
    except KvtierError as error:
        return failed(job.moves, error)
    return OpTransfer(op, job.moves, STORED)


class SharedKv:
    """The engine's KV memory is in regions of ours: nothing is copied on this side."""

    name = "shared"

    def __init__(self, regions: Sequence[Region], layouts: Sequence[Layout]):
        self.regions = tuple(regions)
        self.layouts = tuple(layouts)

    def load(self, session: Session, job: LoadJob) -> Transfer:
        return begin_load(session, job)

    def store(self, session: Session, job: StoreJob) -> Transfer:
        return begin_store(session, job)

    def close(self, timeout_s: float) -> None:
        """The regions' memory lives as long as the engine's tensors: only that ends it."""


class SharedAllocation:
    """Puts the engine's one KV allocation into a region.

    vLLM allocates all KV memory with one ``torch.zeros(bytes, dtype=torch.int8)`` inside
    the context that the connector may give. Exactly the allocation of `expected_bytes` is
    caught, and only if it is the only one: whatever else happens in there is torch's.
    """

    def __init__(
        self, expected_bytes: int, create: Callable[[int], Region] = Region.create
    ) -> None:
        self._expected_bytes = expected_bytes
        self._create = create
        self._caught: list[tuple[int, Region]] = []  # address, region
        self._missed = ""

    def take(self, size: int) -> Region | None:
        """A region for an allocation of `size` bytes, or None: let the engine allocate."""
        if size != self._expected_bytes:
            return None
        if self._caught:
            self._missed = f"the engine allocated {size} bytes more than once"
            return None
        try:
            return self._create(size)
        except (OSError, MemoryError) as error:
            self._missed = f"no memfd of {size} bytes: {error}"
            return None

    def note(self, address: int, region: Region) -> None:
        """The engine's allocation now lies in `region`, at this address of the process."""
        self._caught.append((address, region))

    def regions_for(self, storages: Sequence[Storage]) -> list[Region] | None:
        """A region for each storage, or None (with `reason` set) unless all are ours."""
        regions = []
        for storage in storages:
            region = next((r for a, r in self._caught if a == storage.address), None)
            if region is None or region.bytes < storage.bytes:
                if not self._missed:
                    self._missed = (
                        f"the engine's KV memory ({storage.bytes} bytes) was not allocated through "
                        "torch.zeros in the connector's context"
                    )
                return None
            regions.append(region)
        return regions

    @property
    def reason(self) -> str:
        """Why the memory is not ours; empty when nothing went wrong."""
        return self._missed

    def context(self) -> AbstractContextManager[Any]:
        """The context to run the engine's allocation in."""
        import torch
        from torch.overrides import TorchFunctionMode

        allocation = self

        class CatchZeros(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                kwargs = kwargs or {}
                size = _int8_zeros_bytes(torch, func, args, kwargs)
                region = allocation.take(size) if size else None
                if region is None:
                    return func(*args, **kwargs)
                tensor = torch.frombuffer(region.memory, dtype=torch.int8)  # a new memfd is zeros
                allocation.note(tensor.data_ptr(), region)
                return tensor

        return CatchZeros()


def _int8_zeros_bytes(torch: Any, func: Any, args: Any, kwargs: Any) -> int:
    """Bytes that a call of torch.zeros would allocate as int8 on the CPU; 0: another call."""
    if func is not torch.zeros or kwargs.get("dtype") is not torch.int8 or not args:
        return 0
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return 0
    shape = args[0] if len(args) == 1 else args
    return int(shape) if isinstance(shape, int) else math.prod(int(n) for n in shape)


def kv_bytes(sizes: Sequence[int]) -> int:
    """The size of the engine's one KV allocation, which all its tensors name; 0 if they differ."""
    return sizes[0] if sizes and len(set(sizes)) == 1 else 0


def shared_memory(allocation: SharedAllocation | None, layout: KvLayout) -> SharedKv | None:
    """The engine's memory as regions, or None with a line in the log that says why not."""
    if allocation is None:
        return None
    regions = allocation.regions_for(layout.storages)
    if regions is None:
        logger.warning(
            "kvtier: KV memory is not shared with the daemon (%s); blocks are copied through a "
            "staging buffer",
            allocation.reason,
        )
        return None
    return SharedKv(regions, layout.layouts)
