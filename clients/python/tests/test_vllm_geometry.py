"""The engine's cache as components, and the namespace that it belongs to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_fakes as fakes
from kvtier.types import Kind
from kvtier.vllm import _compat, identity
from kvtier.vllm import geometry as geo
from kvtier.vllm.geometry import Geometry, Unsupported
from kvtier.vllm.keys import LoraNames


def make(specs: list[Any], config: Any = None, tags: tuple[str, ...] = (), **more: Any) -> Geometry:
    return Geometry.from_kv_cache_config(
        config or fakes.vllm_config(), fakes.cache_config(specs, **more), tags
    )


def test_one_full_group() -> None:
    geometry = make([fakes.FullAttentionSpec(block_size=16)])
    (component,) = geometry.components
    assert geometry.block_tokens == 64
    assert (component.kind, component.engine_blocks_per_block) == (Kind.FULL, 4)
    assert component.bytes_per_block == 2 * 16384 * 4
    assert component.layer_names == (("g0.l0", "g0.l1"),)
    assert [place.offset_bytes for place in component.places] == [0, 64 * 16384]


def test_equal_groups_over_the_same_bytes_are_one_component() -> None:
    window = fakes.SlidingWindowSpec()
    geometry = make([window, window, fakes.FullAttentionSpec(), window])
    sliding, full = geometry.components
    assert sliding.groups == (0, 1, 3)
    assert sliding.window_tokens == 127  # the next token attends to itself and 127 before
    assert sliding.engine_blocks_per_block == 6
    assert sliding.layer_names == (("g0.l0", "g0.l1"), ("g1.l0", "g1.l1"), ("g3.l0", "g3.l1"))
    assert full.groups == (2,)
    assert full.window_tokens == 0


def test_groups_that_differ_in_anything_are_apart() -> None:
    geometry = make(
        [
            fakes.SlidingWindowSpec(sliding_window=64),
            fakes.SlidingWindowSpec(sliding_window=128),
            fakes.SlidingWindowSpec(sliding_window=64, dtype="float16"),
        ]
    )
    assert len(geometry.components) == 3
    cache = fakes.cache_config([fakes.SlidingWindowSpec(), fakes.SlidingWindowSpec()])
    cache.kv_cache_tensors[1].offset = 4096
    assert len(Geometry.from_kv_cache_config(fakes.vllm_config(), cache).components) == 2


def test_a_group_with_fewer_layers_is_apart() -> None:
    cache = fakes.cache_config([fakes.SlidingWindowSpec(), fakes.SlidingWindowSpec()])
    cache.kv_cache_groups[1].layer_names.pop()
    cache.kv_cache_tensors[1].layers = ["g1.l0"]
    geometry = Geometry.from_kv_cache_config(fakes.vllm_config(), cache)
    assert [len(component.places) for component in geometry.components] == [2, 1]


def test_a_window_that_was_merged_into_full_attention_is_full() -> None:
    """The hybrid manager off: the spec is a full one that carries a window (an attribute that
    must not decide)."""
    (component,) = make([fakes.FullAttentionSpec(sliding_window=128)]).components
    assert (component.kind, component.window_tokens) == (Kind.FULL, 0)


def test_states_have_one_engine_block_a_group() -> None:
    geometry = make(
        [
            fakes.MambaSpec(),
            fakes.MambaSpec(),
            fakes.FullAttentionSpec(block_size=1152, page_size_bytes=294912),
        ]
    )
    state, full = geometry.components
    assert geometry.block_tokens == 1152
    assert (state.kind, state.engine_blocks_per_block) == (Kind.STATE, 2)
    assert state.bytes_per_block == 2 * 2 * 268288  # without what pads the page
    assert full.engine_blocks_per_block == 1
    wide = make([fakes.MambaSpec(block_size=32), fakes.FullAttentionSpec(block_size=64)])
    assert [c.engine_blocks_per_block for c in wide.components] == [1, 1]


def test_block_size_suits_every_group_and_where_vllm_may_resume() -> None:
    assert geo.choose_block_tokens([16]) == 64
    assert geo.choose_block_tokens([16, 24]) == 96
    assert geo.choose_block_tokens([32, 128]) == 128
    assert geo.choose_block_tokens([16], alignment=48) == 96
    with pytest.raises(Unsupported, match="at most 8192"):
        geo.choose_block_tokens([8191, 2])


def test_layers_of_several_sizes_in_one_group() -> None:
    """The scheduler object sees the first layer's spec only; strides tell the others' sizes."""
    big, small = fakes.MLAAttentionSpec(), fakes.MLAAttentionSpec(page_size_bytes=1024)
    names = ["a", "b", "c"]
    tensors = [
        fakes.Tensor(1 << 24, ["a", "b"], 64 * 16384, 16384),
        fakes.Tensor(1 << 24, ["c"], 64 * 1024, 1024, offset=2 * 64 * 16384),
    ]
    specs = fakes.UniformTypeKVCacheSpecs(32, {"a": big, "b": big, "c": small})
    worker = fakes.KVCacheConfig(64, tensors, [fakes.Group(names, specs)])
    scheduler = fakes.KVCacheConfig(64, tensors, [fakes.Group(names, big)])
    config = fakes.vllm_config()
    seen = [Geometry.from_kv_cache_config(config, cache) for cache in (worker, scheduler)]
    assert seen[0].model_spec() == seen[1].model_spec()
    assert seen[0].components[0].engine_block_bytes == 2 * 16384 + 1024


def test_tensors_of_older_versions() -> None:
    cache = fakes.cache_config([fakes.FullAttentionSpec()])
    cache.kv_cache_tensors = [fakes.OldTensor(1 << 20, ["g0.l1"]), fakes.OldTensor(9, ["g0.l0"])]
    (component,) = Geometry.from_kv_cache_config(fakes.vllm_config(), cache).components
    assert [(place.name, place.tensor_idx) for place in component.places] == [
        ("g0.l1", 0),
        ("g0.l0", 1),
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (fakes.ChunkedLocalAttentionSpec(), "ChunkedLocalAttentionSpec, which is unknown"),
        (fakes.MambaSpec(mamba_cache_mode="all"), "--mamba-cache-mode align"),
        (fakes.FullAttentionSpec(non_causal=True), "depend on later tokens"),
        (fakes.SlidingWindowSpec(prefix_cacheable=False), "no prefix's"),
    ],
)
def test_what_cannot_be_cached_is_named(spec: Any, says: str) -> None:
    with pytest.raises(Unsupported, match="cache group 1") as caught:
        make([fakes.FullAttentionSpec(), spec])
    assert says in str(caught.value)


def test_engines_that_cannot_be_cached() -> None:
    def parallel(**more: int) -> Any:
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": 1, **more}
        return fakes.vllm_config(parallel_config=SimpleNamespace(**sizes))

    full = [fakes.FullAttentionSpec()]
    for config, says in [
        (parallel(decode_context_parallel_size=2), "decode context"),
        (parallel(prefill_context_parallel_size=2), "prefill context"),
        (parallel(nnodes_within_dp=2), "several nodes"),
        (parallel(world_size=17), "17 ranks"),
        (
            fakes.vllm_config(
                cache_config=SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)
            ),
            "calculate-kv-scales",
        ),
    ]:
        with pytest.raises(Unsupported, match=says):
            make(full, config)
    cache = fakes.cache_config(full)
    cache.kv_cache_groups[0].enable_kv_transfer = False
    with pytest.raises(Unsupported, match="from another group"):
        Geometry.from_kv_cache_config(fakes.vllm_config(), cache)
    with pytest.raises(Unsupported, match="no KV cache"):
        make([])
    many = [fakes.SlidingWindowSpec(sliding_window=w) for w in range(10, 19)]
    with pytest.raises(Unsupported, match="9 components"):
        make(many)


def test_mla_is_one_shard_for_all_tensor_parallel_ranks() -> None:
    model = vars(fakes.vllm_config().model_config)
    for tensor, pipeline, replicated in [(1, 1, False), (2, 1, True), (2, 2, False)]:
        layers = SimpleNamespace(num_hidden_layers=2 * pipeline)
        config = fakes.vllm_config(
            model_config=SimpleNamespace(**{**model, "hf_text_config": layers}),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                world_size=tensor * pipeline,
            ),
        )
        geometry = make([fakes.MLAAttentionSpec()], config)
        assert geometry.components[0].is_replicated is replicated
        assert geometry.model_spec().ranks == tensor * pipeline


def test_pipeline_stages_must_be_equal() -> None:
    def config(layers: int) -> Any:
        model = vars(fakes.vllm_config().model_config)
        text_config = SimpleNamespace(num_hidden_layers=layers)
        return fakes.vllm_config(
            model_config=SimpleNamespace(**{**model, "hf_text_config": text_config}),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=2, world_size=2
            ),
        )

    assert make([fakes.FullAttentionSpec()], config(4)).ranks == 2
    with pytest.raises(Unsupported, match="stages of equal size"):
        make([fakes.FullAttentionSpec()], config(5))


def test_draft_layers_are_seen() -> None:
    cache = fakes.cache_config([fakes.FullAttentionSpec()])
    config = fakes.vllm_config()
    assert not Geometry.from_kv_cache_config(config, cache).has_drafts
    for uses in (False, True):
        speculative = SimpleNamespace(use_eagle=lambda uses=uses: uses, draft_model_config=None)
        config = fakes.vllm_config(speculative_config=speculative)
        assert Geometry.from_kv_cache_config(config, cache).has_drafts is uses
    cache.kv_cache_groups[0].is_eagle_group = True
    assert Geometry.from_kv_cache_config(fakes.vllm_config(), cache).has_drafts


def test_equal_engines_share_and_others_do_not() -> None:
    full = [fakes.FullAttentionSpec()]
    base = make(full).model_spec()
    assert make(full).model_spec() == base
    model = vars(fakes.vllm_config().model_config)
    others = [
        make(full, fakes.vllm_config(model="hub/other")),
        make(full, fakes.vllm_config(model_config=SimpleNamespace(**{**model, "revision": "x"}))),
        make(
            full,
            fakes.vllm_config(model_config=SimpleNamespace(**{**model, "quantization": "fp8"})),
        ),
        make(
            full,
            fakes.vllm_config(
                model_config=SimpleNamespace(**{**model, "hf_overrides": {"rope_theta": 7}})
            ),
        ),
        make(full, fakes.vllm_config(cache_config=SimpleNamespace(cache_dtype="fp8"))),
        make(full, fakes.vllm_config(load_config=SimpleNamespace(load_format="dummy"))),
        make(
            full,
            fakes.vllm_config(
                speculative_config=SimpleNamespace(
                    draft_model_config=SimpleNamespace(model="hub/draft", revision="r")
                )
            ),
        ),
        make(full, kv_cache_layout="BLHNC"),
        make([fakes.FullAttentionSpec(head_size=64)]),
        make(full, tags=("team=a",)),
    ]
    specs = [other.model_spec() for other in others]
    assert base not in specs
    assert len({repr(spec) for spec in specs}) == len(specs)


def test_length_of_the_model_counts_where_positions_depend_on_it() -> None:
    def spec(length: int, rope: dict[str, str]) -> Any:
        model = vars(fakes.vllm_config().model_config)
        model = {**model, "max_model_len": length, "hf_config": SimpleNamespace(rope_scaling=rope)}
        config = fakes.vllm_config(model_config=SimpleNamespace(**model))
        return make([fakes.FullAttentionSpec()], config).model_spec()

    assert spec(10, {"rope_type": "yarn"}) == spec(20, {"rope_type": "yarn"})
    assert spec(10, {"rope_type": "longrope"}) != spec(20, {"rope_type": "longrope"})


def _model_dir(path: Path, fill: int, mtime: int = 1) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"layers": 4}')
    (path / "model.safetensors").write_bytes(bytes([fill]) * (3 << 20))
    for file in path.iterdir():
        os.utime(file, (mtime, mtime))
    return path


def test_two_directories_of_one_shape_do_not_share(tmp_path: Path) -> None:
    full = [fakes.FullAttentionSpec()]

    def spec(path: Path) -> Any:
        return make(full, fakes.vllm_config(model=str(path))).model_spec()

    first = _model_dir(tmp_path / "a", 1)
    second = _model_dir(tmp_path / "b", 1)
    base = spec(first)
    assert spec(first) == base
    assert base not in (spec(second),)
    link = tmp_path / "link"
    link.symlink_to(first)
    assert [t for t in spec(link).tags if "weights" in t] == [
        t for t in base.tags if "weights" in t
    ]


def test_weights_that_were_replaced_do_not_share(tmp_path: Path) -> None:
    """The same path, sizes and times, as a container's mount may have them."""
    path = _model_dir(tmp_path / "m", 1)
    digest = identity.weights_digest(str(path))
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert identity.weights_digest(str(_model_dir(tmp_path / "m", 2))) != digest
    os.utime(path / "model.safetensors", (9, 9))
    touched = identity.weights_digest(str(path))
    (path / "README.md").write_text("no weights")
    assert identity.weights_digest(str(path)) == touched != digest
    assert identity.weights_digest(str(path / "config.json")) != ""
    assert identity.weights_digest("hub/model") == ""


