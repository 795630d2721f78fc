"""Everything that differs between versions of vLLM, and what stands in where vLLM is not installed.

The only module of this package that reads vLLM's names. It looks for features, not for version
numbers. What an old version lacks has this consequence:

    `KVConnectorTransferResults`                   HAS_FAILED_RECVING is False: with one cache group
                                                   loads are within the step, and failures told as
                                                   block ids; with several nothing is loaded
    a block pool (`bind_gpu_block_pool`)           stores are fenced: over before their step is
    `kv_connector_block_state`                     nothing is stored (`block_tables` answers None)
    worker metadata                                nothing is loaded or stored: the end of jobs is
                                                   not told
    `KVCacheTensor.layers` and strides             each tensor is an allocation of its own

Without vLLM the base classes are small ones of the same names, for unit tests and type checks.
"""

from __future__ import annotations

import enum
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvtier.vllm import identity


def _module(name: str) -> ModuleType | None:
    """The module, or None where there is no vLLM, or none with that part."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


class _StandInMetadata:
    """What a scheduler object tells its workers."""


class _StandInWorkerMetadata:
    """What a worker object tells the scheduler."""


class _StandInRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclass
class _StandInResults:
    """What ended between two steps, as ids of requests."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class _StandInStats:
    """Numbers of one role since it was last asked."""

    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain data, not a copy of them."""
        return self.data


class _StandInHMA:
    """Says that a connector knows several cache groups."""


class _StandInConnector:
    """The part of the base class that the connector relies on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._connector_metadata: Any = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> Any:
        """Which of the two objects this is."""
        return self._role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Before a step: its orders."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """After a step."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        if self._connector_metadata is None:
            raise RuntimeError("no metadata is bound: this is not within a step")
        return self._connector_metadata


_BASE = _module("vllm.distributed.kv_transfer.kv_connector.v1.base")
_METRICS = _module("vllm.distributed.kv_transfer.kv_connector.v1.metrics")

if TYPE_CHECKING:
    KVConnectorMetadata = _StandInMetadata
    KVConnectorWorkerMetadata = _StandInWorkerMetadata
    KVConnectorRole = _StandInRole
    KVConnectorTransferResults = _StandInResults
    KVConnectorStats = _StandInStats
    SupportsHMA = _StandInHMA
    KVConnectorBase_V1 = _StandInConnector
else:
    KVConnectorMetadata = getattr(_BASE, "KVConnectorMetadata", _StandInMetadata)
    KVConnectorWorkerMetadata = getattr(_BASE, "KVConnectorWorkerMetadata", _StandInWorkerMetadata)
    KVConnectorRole = getattr(_BASE, "KVConnectorRole", _StandInRole)
    KVConnectorTransferResults = getattr(_BASE, "KVConnectorTransferResults", _StandInResults)
    KVConnectorStats = getattr(_METRICS, "KVConnectorStats", _StandInStats)
    SupportsHMA = getattr(_BASE, "SupportsHMA", _StandInHMA)
    KVConnectorBase_V1 = getattr(_BASE, "KVConnectorBase_V1", _StandInConnector)

HAS_VLLM = _BASE is not None
HAS_FAILED_RECVING = not HAS_VLLM or hasattr(_BASE, "KVConnectorTransferResults")
HAS_WORKER_METADATA = not HAS_VLLM or hasattr(_BASE, "KVConnectorWorkerMetadata")


def vllm_version() -> str:
    """As vLLM says it; "none" without one."""
    module = _module("vllm")
    return str(getattr(module, "__version__", "none"))


# ---- a step of the scheduler ------------------------------------------------------------------


class BlockTables:
    """The engine's current block ids of the requests of one step."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def of(self, req_id: str) -> tuple[list[int], ...] | None:
        """One list a cache group, by block number; 0 is the null block. None: not in this step."""
        table: tuple[list[int], ...] | None = self._state.get_block_ids(req_id)
        return table

    def states(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """Recurrent states that are complete after the step: request -> (cache group, engine block,
        tokens before the state)."""
        states = getattr(self._state, "boundary_state_offloads", None)
        return dict(states or {})


def block_tables(scheduler_output: Any) -> BlockTables | None:
    """The step's block tables, or None with a vLLM that does not give them: then nothing can be
    stored, since a table kept from increments alone would miss what sliding windows give back."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return None if state is None or not HAS_WORKER_METADATA else BlockTables(state)


def preempted_req_ids(scheduler_output: Any) -> frozenset[str]:
    """Requests that lost their blocks since the last step."""
    return frozenset(getattr(scheduler_output, "preempted_req_ids", None) or ())


