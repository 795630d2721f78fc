"""Chooses the way to the engine's KV memory: by its device, the user's option, and what works."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvtier.cuda import CudaError
from kvtier.vllm.cuda import CudaIpcKv, TorchCopier, TorchCuda, cuda_regions, pin
from kvtier.vllm.layout import KvLayout, KvTensor
from kvtier.vllm.memory import KvMemory, SharedAllocation, shared_memory
from kvtier.vllm.options import Options
from kvtier.vllm.staging import BlockCopier, HostCopier, StagingKv

logger = logging.getLogger(__name__)


class Backing:
    """The tensors of a worker, and how they can be reached (a `worker.MemoryOpener`).

    allocation: what caught the engine's memory on the CPU, or None. Keeps the tensors alive.
    """

    def __init__(
        self,
        options: Options,
        device: str,
        kv_caches: Mapping[str, KvTensor],
        allocation: SharedAllocation | None,
    ):
        self._options = options
        self._device = device
        self._kv_caches = kv_caches
        self._allocation = allocation

    def __call__(self, layout: KvLayout, is_refused: bool) -> KvMemory | None:
        wants_direct = self._options.memory != "staging" and not is_refused
        try:
            if self._device == "cpu":
                direct = shared_memory(self._allocation, layout) if wants_direct else None
                return direct or self._staging(layout, HostCopier(layout))
            if self._device == "cuda":
                import torch

                return (_cuda_ipc(torch, layout) if wants_direct else None) or self._pinned(
                    torch, layout
                )
        except (ValueError, OSError, CudaError) as error:
            logger.error("kvtier: nothing is cached: %s", error)
            return None
        logger.error("kvtier: nothing is cached: KV memory on %s is not supported", self._device)
        return None

    def _staging(self, layout: KvLayout, copier: BlockCopier) -> StagingKv:
        return StagingKv(layout, copier, self._options.staging_bytes)

    def _pinned(self, torch: Any, layout: KvLayout) -> StagingKv:
        by_address = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._kv_caches.values()
        }
        storages = [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(by_address[s.address])
            for s in layout.storages
        ]
        memory = self._staging(layout, TorchCopier(torch, layout, storages))
        for region in memory.regions:
            pin(torch, region.memory)
        return memory


def _cuda_ipc(torch: Any, layout: KvLayout) -> CudaIpcKv | None:
    try:
        cuda = TorchCuda(torch, layout.storages[0].address)
        return CudaIpcKv(cuda_regions(layout, cuda), layout.layouts, cuda)
    except CudaError as error:
        logger.warning(
            "kvtier: KV memory is not shared with the daemon (%s); blocks are copied through a "
            "staging buffer",
            error,
        )
        return None
