"""The connector object as vLLM makes and calls it, on stand-ins for vLLM's base classes."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvtier.vllm
from kvtier.vllm._compat import KVConnectorRole, SupportsHMA
from kvtier.vllm.connector import KvtierConnector
from kvtier.vllm.meta import ComponentMoves, KvtierMetadata, LoadJob, StoreJob
from kvtier.vllm.worker import LoadResults
from vllm_fakes import ChunkedLocalAttentionSpec, FullAttentionSpec, cache_config, vllm_config
from worker_fakes import FakeStorage, FakeTensor


def config(tmp_path: Path, **extra: Any) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config={"socket": str(tmp_path / "nobody.sock"), **extra},
        engine_id="5c0ffee",
        kv_load_failure_policy="recompute",
    )
    return vllm_config(
        kv_transfer_config=transfer,
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0
        ),
    )


def caches() -> Any:
    return cache_config([FullAttentionSpec()], layers_per_group=2, num_blocks=8)


def tensors(kv_cache_config: Any) -> dict[str, FakeTensor]:
    tensor = kv_cache_config.kv_cache_tensors[0]
    storage = FakeStorage(np.zeros(tensor.size, np.uint8))
    page = tensor.block_stride
    return {
        name: FakeTensor(storage, (kv_cache_config.num_blocks, page), (page, 1), i * 8 * page)
        for i, name in enumerate(tensor.layers)
    }


def job_orders() -> KvtierMetadata:
    moves = [ComponentMoves(0, [0], [1, 2])]
    return KvtierMetadata(
        loads=[LoadJob(1, "a", b"lease", moves, 1.0, is_sync=False)],
        stores=[StoreJob(2, "b", b"ticket", moves, 1.0)],
    )


def step(connector: KvtierConnector, meta: KvtierMetadata) -> tuple[Any, Any]:
    """A step without a forward pass, in the order of vLLM's model runner."""
    connector.handle_preemptions(meta)
    connector.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
    connector.start_load_kv(None)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    assert connector.get_block_ids_with_load_errors() == set()
    connector.get_kv_connector_stats()
    report = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return results, report


def test_module_gives_the_class_that_vllm_asks_for() -> None:
    assert kvtier.vllm.KvtierConnector is KvtierConnector
    assert issubclass(KvtierConnector, SupportsHMA)
    with pytest.raises(AttributeError, match="KvtierdConnector"):
        _ = kvtier.vllm.KvtierdConnector


def test_unknown_option_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sockets"):
        KvtierConnector(config(tmp_path, sockets="x"), KVConnectorRole.SCHEDULER, caches())


def test_worker_without_a_daemon_starts_and_fails_its_jobs(tmp_path: Path) -> None:
    kv_cache_config = caches()
    connector = KvtierConnector(config(tmp_path), KVConnectorRole.WORKER, kv_cache_config)
    connector.register_kv_caches(tensors(kv_cache_config))
    results, report = step(connector, job_orders())
    assert results.finished_recving == results.failed_recving == {"a"}
    assert {i: job.is_ok for i, job in report.finished.items()} == {1: False, 2: False}
    assert not connector.requires_kv_delivery
    connector.shutdown()


def test_tensors_that_do_not_fit_make_it_inert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv_cache_config = caches()
    connector = KvtierConnector(config(tmp_path), KVConnectorRole.WORKER, kv_cache_config)
    wrong = tensors(kv_cache_config)
    del wrong["g0.l1"]
    connector.register_kv_caches(wrong)
    assert caplog.text.count("nothing is cached: the engine registered no KV tensor for g0.l1") == 1
    results, _ = step(connector, job_orders())
    assert results.failed_recving == {"a"}
    connector.shutdown()


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_model_that_cannot_be_cached_makes_it_inert(
    tmp_path: Path, role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chunked = cache_config([ChunkedLocalAttentionSpec()])
    connector = KvtierConnector(config(tmp_path), role, chunked)
    assert caplog.text.count("nothing is cached") == 1
    assert connector.get_mem_pool_context() is None
    connector.register_kv_caches({})
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    connector.update_state_after_alloc(None, None, 0)
    assert connector.build_connector_meta(None).is_empty()
    connector.update_connector_output(None)
    assert connector.request_finished(None, []) == (False, None)
    assert not connector.has_pending_push_work()
    results, report = step(connector, KvtierMetadata())
    assert results.finished_recving == set()
    assert report is None
    connector.shutdown()


def test_staging_leaves_the_engines_allocation_alone(tmp_path: Path) -> None:
    connector = KvtierConnector(
        config(tmp_path, memory="staging"), KVConnectorRole.WORKER, caches()
    )
    assert connector.get_mem_pool_context() is None
    connector.shutdown()


def test_which_steps_have_no_forward_pass(tmp_path: Path, monkeypatch: Any) -> None:
    """Only those may wait a moment for loads."""
    connector = KvtierConnector(config(tmp_path), KVConnectorRole.WORKER, caches())
    connector.bind_connector_metadata(KvtierMetadata())
    seen: list[bool] = []

    def poll(*, is_idle: bool) -> LoadResults:
        seen.append(is_idle)
        return LoadResults()

    monkeypatch.setattr(connector._worker, "poll", poll)
    no_pass = SimpleNamespace(attn_metadata=None)
    connector.start_load_kv(no_pass)
    connector.get_transfer_results(set())
    connector.start_load_kv(SimpleNamespace(attn_metadata={"layer": None}))
    connector.get_transfer_results(set())
    connector.start_load_kv(no_pass, request_ids=["a"])  # after one of the second model runner
    connector.get_transfer_results(set())
    assert seen == [True, False, False]
    connector.shutdown()


def test_failure_policy_that_ends_requests_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path)
    cfg.kv_transfer_config.kv_load_failure_policy = "fail"
    connector = KvtierConnector(cfg, KVConnectorRole.SCHEDULER, caches())
    assert "kv_load_failure_policy is 'fail'" in caplog.text
    connector.shutdown()


def test_both_roles_are_one_engine(tmp_path: Path) -> None:
    one, other = config(tmp_path), config(tmp_path)
    other.kv_transfer_config.engine_id = "5c0ffee2"
    ids = [
        KvtierConnector(c, KVConnectorRole.WORKER, caches())._engine_id() for c in (one, one, other)
    ]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 16
