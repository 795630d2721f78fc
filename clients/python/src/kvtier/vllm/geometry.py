"""What the engine's KV cache looks like to the daemon: components, block sizes, the namespace.

vLLM splits a model's layers into cache groups; each has its own kind of attention, its own block
table, and a place for each of its layers in memory. The daemon knows components (at most 8) and
blocks that are the same number of tokens for all of them:

    tokens       0        64       128      192              kvtier block = 64 tokens
    full         [ 0      | 1      | 2      ]                group 0, engine blocks of 32: 2 a block
    sliding      [ 0      | 1      | 2      ]                groups 1, 2, 3 merged: 6 a block

Groups of equal specs whose layers lie in the same places of memory ("alias": vLLM gives a block to
one group at a time) become one component; a block of it is, group by group, the engine blocks of
those tokens. A state component has one engine block a group: the state at the block's end.

Kinds are told by the type of the spec. An attribute does not do: with vLLM's hybrid manager off,
sliding layers are merged into full ones, whose spec still carries the window.

Both roles make the same Geometry of the same configuration, each in its own process, and declare
the same ModelSpec; the worker checks the places against its real tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtier.types import Component, Kind, ModelSpec, Quantisation
from kvtier.vllm import _compat, identity
from kvtier.vllm._compat import GroupFacts, LayerPlace
from kvtier.vllm.planes import planes_of

COMPONENTS_MAX = 8
BLOCK_TOKENS_MIN = 64  # a kvtier block has at least this many tokens, and 8,192 at most
BLOCK_TOKENS_MAX = 8192
ENGINE_BLOCKS_PER_BLOCK_MAX = 512
PIECES_MAX = 2048
RANKS_MAX = 16

# The types that vLLM may give a group, and no others: a subclass may treat its blocks differently.
_KINDS = {
    "FullAttentionSpec": Kind.FULL,
    "MLAAttentionSpec": Kind.FULL,
    "SlidingWindowSpec": Kind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": Kind.SLIDING_WINDOW,
    "MambaSpec": Kind.STATE,
}
_REPLICATED = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})


class Unsupported(Exception):
    """The engine has something that cannot be cached; the text says what. The connector then says
    so once and does nothing."""


@dataclass(frozen=True)
class GroupComponent:
    """A component, and the vLLM cache groups that it is made of.

    groups: numbers of vLLM's groups, in the order of a block's engine blocks (group by group, and
    within a group by rising tokens). layer_names: of each group, in the order of `places`; layer i
    of every group lies at places[i]. engine_blocks_per_group: of one block. quantisation: how the
    daemon stores it, if the user wants that.
    """

    kind: Kind
    window_tokens: int
    groups: tuple[int, ...]
    group_block_tokens: int
    engine_blocks_per_group: int
    layer_names: tuple[tuple[str, ...], ...]
    places: tuple[LayerPlace, ...]
    is_replicated: bool
    text: str
    quantisation: Quantisation | None = None

    @property
    def engine_blocks_per_block(self) -> int:
        """Of all its groups together."""
        return len(self.groups) * self.engine_blocks_per_group

    @property
    def engine_block_bytes(self) -> int:
        """Of one engine block, all layers of its group, one rank."""
        return sum(place.page_bytes for place in self.places)

    @property
    def bytes_per_block(self) -> int:
        """Of one block, one rank."""
        return self.engine_block_bytes * self.engine_blocks_per_block

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind.name.lower()} groups {','.join(str(g) for g in self.groups)}"


@dataclass(frozen=True)
class Geometry:
    """An engine's cache as the daemon is told of it.

    block_tokens: of a kvtier block, a multiple of every group's block and of the positions at which
    vLLM may resume. group_count: of vLLM's cache groups. pool_blocks: engine blocks, the null block
    included. layout: kernel and memory order, as a text. has_drafts: there are layers whose cache
    of a token depends on the token after it.
    """

    block_tokens: int
    components: tuple[GroupComponent, ...]
    group_count: int
    pool_blocks: int
    ranks: int
    layout: str
    model: str
    revision: str
    dtype: str
    tags: tuple[str, ...]
    has_drafts: bool = False

    @classmethod
    def from_kv_cache_config(
        cls,
        vllm_config: Any,
        kv_cache_config: Any,
        namespace_tags: Sequence[str] = (),
        quantise: Sequence[tuple[str, str]] = (),
    ) -> Geometry:
        """Read vLLM's configuration. Unsupported if it has what cannot be cached; OSError if the
        model's directory cannot be read; ValueError if `quantise` asks for what this engine's
        cache does not lend itself to."""
        parallel = _compat.parallel_facts(vllm_config)
        groups = _compat.group_facts(kv_cache_config)
        _refuse(vllm_config, kv_cache_config, parallel, groups)
        alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1
        block_tokens = choose_block_tokens([group.block_tokens for group in groups], alignment)
        components = _quantised(
            _components(groups, block_tokens, parallel),
            groups,
            dict(quantise),
            _compat.device_type(vllm_config),
            str(getattr(kv_cache_config, "kv_cache_layout", None) or ""),
        )
        weights = _compat.weights_name(vllm_config.model_config)
        return cls(
            block_tokens=block_tokens,
            components=components,
            group_count=len(groups),
            pool_blocks=int(kv_cache_config.num_blocks),
            ranks=parallel.ranks,
            layout=_layout(vllm_config, kv_cache_config),
            model=weights.model,
            revision=weights.revision,
            dtype=_compat.cache_dtype(vllm_config),
            tags=_tags(vllm_config, kv_cache_config, components, namespace_tags),
            has_drafts=_compat.has_draft_layers(vllm_config, kv_cache_config),
        )

    def model_spec(self) -> ModelSpec:
        """The declaration of the namespace."""
        return ModelSpec(
            block_tokens=self.block_tokens,
            ranks=self.ranks,
            components=tuple(
                Component(
                    kind=component.kind,
                    bytes_per_block=component.bytes_per_block,
                    window_tokens=component.window_tokens,
                    is_replicated=component.is_replicated,
                    name=component.name,
                    quantisation=component.quantisation,
                )
                for component in self.components
            ),
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            layout=self.layout,
            tags=self.tags,
        )


def choose_block_tokens(group_block_tokens: Sequence[int], alignment: int = 1) -> int:
    """The least common multiple of the sizes, as often as it takes to reach BLOCK_TOKENS_MIN.
    Unsupported if it is more than the daemon's largest block."""
    unit = math.lcm(alignment, *group_block_tokens)
    if unit > BLOCK_TOKENS_MAX:
        raise Unsupported(
            f"the common multiple of the block sizes {sorted(set(group_block_tokens))} is {unit} "
            f"tokens, and a kvtier block has at most {BLOCK_TOKENS_MAX}"
        )
    return unit * -(-BLOCK_TOKENS_MIN // unit)


def _refuse(
    vllm_config: Any,
    kv_cache_config: Any,
    parallel: _compat.ParallelFacts,
    groups: list[GroupFacts],
) -> None:
    problem = (
        parallel.problem
        or _compat.model_problem(vllm_config)
        or _compat.stage_problem(vllm_config, kv_cache_config)
    )
    if problem:
        raise Unsupported(problem)
    if not groups:
        raise Unsupported("the model has no KV cache")
    if parallel.ranks > RANKS_MAX:
        raise Unsupported(f"the engine has {parallel.ranks} ranks, and {RANKS_MAX} are the most")
    for number, group in enumerate(groups):
        if group.problem:
            raise Unsupported(f"cache group {number} ({group.spec_name}): {group.problem}")
        if group.spec_name not in _KINDS:
            raise Unsupported(f"cache group {number} has a {group.spec_name}, which is unknown")
        if not group.layers:
            raise Unsupported(f"cache group {number} has no layers in this process")
        if len(group.layers) > PIECES_MAX:
            raise Unsupported(f"cache group {number} has more than {PIECES_MAX} layers")


def _components(
    groups: list[GroupFacts], block_tokens: int, parallel: _compat.ParallelFacts
) -> tuple[GroupComponent, ...]:
    merged: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        same = (group.text, group.block_tokens, tuple(place.key for place in group.layers))
        merged.setdefault(same, []).append(number)
    components = []
    for numbers in merged.values():
        first = groups[numbers[0]]
        kind = _KINDS[first.spec_name]
        per_group = 1 if kind is Kind.STATE else block_tokens // first.block_tokens
        # An engine block count that is too large for one component makes several of it.
        at_once = max(1, ENGINE_BLOCKS_PER_BLOCK_MAX // per_group)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            components.append(
                GroupComponent(
                    kind=kind,
                    window_tokens=first.window_tokens if kind is Kind.SLIDING_WINDOW else 0,
                    groups=tuple(part),
                    group_block_tokens=first.block_tokens,
                    engine_blocks_per_group=per_group,
                    layer_names=tuple(
                        tuple(place.name for place in groups[number].layers) for number in part
                    ),
                    places=first.layers,
                    is_replicated=(
                        first.spec_name in _REPLICATED
                        and parallel.tensor > 1
                        and parallel.pipeline == 1
                    ),
                    text=first.text,
                )
            )
    if len(components) > COMPONENTS_MAX:
        raise Unsupported(
            f"the model's {len(groups)} cache groups make {len(components)} components, and "
            f"{COMPONENTS_MAX} are the most"
        )
    return tuple(components)


def _quantised(
    components: tuple[GroupComponent, ...],
    groups: list[GroupFacts],
    quantise: dict[str, str],
    device: str,
    layout: str,
) -> tuple[GroupComponent, ...]:
    """The components with what the user wants of their kinds. ValueError where it does not apply:
    nothing is worse than a cache that is silently not what its owner believes."""
    found = []
    for component in components:
        how = quantise.get(component.kind.name.lower())
        if how is not None:
            facts = groups[component.groups[0]]
            sizes = {place.page_bytes for place in component.places}
            try:
                planes = planes_of(how, facts.page, sizes, device, layout)
            except ValueError as error:
                raise ValueError(
                    "kv_connector_extra_config: quantise: "
                    f"{component.kind.name.lower()}: {component.name} ({facts.spec_name}): {error}"
                ) from None
            component = replace(component, quantisation=planes)
        found.append(component)
    kinds = {component.kind.name.lower() for component in components}
    for kind in quantise:
        if kind not in kinds:
            raise ValueError(
                f"kv_connector_extra_config: quantise: {kind}: the model has no such layers, only "
                + ", ".join(sorted(kinds))
            )
    return tuple(found)


def _layout(vllm_config: Any, kv_cache_config: Any) -> str:
    order = getattr(kv_cache_config, "kv_cache_layout", None) or "default"
    isa = _compat.cpu_isa(vllm_config, kv_cache_config)
    return f"{order} {isa}".strip()


def _short(text: str) -> str:
    """A text that may be long, as a digest."""
    return hashlib.sha256(text.encode()).hexdigest()


def _tags(
    vllm_config: Any,
    kv_cache_config: Any,
    components: tuple[GroupComponent, ...],
    namespace_tags: Sequence[str],
) -> tuple[str, ...]:
    values = _compat.model_tags(vllm_config, kv_cache_config)
    values["hf_overrides"] = _short(values["hf_overrides"])
    values["weights"] = identity.weights_digest(
        _compat.weights_name(vllm_config.model_config).model
    )
    draft = _compat.draft_weights_name(vllm_config)
    if draft is not None:
        digest = identity.weights_digest(draft.model)
        values["draft"] = _short(f"{draft.model}\0{draft.revision}\0{digest}")
    for number, component in enumerate(components):
        sizes = ",".join(str(place.page_bytes) for place in component.places)
        values[f"component{number}"] = _short(f"{component.text}\0{sizes}")
    own = tuple(f"user={tag}" for tag in namespace_tags)
    return tuple(f"{key}={value}" for key, value in sorted(values.items())) + own
