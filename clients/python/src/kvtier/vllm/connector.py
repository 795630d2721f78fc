"""`KvtierConnector`: vLLM's connector interface on one side, the two halves on the other.

vLLM makes one object with the scheduler role (in its engine-core process) and one with the
worker role in each worker process. Both read the same configuration; all that goes between
them is `meta.KvtierMetadata` down and `meta.WorkerReport` up. This module only hands calls
over::

    scheduler role  --> scheduler.SchedulerSide     prompts, lookups, reservations, jobs
    worker role     --> worker.WorkerSide           KV memory, transfers, reports

What the user got wrong (an unknown option) ends the start with a ValueError. What kvtier
cannot do (a kind of model) is said once, and the connector is *inert*: no hits, no stores.
A daemon that is not there is neither: the sessions attach when it comes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from kvtier import KvtierError
from kvtier.client import Client
from kvtier.vllm import _compat, metrics
from kvtier.vllm._compat import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from kvtier.vllm.backing import Backing
from kvtier.vllm.geometry import Geometry, Unsupported
from kvtier.vllm.layout import KvTensor, LayoutError, describe
from kvtier.vllm.memory import SharedAllocation, kv_bytes
from kvtier.vllm.meta import KvtierMetadata, WorkerReport
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.options import Options
from kvtier.vllm.planes import check_planes
from kvtier.vllm.scheduler import SchedulerSide
from kvtier.vllm.worker import START_WAIT_S, WorkerSide

logger = logging.getLogger(__name__)


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """One role of the connector; see the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        options = Options.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        name = options.name or f"vllm {_compat.vllm_version()} pid {os.getpid()}"
        self._options = replace(options, name=name)
        self._stats = KvtierStats()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._allocation: SharedAllocation | None = None
        self._is_idle = False  # this step has no forward pass
        self._geometry = _geometry(vllm_config, kv_cache_config, self._options)
        if self._geometry is None:
            return
        if role == KVConnectorRole.SCHEDULER:
            _warn_of_failure_policy(self._kv_transfer_config)
            self._scheduler = SchedulerSide(
                self._options, self._geometry, self._engine_id(), self._client, self._stats
            )
            self._scheduler.wait_attached(START_WAIT_S)
        else:
            self._worker = WorkerSide(
                self._geometry.model_spec(),
                rank=int(vllm_config.parallel_config.rank),
                engine_id=self._engine_id(),
                client=self._client(),
                stats=self._stats,
                name=name,
            )

    def _engine_id(self) -> bytes:
        """16 bytes, the same in all processes of an engine; another for each start of it."""
        return hashlib.sha256(str(self._kv_transfer_config.engine_id).encode()).digest()[:16]

    def _client(self) -> Client:
        return Client(self._options.socket)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is lost costs a later hit, nothing else."""
        return False

    def shutdown(self) -> None:
        """Both roles: give up what runs, wait (bounded) for the daemon to leave, detach."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    # ---- statistics, both roles --------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvtierStats | None:
        return self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Any] | None = None) -> KvtierStats:
        return metrics.build_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> metrics.KvtierPromMetrics:
        return metrics.build_prom_metrics(metric_types, labelnames, per_engine_labelvalues)

    # ---- worker role -------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """On the CPU: have the engine allocate its KV memory where the daemon can map it."""
        if self._worker is None or self._options.memory == "staging":
            return None
        if _compat.device_type(self._vllm_config) != "cpu":
            return None
        size = kv_bytes([int(t.size) for t in self._kv_cache_config.kv_cache_tensors])
        self._allocation = SharedAllocation(size)
        return self._allocation.context()

    def register_kv_caches(self, kv_caches: Mapping[str, KvTensor]) -> None:
        if self._worker is None or self._geometry is None:
            return
        device = _compat.device_type(self._vllm_config)
        backing = Backing(self._options, device, kv_caches, self._allocation)
        try:
            layout = describe(kv_caches, self._geometry.components, self._geometry.pool_blocks)
            check_planes(kv_caches, self._geometry.components, self._geometry.pool_blocks)
            self._worker.register(layout, backing)
        except (LayoutError, ValueError, KvtierError) as error:
            logger.error("kvtier: nothing is cached: %s", error)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Nothing: blocks that a store reads are held by the scheduler half, or the store was over
        within its step (`StoreJob.is_fenced`)."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # vLLM's second model runner calls outside of the forward pass's context, and says with
        # arguments that there was one.
        self._is_idle = getattr(forward_context, "attn_metadata", None) is None and not kwargs
        if self._worker is not None:
            self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads of this step's forward pass are over when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Nothing: blocks are stored whole, after the forward pass."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.begin_stores(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        loads = self._worker.poll(is_idle=self._is_idle)
        return KVConnectorTransferResults(
            finished_recving=loads.finished, failed_recving=loads.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For versions without get_transfer_results."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return None if self._worker is None else self._worker.take_report()

    # ---- scheduler role ----------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvtierMetadata:
        if self._scheduler is None:
            return KvtierMetadata()
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return self._scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_push_work()

    def take_events(self) -> Iterable[Any]:
        """None: the daemon tells routers itself."""
        return ()

    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset_cache()


def _geometry(vllm_config: Any, kv_cache_config: Any, options: Options) -> Geometry | None:
    """What to declare to the daemon, or None with a line in the log: the connector is inert."""
    try:
        return Geometry.from_kv_cache_config(
            vllm_config, kv_cache_config, options.namespace_tags, options.quantise
        )
    except Unsupported as error:
        logger.error("kvtier: nothing is cached: %s", error)
    except OSError as error:
        logger.error("kvtier: nothing is cached: the model cannot be told from others: %s", error)
    return None


def _warn_of_failure_policy(config: Any) -> None:
    if getattr(config, "kv_load_failure_policy", "recompute") != "recompute":
        logger.warning(
            "kvtier: kv_load_failure_policy is %r: requests whose blocks cannot be loaded end with "
            'an error; set it to "recompute" and they are computed instead',
            config.kv_load_failure_policy,
        )


def _log_as_vllm_does() -> None:
    """vLLM configures its own loggers only; have ours write where and what those do."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
