"""Which planes the connector declares of vLLM's layouts, what it refuses, and that its worker
finds them in the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vllm_fakes as fakes
from kvtier.types import Element, PlaneOrder, Quantisation, QuantKind
from kvtier.vllm.geometry import Geometry
from kvtier.vllm.layout import LayoutError
from kvtier.vllm.planes import check_planes
from worker_fakes import FakeStorage, FakeTensor

TOKENS, HEADS, DIM = 16, 4, 32
PAGE = TOKENS * HEADS * 2 * DIM * 2
BLOCKS = 8


@dataclass(frozen=True)
class Attention:
    """What a spec of vLLM says of its pages; its type's name says the kind."""

    block_size: int = TOKENS
    page_size_bytes: int = PAGE
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int | None = DIM
    dtype: str = "torch.bfloat16"
    kv_quant_mode: Any = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1
    prefix_cacheable: bool = True


class FullAttentionSpec(Attention):
    pass


class MLAAttentionSpec(Attention):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(Attention):
    sliding_window: int = 128


def geometry(
    specs: list[Any],
    quantise: dict[str, str],
    layout: str | None = "LBHNC",
    device: str = "cuda",
) -> Geometry:
    config = fakes.vllm_config(device_config=SimpleNamespace(device_type=device))
    cache = fakes.cache_config(specs, num_blocks=BLOCKS, kv_cache_layout=layout)
    return Geometry.from_kv_cache_config(config, cache, (), tuple(quantise.items()))


FP8 = {"full": "fp8_e4m3"}


def planes(order: PlaneOrder, heads: int, kind: QuantKind = QuantKind.FP8_E4M3) -> Quantisation:
    return Quantisation(kind, Element.BF16, order, TOKENS, heads, DIM)


@pytest.mark.parametrize(
    ("layout", "device", "expected"),
    [
        ("LBNHC", "cuda", planes(PlaneOrder.TOKENS_FIRST, 2 * HEADS)),
        ("BLNHC", "cuda", planes(PlaneOrder.TOKENS_FIRST, 2 * HEADS)),
        ("LBHNC", "cuda", planes(PlaneOrder.TOKENS_FIRST, 2)),
        ("BHLNC", "cuda", planes(PlaneOrder.TOKENS_FIRST, 2)),
        ("LBHNC", "cpu", planes(PlaneOrder.HEADS_FIRST, 2 * HEADS)),
    ],
)
def test_planes_of_layouts(layout: str, device: str, expected: Quantisation) -> None:
    one = geometry([FullAttentionSpec()], FP8, layout, device)
    (component,) = one.components
    assert component.quantisation == expected
    declared = one.model_spec().components[0]
    assert declared.quantisation == expected
    assert declared.stored_bytes < declared.bytes_per_block * 0.52
    # Everything else of the declaration is as without.
    (plain,) = geometry([FullAttentionSpec()], {}, layout, device).components
    assert plain.quantisation is None
    assert plain.bytes_per_block == component.bytes_per_block


