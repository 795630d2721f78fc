#!/usr/bin/env python3
"""What nvcc put into a linked program, read from the program itself: for which GPUs there is
machine code and PTX, that no float32 product is joined to a sum, how many registers a thread has.

    fatbin.py PROGRAM DOCS NVCC   DOCS is docs/kernels.md; NVCC the version that made PROGRAM

The machine code of a GPU is an ELF file, and a program has all of them in its section .nv_fatbin:

    u32 magic, u16 version, u16 header bytes, u64 bytes of the entries | entry | entry | ...
    entry  u16 kind (1 PTX, 2 ELF), u16, u32 header bytes, u64 bytes, u32 bytes that are compressed,
           u32, u32, u32 sm, u32, u32, u64 flags, ... | text or file, maybe compressed (flags)

NVIDIA's own tools for that (cuobjdump, nvdisasm) come apart from nvcc and are not needed."""
import re
import struct
import subprocess
import sys
from typing import Iterator, NamedTuple, NoReturn

# Of kernels/meson.build and of the first table of docs/kernels.md.
CODE, PTX = {80, 90, 100, 120}, {80, 120}
# Of the table "Shapes", the row of each kernel; registers in the order of CODE.
ROWS = {
    "gather, scatter": "copy_kernel",
    "check": "check_kernel",
    "quantise": "quantise_kernel",
    "dequantise": "dequantise_kernel",
    "relayout": "relayout_kernel",
}
KERNELS = 12  # two of copies, check, relayout, four each of the two of quantisation
DOCS_NVCC = "13.0"  # registers are its choice

MAGIC = struct.pack("<I", 0xBA55ED50)
KIND_PTX, KIND_ELF = 1, 2
FLAG_LZ4, FLAG_ZSTD = 0x2000, 0x8000
ATTRIBUTE_FRAME, ATTRIBUTE_REGISTERS = 0x11, 0x2F  # of .nv.info: (symbol, value)
FFMA = 0x023  # the low 9 bits of an instruction of 16 bytes, with any kind of operands


def fail(text: str) -> NoReturn:
    sys.exit("fatbin.py: " + text)


class Entry(NamedTuple):
    kind: int
    sm: int
    flags: int
    raw: bytes

    def data(self) -> bytes:
        if self.flags & FLAG_LZ4:
            print("SKIP: nvcc compressed its code with LZ4, which is not read here")
            sys.exit(77)
        if not self.flags & FLAG_ZSTD:
            return self.raw
        done = subprocess.run(["zstd", "-dcq"], input=self.raw, stdout=subprocess.PIPE, check=True)
        return done.stdout


class Section(NamedTuple):
    name: str
    kind: int
    data: bytes


def sections(elf: bytes) -> list[Section]:
    if elf[:5] != b"\x7fELF\x02":
        fail("no ELF file of 64 bits")
    (at,) = struct.unpack_from("<Q", elf, 0x28)
    count, names_idx = struct.unpack_from("<HH", elf, 0x3C)
    heads = [struct.unpack_from("<IIQQQQ", elf, at + 64 * i) for i in range(count)]
    names = heads[names_idx][4]
    found = []
    for name, kind, _, _, offset, size in heads:
        end = elf.index(b"\0", names + name)
        data = b"" if kind == 8 else elf[offset : offset + size]  # 8: no bytes in the file
        found.append(Section(elf[names + name : end].decode(), kind, data))
    return found


def one(found: list[Section], name: str) -> bytes:
    data = [section.data for section in found if section.name == name]
    if len(data) != 1:
        fail(f"{len(data)} sections {name}")
    return data[0]


def entries(program: bytes) -> Iterator[Entry]:
    data = one(sections(program), ".nv_fatbin")
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        _, head, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + head + size
        at += head
        while at < end:
            kind, _, head, size, packed = struct.unpack_from("<HHIQI", data, at)
            (sm,) = struct.unpack_from("<I", data, at + 28)
            (flags,) = struct.unpack_from("<Q", data, at + 40)
            raw = data[at + head : at + head + (packed or size)]
            yield Entry(kind, sm, flags, raw)
            at += head + size


