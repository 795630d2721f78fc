"""Where the bytes of an engine block lie, read off the engine's KV tensors.

vLLM gives one tensor a layer whose first axis counts blocks. What the other axes
mean is the attention kernel's business: here a page is opaque bytes, described by
its *spans*, the contiguous runs that it consists of::

    storage   |----------- layer 0 -----------|----------- layer 1 -----------|
              |page 0 |page 1 |page 2 | ...   |page 0 |page 1 | ...
    span      offset_bytes + block * stride_bytes, bytes      (stride >= bytes)

Everything is derived from shapes and strides (and checked against what the engine's
configuration says of a page's size, which is all that the scheduler knows), so that
another order of the axes, padding behind a page, or blocks that hold several kernel
blocks need nothing new.
Cache groups alias one allocation (a block belongs to one group at a time), which is
why merged groups may share spans: a component's pieces are the union over its groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier import Layout, Piece

PIECES_MAX = 2048  # of one layout: a limit of the daemon
REGIONS_MAX = 16


class LayoutError(ValueError):
    """The tensors cannot be described to the daemon; the text says which and why."""


class KvStorage(Protocol):
    """The part of a torch storage that is used here."""

    def data_ptr(self) -> int: ...

    def nbytes(self) -> int: ...


class KvTensor(Protocol):
    """The part of a torch tensor that is used here. Strides are in elements."""

    @property
    def shape(self) -> Sequence[int]: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...

    def data_ptr(self) -> int: ...

    def untyped_storage(self) -> KvStorage: ...


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One contiguous run of a page, of block 0; block b is ``b * stride_bytes`` further."""

    storage_idx: int
    offset_bytes: int
    bytes: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation of the engine that holds KV pages."""

    address: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All storages, and for each component where its engine blocks lie in them."""

    storages: tuple[Storage, ...]
    layouts: tuple[Layout, ...]  # region_idx counts `storages`

    def bytes_per_block(self, component: int) -> int:
        """Bytes of one kvtier block of a component, on this rank."""
        layout = self.layouts[component]
        return layout.engine_blocks_per_block * sum(p.bytes for p in layout.pieces)


class Page(Protocol):
    """The part of `_compat.LayerPlace` that is used here."""

    @property
    def page_bytes(self) -> int: ...


class LayoutComponent(Protocol):
    """The part of `geometry.GroupComponent` that is used here. Layer i of each group has the page
    size of `places[i]`: what the engine's configuration says, and the scheduler declared."""

    @property
    def engine_blocks_per_block(self) -> int: ...

    @property
    def layer_names(self) -> Sequence[Sequence[str]]: ...

    @property
    def places(self) -> Sequence[Page]: ...


def page_spans(tensor: KvTensor, num_blocks: int, storage_idx: int, name: str) -> list[Span]:
    """The runs that make up one block of a layer, in the order of their addresses.

    Raises LayoutError if the first axis does not count (parts of) blocks, or if elements
    overlap.
    """
    shape, strides, size = list(tensor.shape), list(tensor.stride()), tensor.element_size()
    if len(shape) < 2 or num_blocks < 1 or shape[0] % num_blocks:
        raise LayoutError(f"{name}: shape {shape} has no axis of {num_blocks} blocks")
    parts = shape[0] // num_blocks  # kernel blocks in a block
    axes = [(parts, strides[0]), *zip(shape[1:], strides[1:], strict=True)]
    run = size
    outer: list[tuple[int, int]] = []  # count, stride in bytes
    for count, stride in sorted((a for a in axes if a[0] > 1), key=lambda a: a[1]):
        if stride * size < run:
            raise LayoutError(f"{name}: strides {strides} overlap")
        if stride * size == run and not outer:
            run *= count
        else:
            outer.append((count, stride * size))
    if math.prod(count for count, _ in outer) > PIECES_MAX:
        raise LayoutError(f"{name}: a block of strides {strides} is in too many pieces")
    base = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    offsets = sorted(
        base + sum(i * stride for i, (_, stride) in zip(idx, outer, strict=True))
        for idx in itertools.product(*(range(count) for count, _ in outer))
    )
    return [Span(storage_idx, o, run, strides[0] * parts * size) for o in offsets]


def describe(
    kv_caches: Mapping[str, KvTensor], components: Sequence[LayoutComponent], num_blocks: int
) -> KvLayout:
    """Lay out every component over the engine's tensors.

    Raises LayoutError when a layer is missing, spans leave their storage, spans of merged groups
    overlap without being the same, or a limit of the daemon is passed.
    """
    storages: dict[int, Storage] = {}
    layouts = []
    for idx, component in enumerate(components):
        spans: dict[Span, None] = {}  # an ordered set: layers in order, groups share spans
        for layer_names in component.layer_names:
            for name, place in zip(layer_names, component.places, strict=True):
                tensor = kv_caches.get(name)
                if tensor is None:
                    raise LayoutError(f"the engine registered no KV tensor for {name}")
                at = _storage_idx(tensor, storages, name)
                page = page_spans(tensor, num_blocks, at, name)
                spans.update(dict.fromkeys(_as_declared(page, place.page_bytes, name)))
        found = tuple(storages.values())
        _check_spans(idx, list(spans), found, num_blocks)
        pieces = tuple(
            Piece(
                region_idx=s.storage_idx,
                bytes=s.bytes,
                offset_bytes=s.offset_bytes,
                stride_bytes=s.stride_bytes,
            )
            for s in spans
        )
        layouts.append(
            Layout(
                component=idx,
                engine_blocks_per_block=component.engine_blocks_per_block,
                pieces=pieces,
            )
        )
    return KvLayout(tuple(storages.values()), tuple(layouts))


def _as_declared(page: list[Span], page_bytes: int, name: str) -> list[Span]:
    """The spans of a page as large as it was declared: more than the tensor shows if that is
    padding behind it, which is the block's own."""
    found = sum(span.bytes for span in page)
    if found == page_bytes:
        return page
    if len(page) == 1 and found < page_bytes <= page[0].stride_bytes:
        return [replace(page[0], bytes=page_bytes)]
    raise LayoutError(
        f"{name}: its tensor has {found} bytes a block, the engine's configuration {page_bytes}"
    )


def _storage_idx(tensor: KvTensor, storages: dict[int, Storage], name: str) -> int:
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in storages:
        if len(storages) == REGIONS_MAX:
            raise LayoutError(f"{name}: KV tensors lie in more than {REGIONS_MAX} allocations")
        storages[address] = Storage(address, storage.nbytes())
    return list(storages).index(address)


def _check_spans(
    component: int, spans: list[Span], storages: tuple[Storage, ...], num_blocks: int
) -> None:
    if not 0 < len(spans) <= PIECES_MAX:
        raise LayoutError(
            f"component {component}: {len(spans)} pieces a block, and {PIECES_MAX} are the most"
        )
    for span in spans:
        end = span.offset_bytes + (num_blocks - 1) * span.stride_bytes + span.bytes
        if span.offset_bytes < 0 or end > storages[span.storage_idx].bytes:
            raise LayoutError(f"component {component}: {span} leaves its allocation")
    for a, b in itertools.pairwise(sorted(spans)):
        if a.storage_idx == b.storage_idx and a.offset_bytes + a.bytes > b.offset_bytes:
            raise LayoutError(
                f"component {component}: merged groups overlap in part ({a} and {b}); "
                "their blocks cannot be one component"
            )
