"""Damages stored blocks, where they lie: in the memory of L2 or in the file of L3.

Both hold slots of the same layout (docs/formats.md, "Slot"), at multiples of 4,096 bytes from some
offset, so the magic number at such places finds them. A damage inverts payload bytes. With a new
checksum ("resealed") the daemon cannot see it: then the engine must be seen to answer otherwise, or
a comparison of answers could not fail.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAGIC = b"KVTSLOT1"
ALIGN = 4096
FIXED_BYTES = 256
PAYLOAD_HASH, HEADER_HASH = 176, 248  # offsets of the checksums in the header


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


def load_xxh3() -> Callable[[bytes, int], int]:
    name = ctypes.util.find_library("xxhash")
    if name is None:
        raise OSError("libxxhash is not installed, but the daemon needs it too")
    function = ctypes.CDLL(name).XXH3_64bits_withSeed
    function.restype = ctypes.c_uint64
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)
    return lambda data, seed: int(function(data, len(data), seed))


def reseal(memory: mmap.mmap, slot: Slot) -> None:
    """Makes both checksums right again."""
    xxh3 = load_xxh3()
    at, payload = slot.offset, slot.offset + slot.header_bytes
    found = xxh3(memory[payload : payload + slot.payload_bytes], 0)
    memory[at + PAYLOAD_HASH : at + PAYLOAD_HASH + 8] = found.to_bytes(8, "little")
    seed = xxh3(memory[at : at + HEADER_HASH], 0)
    found = xxh3(memory[at + FIXED_BYTES : at + slot.header_bytes], seed)
    memory[at + HEADER_HASH : at + HEADER_HASH + 8] = found.to_bytes(8, "little")


def damage(path: str, choose: Chooser, *, resealed: bool = False) -> int:
    """Inverts the payload of each chosen slot of the file or memory @path; returns how many."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size) as m:
        chosen = [slot for slot in slots(m) if choose(slot)]
        for slot in chosen:
            first = slot.offset + slot.header_bytes
            last = first + slot.payload_bytes
            m[first:last] = m[first:last].translate(INVERTED)
            if resealed:
                reseal(m, slot)
        m.flush()
    return len(chosen)


INVERTED = bytes(byte ^ 0x15 for byte in range(256))