def test_a_branch_of_a_hub_is_the_commit_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new upload to the branch would otherwise be served what the old weights computed."""
    branches = {"main": "c1"}

    def find(repo_id: str, filename: str, revision: str | None = None) -> str | None:
        if ":" in repo_id:
            raise ValueError("no name of a repository")
        commit = branches.get(revision or "main", revision)
        return f"/cache/{repo_id}/{commit}/{filename}" if filename == "params.json" else None

    hub = SimpleNamespace(try_to_load_from_cache=find)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)

    def name(model: str, revision: str | None = None) -> _compat.WeightsName:
        return _compat.weights_name(SimpleNamespace(model=model, revision=revision))

    first = name("org/model")
    assert first == name("org/model", "main") == _compat.WeightsName("org/model", "c1")
    branches["main"] = "c2"
    assert name("org/model").revision == "c2"
    assert name("org/model", "c1") == first
    assert name("s3://bucket/model").revision == ""
    assert name(str(tmp_path)).revision == ""
    names = LoraNames()
    adapter = fakes.LoraRequest("n", "org/adapter")
    assert names.key(adapter) == names.key(adapter)
    branches["main"] = "c3"
    assert LoraNames().key(adapter) != names.key(adapter)
    with pytest.raises(FileNotFoundError, match="s3://org/adapter is on this machine"):
        LoraNames().key(fakes.LoraRequest("n", "s3://org/adapter"))  # it would be known by name
