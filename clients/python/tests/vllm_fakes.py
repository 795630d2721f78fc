"""vLLM's configuration objects as far as the connector reads them, for tests without vLLM.

Classes have the names of vLLM's: the connector tells kinds by type names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class _AttentionSpec:
    block_size: int = 32
    page_size_bytes: int = 16384
    head_size: int = 32
    dtype: str = "float32"
    prefix_cacheable: bool = True


@dataclass(frozen=True)
class FullAttentionSpec(_AttentionSpec):
    sliding_window: int | None = None
    non_causal: bool = False


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(_AttentionSpec):
    sliding_window: int = 128
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(_AttentionSpec):
    attention_chunk_size: int = 256


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = 1152
    page_size_bytes: int = 294912
    real_page_size_bytes: int = 268288
    mamba_cache_mode: str = "align"
    prefix_cacheable: bool = True


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


@dataclass
class Tensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class OldTensor:
    size: int
    shared_by: list[str]


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True
    host_resident: bool = False
    is_eagle_group: bool = False


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[Group]
    kv_cache_layout: str | None = "LBHNC"
    cache_hit_alignment_tokens: int | None = None


def cache_config(
    specs: list[Any], layers_per_group: int = 2, num_blocks: int = 64, **more: Any
) -> KVCacheConfig:
    """Groups that all lie over the same bytes, as vLLM lays them."""
    groups, tensors = [], []
    for number, spec in enumerate(specs):
        names = [f"g{number}.l{layer}" for layer in range(layers_per_group)]
        groups.append(Group(names, spec))
        page = spec.page_size_bytes
        tensors.append(Tensor(num_blocks * page * layers_per_group, names, num_blocks * page, page))
    return KVCacheConfig(num_blocks, tensors, groups, **more)


def vllm_config(model: str = "hub/model", **more: Any) -> Any:
    """A VllmConfig of an engine with one rank."""
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(
            model=model,
            revision="abc",
            dtype="float32",
            hf_overrides={},
            seed=0,
            max_model_len=4096,
            is_encoder_decoder=False,
        ),
        "cache_config": SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1
        ),
        "load_config": SimpleNamespace(load_format="auto"),
        "device_config": SimpleNamespace(device_type="cuda-less"),
    }
    parts.update(more)
    return SimpleNamespace(**parts)


@dataclass
class LoraRequest:
    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


@dataclass
class Item:
    """A multimodal item of a prompt."""

    identifier: str
    offset: int
    length: int

    @property
    def mm_position(self) -> Any:
        return SimpleNamespace(offset=self.offset, length=self.length)


@dataclass(eq=False)
class Request:
    """A request as the scheduler has it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: LoraRequest | None = None
    mm_features: list[Item] = field(default_factory=list)
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    pooling_params: Any = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)