# ---- requests ---------------------------------------------------------------------------------


def embeds_bytes(embeds: Any) -> bytes:
    """The content of a tensor of embeddings, with its type: equal exactly if the values are."""
    exact = embeds.detach().cpu().contiguous().double()  # every 16 and 32 bit float fits
    return f"{embeds.dtype}{tuple(embeds.shape)}".encode() + bytes(exact.numpy().tobytes())


# ---- the cache's geometry ---------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPlace:
    """Where the pages of a layer lie: block b at offset_bytes + b * stride_bytes of allocation
    `tensor_idx`, page_bytes long. Layers of different groups may lie in the same place: a block
    belongs to one group at a time."""

    name: str
    tensor_idx: int
    offset_bytes: int
    stride_bytes: int
    page_bytes: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What two layers that share their pages have in common."""
        return (self.tensor_idx, self.offset_bytes, self.stride_bytes, self.page_bytes)


@dataclass(frozen=True)
class PageFacts:
    """What vLLM says of the inside of an attention layer's page: `tokens` x `heads` cells, each K
    and V of `head_dim` elements. problem: why it is not so, or empty."""

    tokens: int
    heads: int
    head_dim: int
    dtype: str
    problem: str = ""


@dataclass(frozen=True)
class GroupFacts:
    """A cache group of vLLM in plain data.

    spec_name: the type of its spec, that of the layers if they are wrapped. window_tokens: of a
    sliding window, how many previous tokens the next one attends to, and those that vLLM keeps for
    draft models. text: every number of the spec, for the namespace. problem: why blocks of the
    group cannot be cached from outside, or empty. page: of attention, what its pages hold.
    """

    spec_name: str
    block_tokens: int
    window_tokens: int
    layers: tuple[LayerPlace, ...]
    text: str
    problem: str = ""
    page: PageFacts | None = None


def _layer_specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return [spec] if inner is None else list(inner.values())


def _plain(value: Any) -> str | None:
    """A number, text, type or tuple of them as text that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return None if None in parts else "(" + ",".join(str(part) for part in parts) + ")"
    text = str(value)  # torch.dtype, fractions.Fraction
    return None if " at 0x" in text else text


def _spec_text(spec: Any) -> str:
    if not is_dataclass(spec):
        return type(spec).__name__
    parts = [(f.name, _plain(getattr(spec, f.name))) for f in fields(spec)]
    inside = ",".join(f"{name}={text}" for name, text in parts if text is not None)
    return f"{type(spec).__name__}({inside})"


def _page_bytes(spec: Any) -> int:
    """Bytes that a block really has in a layer, without what only pads it."""
    real = getattr(spec, "real_page_size_bytes", None)
    return int(spec.page_size_bytes if real is None else real)


def _places(kv_cache_config: Any, names: Sequence[str], spec: Any) -> tuple[LayerPlace, ...]:
    wanted = set(names)
    tensors = kv_cache_config.kv_cache_tensors
    holding = [t for t in tensors if wanted & set(_tensor_layers(t))]
    # Several tensors of one group: its layers differ in size, and the scheduler object is only
    # told the spec of the first. The strides say how large the pages of the others are.
    pages_by_stride = len(holding) > 1 and hasattr(holding[0], "layer_stride")
    is_block_outer = str(getattr(kv_cache_config, "kv_cache_layout", None) or "").startswith("B")
    places = []
    for idx, tensor in enumerate(tensors):
        for at, name in enumerate(_tensor_layers(tensor)):
            if name not in wanted:
                continue
            if not hasattr(tensor, "layer_stride"):
                page = int(spec.page_size_bytes)
                places.append(LayerPlace(name, idx, 0, page, page))
                continue
            page = _page_bytes(spec)
            if pages_by_stride:
                page = int(tensor.layer_stride if is_block_outer else tensor.block_stride)
            offset = int(tensor.offset) + at * int(tensor.layer_stride)
            places.append(LayerPlace(name, 0, offset, int(tensor.block_stride), page))
    return tuple(sorted(places, key=lambda place: place.key))


def _tensor_layers(tensor: Any) -> Sequence[str]:
    names = getattr(tensor, "layers", None) or getattr(tensor, "shared_by", None)
    return [str(name) for name in names or ()]


