#!/usr/bin/env python3
"""A program with the CUDA kernels in it needs no C++ runtime, and no driver to start.

    no_cxx.py PROGRAM     what PROGRAM needs (readelf -d) may name neither
    no_cxx.py --skip WHY  says "SKIP: WHY", exit 77: a build without CUDA kernels"""
import re
import subprocess
import sys

BANNED = re.compile(r"libstdc\+\+|libc\+\+|libgcc_s|libcuda|libcudart")


def needed(program):
    text = subprocess.run(["readelf", "-d", program], stdout=subprocess.PIPE, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text.decode())


def main():
    if sys.argv[1] == "--skip":
        print("SKIP: " + sys.argv[2])
        sys.exit(77)
    names = needed(sys.argv[1])
    print("needed: " + " ".join(names))
    if not names:
        sys.exit("readelf told nothing: is this a dynamic program?")
    found = [name for name in names if BANNED.search(name)]
    if found:
        sys.exit("needs " + " ".join(found))


main()