def values(found: list[Section], wanted: int) -> dict[str, int]:
    """What .nv.info says of each kernel, by its name."""
    symbols, names, info = (one(found, name) for name in (".symtab", ".strtab", ".nv.info"))
    said, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4 and attribute == wanted:
            symbol, value = struct.unpack_from("<II", info, at)
            (name,) = struct.unpack_from("<I", symbols, 24 * symbol)
            said[names[name : names.index(b"\0", name)].decode()] = value
        at += size if form == 4 else 0
    return said


def check_code(sm: int, elf: bytes, worst: dict[tuple[str, int], int]) -> None:
    """One GPU's machine code; adds to @worst the registers of each kernel's worst kind."""
    found = sections(elf)
    registers, frames = values(found, ATTRIBUTE_REGISTERS), values(found, ATTRIBUTE_FRAME)
    if len(registers) != KERNELS or not set(registers) <= set(frames):
        fail(f"sm_{sm}: {len(registers)} kernels instead of {KERNELS}")
    for name, size in frames.items():  # division has functions of its own
        if size != 0:
            fail(f"sm_{sm}: {name} has {size} bytes that did not fit into registers")
    for name, count in registers.items():
        code = one(found, ".text." + name)
        fused = sum(
            struct.unpack_from("<H", code, i)[0] & 0x1FF == FFMA for i in range(0, len(code), 16)
        )
        kernel = re.search(r"[a-z]+_kernel", name)
        if kernel is None:
            fail(f"sm_{sm}: a kernel {name}")
        key = (kernel.group(), sm)
        worst[key] = max(worst.get(key, 0), count)
        # IEEE division, which quantisation needs, is made of them; nothing else may be.
        if (fused > 0) != ("15quantise_kernel" in name):
            fail(f"sm_{sm}: {name} has {fused} products that are joined to a sum")


def check_ptx(sm: int, text: str) -> None:
    """-fmad=false: ptxas may join a product and a sum only where neither has a rounding."""
    if f".target sm_{sm}" not in text:
        fail(f"compute_{sm}: that is no PTX of it: {text[:200]!r}")
    loose = re.findall(r"\b(?:fma\S*|mad\S*|(?:mul|add|sub)(?:\.ftz)?)\.f32\b", text)
    if loose:
        fail(f"compute_{sm}: {len(loose)} of " + ", ".join(sorted(set(loose))) + ": -fmad=false?")
    if not re.search(r"\bmul\.rn\.f32\b", text) or not re.search(r"\badd\.rn\.f32\b", text):
        fail(f"compute_{sm}: no product or no sum is there at all")


def check_docs(docs: str, nvcc: str, worst: dict[tuple[str, int], int]) -> None:
    gpus = docs[docs.index("| GPU of compute capability") :].split("\n\n")[0]
    if {int(sm) for sm in re.findall(r"of sm_(\d+)", gpus)} != CODE:
        fail("docs/kernels.md names other machine code")
    if {int(sm) for sm in re.findall(r"PTX of compute_(\d+)", gpus)} != PTX:
        fail("docs/kernels.md names other PTX")
    if nvcc != DOCS_NVCC:
        print(f"registers of nvcc {nvcc} are not compared: docs/kernels.md has {DOCS_NVCC}'s")
        return
    for row, kernel in ROWS.items():
        wanted = " / ".join(str(worst[(kernel, sm)]) for sm in sorted(CODE))
        line = re.search(rf"^\| {row} \|.*\| ([^|]+) \|$", docs, re.MULTILINE)
        if line is None or line.group(1) != wanted:
            said = line.group(1) if line else "nothing"
            fail(f'docs/kernels.md, "Shapes": {row} takes {wanted} registers; it says {said}')


def main() -> None:
    program, docs, nvcc = sys.argv[1:]
    with open(program, "rb") as file:
        found = list(entries(file.read()))
    code = sorted(entry.sm for entry in found if entry.kind == KIND_ELF)
    ptx = sorted(entry.sm for entry in found if entry.kind == KIND_PTX)
    print(f"machine code of sm {code}, PTX of compute {ptx}")
    if code != sorted(CODE) or ptx != sorted(PTX):
        fail(f"wanted are machine code of {sorted(CODE)} and PTX of {sorted(PTX)}")
    worst: dict[tuple[str, int], int] = {}
    for entry in found:
        if entry.kind == KIND_ELF:
            check_code(entry.sm, entry.data(), worst)
        else:
            check_ptx(entry.sm, entry.data().decode(errors="replace"))
    with open(docs, encoding="utf-8") as file:
        check_docs(file.read(), nvcc, worst)


main()
