"""Layouts read off tensors: shapes and strides as vLLM 0.32 makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.vllm.layout import KvLayout, LayoutError, describe, page_spans
from worker_fakes import FakeStorage, FakeTensor, contiguous


@dataclass
class Page:
    page_bytes: int


@dataclass
class Shape:
    """A component of groups whose layers all have pages of one size."""

    engine_blocks_per_block: int
    layer_names: tuple[tuple[str, ...], ...]
    page_bytes: int

    @property
    def places(self) -> list[Page]:
        return [Page(self.page_bytes)] * len(self.layer_names[0])


def storage(size: int, seed: int = 1) -> FakeStorage:
    return FakeStorage(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def read(memory: FakeStorage, layout: KvLayout, component: int, ids: list[int]) -> bytes:
    pieces = layout.layouts[component].pieces
    return b"".join(
        memory.memory[o : o + p.bytes].tobytes()
        for p in pieces
        for o in (p.offset_bytes + b * p.stride_bytes for b in ids)
    )


def test_llama_layers_lie_one_after_the_other() -> None:
    """One group of layers, each [blocks, heads, tokens, 2 * head_size] of float32."""
    shape, page = (16, 2, 32, 64), 2 * 32 * 64 * 4
    memory = storage(4 * 16 * page)
    tensors = {
        f"l{i}": FakeTensor(memory, shape, contiguous(shape), i * 16 * page // 4, 4)
        for i in range(4)
    }
    layout = describe(tensors, [Shape(2, (("l0", "l1", "l2", "l3"),), page)], 16)
    assert [(p.offset_bytes, p.stride_bytes, p.bytes) for p in layout.layouts[0].pieces] == [
        (i * 16 * page, page, page) for i in range(4)
    ]
    assert layout.bytes_per_block(0) == 2 * 4 * page
    expected = b"".join(tensors[f"l{i}"].page(b) for i in range(4) for b in (5, 3))
    assert read(memory, layout, 0, [5, 3]) == expected


def test_groups_that_alias_share_their_pieces() -> None:
    """Gemma-3: four groups of one layer each over the same bytes; three are one component."""
    shape, page = (64, 2, 32, 64), 2 * 32 * 64 * 4
    memory = storage(64 * page)
    tensors = {f"l{i}": FakeTensor(memory, shape, contiguous(shape), 0, 4) for i in range(4)}
    layout = describe(
        tensors, [Shape(3, (("l0",), ("l1",), ("l2",)), page), Shape(1, (("l3",),), page)], 64
    )
    assert len(layout.storages) == 1
    assert [len(part.pieces) for part in layout.layouts] == [1, 1]
    assert layout.bytes_per_block(0) == 3 * page
    assert layout.bytes_per_block(1) == page
    assert read(memory, layout, 0, [9, 1, 7]) == b"".join(tensors["l0"].page(b) for b in (9, 1, 7))


def test_state_pages_leave_their_padding_out() -> None:
    """A recurrent state: [blocks, 1, 1, 268288] int8, 294912 bytes apart."""
    memory = storage(10 * 294912)
    tensor = FakeTensor(memory, (10, 1, 1, 268288), (294912, 268288, 268288, 1))
    (span,) = page_spans(tensor, 10, 0, "state")
    assert (span.offset_bytes, span.bytes, span.stride_bytes) == (0, 268288, 294912)
    layout = describe({"s": tensor}, [Shape(1, (("s",),), 268288)], 10)
    assert layout.bytes_per_block(0) == 268288
    padded = describe({"s": tensor}, [Shape(1, (("s",),), 294912)], 10)
    assert padded.bytes_per_block(0) == 294912
    with pytest.raises(
        LayoutError, match="268288 bytes a block, the engine's configuration 294913"
    ):
        describe({"s": tensor}, [Shape(1, (("s",),), 294913)], 10)


def test_blocks_outermost() -> None:
    """A block holds the pages of all layers, one after the other."""
    page, layers = 4 * 8, 3
    memory = storage(8 * layers * page)
    tensors = {
        f"l{i}": FakeTensor(memory, (8, 1, 4, 8), (layers * page, page, 8, 1), i * page)
        for i in range(layers)
    }
    layout = describe(tensors, [Shape(1, (("l0", "l1", "l2"),), page)], 8)
    assert [(p.offset_bytes, p.stride_bytes) for p in layout.layouts[0].pieces] == [
        (i * page, layers * page) for i in range(layers)
    ]


def test_axes_in_another_order_are_still_one_page() -> None:
    """[blocks, heads, tokens, dims] where tokens lie outside of heads."""
    tensor = FakeTensor(storage(4 * 2 * 8 * 16), (4, 2, 8, 16), (2 * 8 * 16, 16, 2 * 16, 1))
    (span,) = page_spans(tensor, 4, 0, "l")
    assert (span.bytes, span.stride_bytes) == (2 * 8 * 16, 2 * 8 * 16)


def test_heads_outermost_make_a_piece_a_head() -> None:
    tensor = FakeTensor(storage(2 * 4 * 8 * 16), (4, 2, 8, 16), (8 * 16, 4 * 8 * 16, 16, 1))
    spans = page_spans(tensor, 4, 0, "l")
    assert [(s.offset_bytes, s.bytes, s.stride_bytes) for s in spans] == [
        (0, 128, 128),
        (512, 128, 128),
    ]


def test_kernel_blocks_are_parts_of_a_block() -> None:
    """Eight blocks of 64 tokens that the kernel sees as sixteen of 32."""
    tensor = FakeTensor(storage(16 * 2 * 32 * 4), (16, 2, 32, 4), contiguous((16, 2, 32, 4)))
    (span,) = page_spans(tensor, 8, 0, "l")
    assert (span.bytes, span.stride_bytes) == (2 * 2 * 32 * 4, 2 * 2 * 32 * 4)


@pytest.mark.parametrize(
    ("shape", "strides", "blocks", "text"),
    [
        ((10, 4), (4, 1), 4, "axis of 4 blocks"),
        ((40,), (1,), 4, "axis of 4 blocks"),
        ((4, 3, 4), (16, 0, 1), 4, "overlap"),
        ((1, 3000, 8), (48000, 16, 1), 1, "too many pieces"),
    ],
)
def test_shapes_that_cannot_be(
    shape: tuple[int, ...], strides: tuple[int, ...], blocks: int, text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        page_spans(FakeTensor(storage(64), shape, strides), blocks, 0, "l")


def test_refusals_name_the_layer_or_component() -> None:
    memory = storage(4 * 32)
    good = FakeTensor(memory, (4, 32), (32, 1))
    with pytest.raises(LayoutError, match="tensor for b"):
        describe({"a": good}, [Shape(1, (("a", "b"),), 32)], 4)
    with pytest.raises(LayoutError, match="leaves its allocation"):
        describe({"a": FakeTensor(memory, (4, 32), (32, 1), 16)}, [Shape(1, (("a",),), 32)], 4)
    shifted = FakeTensor(memory, (3, 32), (32, 1), 16)
    half = FakeTensor(memory, (3, 32), (32, 1), 8)
    with pytest.raises(LayoutError, match="overlap in part"):
        describe({"a": half, "b": shifted}, [Shape(2, (("a",), ("b",)), 32)], 3)
