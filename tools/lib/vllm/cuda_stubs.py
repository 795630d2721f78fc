#!/usr/bin/env python3
"""Stands in for the CUDA libraries that PyPI's torch links to, so that it loads without them.

    cuda_stubs.py TORCH_LIB_DIR

Each library that is missing becomes a small one whose functions all return 100, which to the CUDA
runtime means "no device": torch then says that it has no GPU and calls nothing else. They go beside
torch's own libraries, where the loader looks first, so that a CUDA toolkit of another version that
may be on the machine is not taken instead. Needs gcc, nm and readelf."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

NO_DEVICE = 100
LIBRARIES = re.compile(r"lib(cu|nvrtc|nvJitLink|nvshmem|nccl|nvToolsExt|nvtx)")
FUNCTIONS = re.compile(r"(__)?(cu[A-Za-z]|nv[A-Za-z]|nccl)")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def needed_libraries(torch_libs: list[pathlib.Path]) -> set[str]:
    """Names of the CUDA libraries that torch's libraries ask the loader for."""
    names: set[str] = set()
    for lib in torch_libs:
        dynamic = output_of("readelf", "-d", "-W", str(lib))
        names.update(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    return {name for name in names if LIBRARIES.match(name)}


def versions_of_libraries(torch_libs: list[pathlib.Path]) -> dict[str, str]:
    """Symbol version -> the library it is expected from."""
    owner: dict[str, str] = {}
    for lib in torch_libs:
        file = ""
        for line in output_of("readelf", "-V", "-W", str(lib)).splitlines():
            found = re.search(r"(File|Name): (\S+)", line)
            if found and found.group(1) == "File":
                file = found.group(2)
            elif found and "Flags:" in line:
                owner[found.group(2)] = file
    return owner


def undefined_symbols(torch_libs: list[pathlib.Path]) -> set[tuple[str, str]]:
    """(name, version or "") of each symbol that some other library has to define."""
    symbols: set[tuple[str, str]] = set()
    for lib in torch_libs:
        table = output_of("nm", "-D", "--undefined-only", "--with-symbol-versions", str(lib))
        for line in table.splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols.add((name, version.strip("@")))
    return symbols


def build(target: pathlib.Path, versions: dict[str, set[str]], plain: set[str]) -> None:
    """Compiles one library. A symbol without a version may be looked for in any: each has them."""
    names = plain.union(*versions.values())
    with tempfile.TemporaryDirectory() as directory:
        source, script = pathlib.Path(directory, "stub.c"), pathlib.Path(directory, "stub.map")
        source.write_text(
            "".join(f"long {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(names))
        )
        script.write_text(
            "".join(
                f"{version} {{ global: {'; '.join(sorted(members))}; }};\n"
                for version, members in sorted(versions.items())
            )
        )
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{target.name}"]
        if versions:
            command.append(f"-Wl,--version-script,{script}")
        subprocess.run([*command, "-o", str(target), str(source)], check=True)


def main(directory: pathlib.Path) -> int:
    torch_libs = sorted(directory.glob("libtorch*.so")) + sorted(directory.glob("libc10*.so"))
    owner = versions_of_libraries(torch_libs)
    symbols = undefined_symbols(torch_libs)
    plain = {name for name, version in symbols if not version and FUNCTIONS.match(name)}
    made = sorted(needed_libraries(torch_libs))
    for library in made:
        versions: dict[str, set[str]] = {}
        for name, version in symbols:
            if version and owner.get(version) == library:
                versions.setdefault(version, set()).add(name)
        build(directory / library, versions, plain)
    print(f"{len(made)} stand-ins for CUDA libraries in {directory}")
    return 0 if made else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(pathlib.Path(sys.argv[1])))