def test_each_kind_has_its_own() -> None:
    specs = [FullAttentionSpec(), SlidingWindowSpec(dtype="torch.float16")]
    full, window = geometry(specs, {"sliding_window": "int8"}, "LBNHC").components
    assert full.quantisation is None
    assert window.quantisation is not None
    assert (window.quantisation.kind, window.quantisation.element) == (
        QuantKind.INT8,
        Element.FP16,
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (FullAttentionSpec(dtype="torch.float32"), "elements are float32, and only float16 and"),
        (FullAttentionSpec(dtype="torch.uint8", page_size_bytes=PAGE // 2), "are uint8"),
        (MLAAttentionSpec(), "one compressed latent for all heads"),
        (FullAttentionSpec(head_size_v=64), "K has 32 elements a head and V 64"),
        (FullAttentionSpec(kv_quant_mode=SimpleNamespace(name="FP8")), "vLLM quantises it itself"),
        (FullAttentionSpec(num_head_slots=2), "packs pages in a way of its own"),
        (FullAttentionSpec(state_content_bytes=100), "packs pages in a way of its own"),
        (FullAttentionSpec(tokens_per_state=4), "is not one token"),
        (FullAttentionSpec(page_size_bytes=PAGE + 4096), r"pages have \[12288\] bytes"),
        (fakes.FullAttentionSpec(), "no attention with K and V of each head"),
    ],
)
def test_what_is_refused(spec: Any, says: str) -> None:
    assert geometry([spec], {}).components[0].quantisation is None
    with pytest.raises(ValueError, match=says) as caught:
        geometry([spec], FP8)
    assert str(caught.value).startswith("kv_connector_extra_config: quantise: full: ")


@pytest.mark.parametrize("layout", [None, "NHWC!"])
def test_a_layout_without_a_name_is_refused(layout: str | None) -> None:
    with pytest.raises(ValueError, match="does not say how its pages are laid out"):
        geometry([FullAttentionSpec()], FP8, layout)


def test_a_kind_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window: the model has no such layers, only full"):
        geometry([FullAttentionSpec()], {"sliding_window": "int8"})


# ---- tensors: logical axes block, head, token, K with V ------------------------------------------


def strides_of(order: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a dense tensor whose memory has the axes in this order."""
    found, stride = {}, 1
    for axis in reversed(order):
        found[axis] = stride
        stride *= shape["BHNC".index(axis)]
    return tuple(found[axis] for axis in "BHNC")


def check(
    declared: str, device: str, order: str, shape: tuple[int, ...], element_size: int = 2
) -> None:
    heads = shape[1]
    spec = FullAttentionSpec(num_kv_heads=heads, page_size_bytes=PAGE * heads // HEADS)
    one = geometry([spec], FP8, declared, device)
    memory = FakeStorage(np.zeros(1, np.uint8))
    tensor = FakeTensor(memory, shape, strides_of(order, shape), 0, element_size)
    check_planes({"g0.l0": tensor, "g0.l1": tensor}, one.components, BLOCKS)


WHOLE = (BLOCKS, HEADS, TOKENS, 2 * DIM)
CUT = (2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM)


@pytest.mark.parametrize(
    ("declared", "device", "order", "shape"),
    [
        ("LBNHC", "cuda", "BNHC", WHOLE),
        ("LBNHC", "cuda", "BNHC", CUT),
        ("LBNHC", "cuda", "BHNC", (BLOCKS, 1, TOKENS, 2 * DIM)),
        ("LBHNC", "cuda", "BHNC", WHOLE),
        ("LHBNC", "cuda", "HBNC", WHOLE),
        ("LBHNC", "cuda", "BHNC", (2 * BLOCKS, 1, TOKENS // 2, 2 * DIM)),
        ("LBHNC", "cpu", "BHNC", WHOLE),
        ("LBHNC", "cpu", "BHNC", (BLOCKS, 1, TOKENS, 2 * DIM)),
    ],
)
def test_tensors_with_the_planes(
    declared: str, device: str, order: str, shape: tuple[int, ...]
) -> None:
    check(declared, device, order, shape)


@pytest.mark.parametrize(
    ("declared", "device", "order", "shape", "element_size"),
    [
        ("LBNHC", "cuda", "BHNC", WHOLE, 2),  # head and token are the other way round
        ("LBHNC", "cuda", "BNHC", WHOLE, 2),
        ("LBHNC", "cpu", "BNHC", WHOLE, 2),
        ("LHBNC", "cpu", "HBNC", WHOLE, 2),
        ("LBHNC", "cuda", "BHNC", CUT, 2),  # a head's tokens lie in two runs
        ("LBHNC", "cpu", "BHNC", CUT, 2),
        ("LBNHC", "cuda", "BNHC", WHOLE, 1),
        ("LBNHC", "cuda", "BNHC", (BLOCKS, HEADS, TOKENS, DIM), 2),
        ("LBNHC", "cuda", "BNHC", (BLOCKS, HEADS, 2 * TOKENS, 2 * DIM), 2),
    ],
)
def test_tensors_without_them(
    declared: str, device: str, order: str, shape: tuple[int, ...], element_size: int
) -> None:
    with pytest.raises(LayoutError, match=r"g0\.l0: its tensor of shape .* has no planes of 16"):
        check(declared, device, order, shape, element_size)


def test_tensors_of_another_shape() -> None:
    one = geometry([FullAttentionSpec()], FP8, "LBNHC")
    flat = FakeTensor(FakeStorage(np.zeros(1, np.uint8)), (BLOCKS, 100), (100, 1), 0, 2)
    with pytest.raises(LayoutError, match="has no planes"):
        check_planes({"g0.l0": flat, "g0.l1": flat}, one.components, BLOCKS)
    check_planes({}, geometry([FullAttentionSpec()], {}).components, BLOCKS)