def _problem(group: Any, specs: Sequence[Any]) -> str:
    names = {type(spec).__name__ for spec in specs}
    if len(names) != 1:
        return f"its layers have specs of several types: {', '.join(sorted(names))}"
    if not getattr(group, "enable_kv_transfer", True):
        return "vLLM rebuilds it from another group"
    if getattr(group, "host_resident", False):
        return "it lies in host memory"
    for spec in specs:
        if not getattr(spec, "prefix_cacheable", True):
            return "vLLM says that its blocks are no prefix's"
        if getattr(spec, "non_causal", False):
            return "its blocks depend on later tokens"
        if getattr(spec, "mamba_cache_mode", "align") != "align":
            return (
                f"mamba_cache_mode is {spec.mamba_cache_mode!r}, and only 'align' keeps states at "
                "block boundaries (--mamba-cache-mode align)"
            )
    return ""


def _page_facts(specs: Sequence[Any]) -> PageFacts | None:
    spec = specs[0]
    heads = getattr(spec, "num_kv_heads", None)
    if heads is None:
        return None
    head_dim = int(spec.head_size)
    mode = getattr(spec, "kv_quant_mode", None)
    problem = ""
    if "MLA" in type(spec).__name__:
        problem = "MLA keeps one compressed latent for all heads, not K and V of each"
    elif getattr(mode, "name", "NONE") != "NONE":
        problem = f"vLLM quantises it itself ({_plain(mode)})"
    elif any(getattr(spec, n, None) is not None for n in ("num_head_slots", "state_content_bytes")):
        problem = "its attention kernel packs pages in a way of its own"
    elif getattr(spec, "tokens_per_state", 1) != 1:
        problem = "a cell of its pages is not one token"
    elif getattr(spec, "head_size_v", head_dim) not in (None, head_dim):
        problem = f"K has {head_dim} elements a head and V {spec.head_size_v}"
    elif any(_spec_text(other) != _spec_text(spec) for other in specs):
        problem = "its layers differ in heads or sizes"
    dtype = str(spec.dtype).removeprefix("torch.")
    return PageFacts(int(spec.block_size), int(heads), head_dim, dtype, problem)


def group_facts(kv_cache_config: Any) -> list[GroupFacts]:
    """The cache groups in vLLM's order."""
    facts = []
    for group in kv_cache_config.kv_cache_groups:
        specs = _layer_specs(group.kv_cache_spec)
        first = specs[0]
        window = int(getattr(first, "sliding_window", None) or 0)
        extra = int(getattr(first, "extra_retained_tokens", 0))
        facts.append(
            GroupFacts(
                spec_name=type(first).__name__,
                block_tokens=int(first.block_size),
                window_tokens=max(1, window - 1 + extra) if window else 0,
                layers=_places(kv_cache_config, group.layer_names, first),
                text=_spec_text(first),
                problem=_problem(group, specs),
                page=_page_facts(specs),
            )
        )
    return facts


# ---- the model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelFacts:
    """Shape of the engine: ranks are its tensor and pipeline parallel workers together."""

    tensor: int
    pipeline: int
    ranks: int
    problem: str = ""


def parallel_facts(vllm_config: Any) -> ParallelFacts:
    """How the engine's workers share the model."""
    config = vllm_config.parallel_config
    tensor = int(getattr(config, "tensor_parallel_size", 1))
    pipeline = int(getattr(config, "pipeline_parallel_size", 1))
    problem = ""
    if int(getattr(config, "decode_context_parallel_size", 1)) > 1:
        problem = "decode context parallelism spreads a block's tokens over ranks"
    elif int(getattr(config, "prefill_context_parallel_size", 1)) > 1:
        problem = "prefill context parallelism spreads a block's tokens over ranks"
    elif int(getattr(config, "nnodes_within_dp", 1)) > 1:
        problem = "the engine has workers on several nodes, and the daemon serves one"
    return ParallelFacts(tensor, pipeline, int(config.world_size), problem)


def stage_problem(vllm_config: Any, kv_cache_config: Any) -> str:
    """Pipeline stages of different size have blocks of different size, and a component has one."""
    pipeline = parallel_facts(vllm_config).pipeline
    if pipeline == 1:
        return ""
    config = getattr(vllm_config.model_config, "hf_text_config", None)
    layers = int(getattr(config, "num_hidden_layers", 0))
    here = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    if here * pipeline == layers:
        return ""
    return (
        f"{pipeline} pipeline stages share {layers} layers, and one of them has the caches of "
        f"{here}: only stages of equal size are supported"
    )


def cpu_isa(vllm_config: Any, kv_cache_config: Any) -> str:
    """How the CPU's kernel packs K ("vec", "vec16", "amx", ...), one word a kind of layer; empty
    elsewhere. vLLM decides it by the machine and the spec, so both roles get the same."""
    if device_type(vllm_config) != "cpu":
        return ""
    module = _module("vllm.v1.attention.backends.cpu_attn")
    decide = getattr(module, "_get_attn_isa", None)
    if decide is None:
        return "unknown"
    words = set()
    for group in kv_cache_config.kv_cache_groups:
        spec = _layer_specs(group.kv_cache_spec)[0]
        if hasattr(spec, "head_size"):
            words.add(str(decide(spec.dtype, spec.block_size, spec.head_size)))
    return "+".join(sorted(words))


