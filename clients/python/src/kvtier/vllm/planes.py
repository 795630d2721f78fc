"""The planes of an attention layer's page: what each scale of a quantised component is of.

A page is `tokens` x `heads` cells, each K and V of `head_dim` elements. K and V of a head differ in
size, so each gets a scale of its own; the three ways in which vLLM lays out a page allow that::

    ..NHC   [token][head][K V]    one plane: 2 x heads heads (K of 0, V of 0, K of 1, ...)
    ..NC    [head][token][K V]    a plane for each head: 2 heads, which are its K and its V
    CPU     [head][K V][token]    one plane, heads first: 2 x heads heads

On the CPU, K of a head is packed in an order of the kernel's own, but nothing leaves its head. The
scheduler knows names and sizes only; the worker checks that its tensors are what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kvtier.types import Element, PlaneOrder, Quantisation, QuantKind
from kvtier.vllm._compat import PageFacts
from kvtier.vllm.layout import KvTensor, LayoutError

_KINDS = {"fp8_e4m3": QuantKind.FP8_E4M3, "int8": QuantKind.INT8}
_ELEMENTS = {"float16": Element.FP16, "bfloat16": Element.BF16}
ELEMENT_BYTES = 2


class PlaneComponent(Protocol):
    """The part of `geometry.GroupComponent` that is used here."""

    @property
    def quantisation(self) -> Quantisation | None: ...

    @property
    def layer_names(self) -> Sequence[Sequence[str]]: ...


def planes_of(
    how: str, page: PageFacts | None, page_bytes: Collection[int], device: str, layout: str
) -> Quantisation:
    """The planes of layers with such pages, all of a size in `page_bytes`; `layout` is vLLM's name
    of the order of axes. ValueError: they have none."""
    if page is None:
        raise ValueError("it is no attention with K and V of each head")
    if page.problem:
        raise ValueError(page.problem)
    element = _ELEMENTS.get(page.dtype)
    if element is None:
        raise ValueError(
            f"the cache's elements are {page.dtype}, and only float16 and bfloat16 are quantised"
        )
    found = page.tokens * page.heads * 2 * page.head_dim * ELEMENT_BYTES
    if set(page_bytes) != {found}:
        raise ValueError(
            f"its pages have {sorted(page_bytes)} bytes, and {page.tokens} tokens x {page.heads} "
            f"heads x K and V of {page.head_dim} elements are {found}"
        )
    order, heads = PlaneOrder.TOKENS_FIRST, 2 * page.heads
    if device == "cpu":
        order = PlaneOrder.HEADS_FIRST
    elif layout.endswith("NHC"):
        pass
    elif layout.endswith("NC"):
        heads = 2
    else:
        raise ValueError(f"this vLLM does not say how its pages are laid out ({layout!r})")
    return Quantisation(_KINDS[how], element, order, page.tokens, heads, page.head_dim)


def check_planes(
    kv_caches: Mapping[str, KvTensor], components: Sequence[PlaneComponent], num_blocks: int
) -> None:
    """Raises LayoutError if the tensors of a quantised component are not laid out as its planes
    say: scales would be of elements that have nothing to do with each other."""
    for component in components:
        planes = component.quantisation
        if planes is None:
            continue
        for name in (name for names in component.layer_names for name in names):
            tensor = kv_caches[name]
            if not _has_planes(tensor, planes, num_blocks):
                raise LayoutError(
                    f"{name}: its tensor of shape {list(tensor.shape)}, strides "
                    f"{list(tensor.stride())} and {tensor.element_size()} bytes an element has no "
                    f"planes of {planes.plane_tokens} tokens x {planes.heads} x {planes.head_dim}: "
                    "leave kv_connector_extra_config's quantise out"
                )


def _has_planes(tensor: KvTensor, planes: Quantisation, num_blocks: int) -> bool:
    """Of the logical axes block, head, token, and K with V."""
    cell, tokens = 2 * planes.head_dim, planes.plane_tokens
    shape, strides = list(tensor.shape), list(tensor.stride())
    if len(shape) != 4 or shape[3] != cell or strides[3] != 1:
        return False
    if tensor.element_size() != ELEMENT_BYTES:
        return False
    blocks, heads, block_tokens, _ = shape
    is_whole = [blocks, block_tokens] == [num_blocks, tokens]
    of_block, of_head, of_token, _ = strides
    if planes.order is PlaneOrder.HEADS_FIRST:
        is_dense = heads == 1 or of_head == tokens * cell
        return 2 * heads == planes.heads and is_whole and is_dense and of_token == cell
    if planes.heads == 2 and heads > 1:
        return is_whole and of_token == cell
    # Blocks that are cut into smaller ones for the kernel are one run of tokens all the same.
    is_cut = blocks * block_tokens == num_blocks * tokens and (
        of_block == block_tokens * heads * cell
    )
    return (
        2 * heads == planes.heads
        and (is_whole or is_cut)
        and (heads == 1 or of_head == cell)
        and of_token == heads * cell
    )
