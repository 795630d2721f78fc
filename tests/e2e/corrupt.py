"""Damages stored blocks, where they lie: in the memory of L2 or in the file of L3.

Both hold slots of the same layout (docs/formats.md, "Slot"), at multiples of 4,096 bytes from some
offset, so the magic number at such places finds them. A damage changes every byte of a payload.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAGIC = b"KVTSLOT1"
ALIGN = 4096
FIXED_BYTES = 256
HEADER_HASH = 248  # offset of the header's checksum


@dataclass(frozen=True)
class Slot:
    """One slot, by its header."""

    offset: int
    header_bytes: int
    payload_bytes: int
    block_idx: int
    component: int
    rank: int
    tokens: tuple[int, ...]


Chooser = Callable[[Slot], bool]


def number(memory: mmap.mmap, offset: int, size: int) -> int:
    return int.from_bytes(memory[offset : offset + size], "little")


def slot_at(memory: mmap.mmap, at: int) -> Slot | None:
    """The slot that begins here. One that is being filled (no checksum yet) does not count."""
    if memory[at : at + 8] != MAGIC or number(memory, at + HEADER_HASH, 8) == 0:
        return None
    count = number(memory, at + 168, 4)
    words = memoryview(memory[at + FIXED_BYTES : at + FIXED_BYTES + 4 * count]).cast("I")
    return Slot(
        offset=at,
        header_bytes=number(memory, at + 12, 4),
        payload_bytes=number(memory, at + 160, 8),
        block_idx=number(memory, at + 136, 8),
        component=number(memory, at + 172, 2),
        rank=number(memory, at + 174, 2),
        tokens=tuple(words),
    )


def slots(memory: mmap.mmap) -> Iterator[Slot]:
    for at in range(0, len(memory) - ALIGN + 1, ALIGN):
        slot = slot_at(memory, at)
        if slot is not None:
            yield slot


def damage(path: str, choose: Chooser) -> int:
    """Changes the payload of each chosen slot of the file or memory @path; returns how many."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size) as m:
        chosen = [slot for slot in slots(m) if choose(slot)]
        for slot in chosen:
            first = slot.offset + slot.header_bytes
            last = first + slot.payload_bytes
            m[first:last] = m[first:last].translate(CHANGED)
        m.flush()
    return len(chosen)


CHANGED = bytes(byte ^ 0x15 for byte in range(256))