def device_type(vllm_config: Any) -> str:
    """ "cpu", "cuda", ..."""
    config = getattr(vllm_config, "device_config", None)
    return str(getattr(config, "device_type", "") or "cpu")


def _device_capability(vllm_config: Any) -> str:
    """By which vLLM chooses attention kernels, and so layouts; asked without touching the GPU."""
    if device_type(vllm_config) == "cpu":
        return ""
    module = _module("vllm.platforms")
    platform = getattr(module, "current_platform", None)
    capability = None if platform is None else platform.get_device_capability()
    return "" if capability is None else str(capability)


@dataclass(frozen=True)
class WeightsName:
    """What vLLM was told to load: a directory or a hub's name, and the commit that it is, or else
    what the user gave as revision."""

    model: str
    revision: str


def weights_name(model_config: Any) -> WeightsName:
    """Of the model, or of a draft model: both are described by vLLM's ModelConfig."""
    model = str(getattr(model_config, "model_weights", "") or model_config.model)
    revision = str(getattr(model_config, "revision", None) or "")
    return WeightsName(model, identity.hub_commit(model, revision) or revision)


def has_draft_layers(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Some layers belong to a draft model (EAGLE, MTP) that computes a token's cache from the token
    after it."""
    config = getattr(vllm_config, "speculative_config", None)
    uses_eagle = getattr(config, "use_eagle_block_drop", getattr(config, "use_eagle", None))
    return (callable(uses_eagle) and bool(uses_eagle())) or any(
        getattr(group, "is_eagle_group", False) for group in kv_cache_config.kv_cache_groups
    )


def draft_weights_name(vllm_config: Any) -> WeightsName | None:
    """Of the draft model whose layers may have cache groups of their own; None without one."""
    config = getattr(vllm_config, "speculative_config", None)
    draft = getattr(config, "draft_model_config", None)
    return None if draft is None else weights_name(draft)


def model_problem(vllm_config: Any) -> str:
    """Why the model as a whole cannot be cached from outside; empty when it can."""
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        return "--calculate-kv-scales makes the meaning of cache bytes depend on the first requests"
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    return ""


def _text(value: Any) -> str:
    """A setting as text that is the same in every process."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=_text)
    plain = _plain(value)
    return type(value).__name__ if plain is None else plain.strip("'")


def model_tags(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """Settings that could change what a block's bytes mean, beside the weights and the groups.

    Read only from what is settled before weights are loaded: both roles must get the same.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    load = getattr(vllm_config, "load_config", None)
    attention = getattr(vllm_config, "attention_config", None)
    parallel = parallel_facts(vllm_config)
    values = {
        "vllm": vllm_version(),
        "device": device_type(vllm_config),
        "capability": _device_capability(vllm_config),
        "dtype": _text(getattr(model, "dtype", "")),
        "quantization": _text(getattr(model, "quantization", None)),
        "code_revision": _text(getattr(model, "code_revision", None)),
        "hf_overrides": _text(getattr(model, "hf_overrides", None) or {}),
        "load_format": _text(getattr(load, "load_format", "auto")),
        "attention_backend": _text(getattr(attention, "backend", None)),
        "attention_backends": _text(getattr(attention, "backend_per_kind", None) or {}),
        "mamba_cache_mode": _text(getattr(cache, "mamba_cache_mode", "none")),
        "tp": str(parallel.tensor),
        "pp": str(parallel.pipeline),
    }
    if values["load_format"] == "dummy":
        values["seed"] = _text(getattr(model, "seed", 0))
    if _rope_depends_on_length(model):
        values["max_model_len"] = _text(getattr(model, "max_model_len", 0))
    return values


def _rope_depends_on_length(model_config: Any) -> bool:
    """Some position codings are scaled by the longest prompt the engine allows."""
    config = getattr(model_config, "hf_text_config", None) or getattr(
        model_config, "hf_config", None
    )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    text = str(rope)
    return any(word in text for word in ("longrope", "'su'", "dynamic"))


def cache_dtype(vllm_config: Any) -> str:
    """Data type of the cache, with "auto" resolved to the model's."""
    dtype = _text(vllm_config.cache_config.cache_dtype)
    return _text(vllm_config.model_config.dtype) if dtype == "auto" else dtype
