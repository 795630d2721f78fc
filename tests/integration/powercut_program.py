"""The power cut of tools/crash tried on a toy whose invariants are known: what it had synced must
be there after every cut, what it had not must be lost, torn and reordered in some. And with its
syncs left out, the first must fail: a check that cannot is none.

    powercut_program.py SHIM SOURCE_ROOT"""
import os
import random
import subprocess
import sys
import tempfile

CUTS = 40
RECORD, SECTOR = 4096, 512

# Closes what it did not open, writes records one behind the other, syncs after each thirteenth,
# keeps the count of synced ones in a file that is O_DSYNC and a generation in a file that is
# replaced, then dies.
TOY = """
import ctypes, os, signal, sys
assert ctypes.CDLL(None).close_range(100, ctypes.c_uint(-1), 0) == 0
directory, count = sys.argv[1], int(sys.argv[2])
data = os.open(directory + "/data", os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(data, 2 << 20)
os.fsync(data)
place = os.open(directory, os.O_RDONLY)
meta = os.open(directory + "/meta", os.O_RDWR | os.O_CREAT | os.O_DSYNC, 0o600)
os.fsync(place)
for i in range(count):
    os.pwrite(data, b"".join(i.to_bytes(4, "little") * 128 for _ in range(8)), i * 4096)
    if i % 13 == 12:
        os.fdatasync(data)
        os.pwrite(meta, (i + 1).to_bytes(4, "little"), 0)
        print("synced", i + 1, flush=True)
    if i % 10 == 9:
        new = os.open(directory + "/index.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(new, i.to_bytes(4, "little") * 1000)
        os.fsync(new)
        os.rename(directory + "/index.new", directory + "/index")
        print("renamed", i, flush=True)
        if i % 20 == 19:
            os.fsync(place)
            print("replaced", i, flush=True)
        os.close(new)
os.close(os.open(directory + "/late", os.O_RDWR | os.O_CREAT, 0o600))
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_toy(shim, directory, journal, count, ignore):
    """What it said before it died: how many were synced, and the generation that was."""
    done = subprocess.run(
        [sys.executable, "-c", TOY, directory, str(count)], stdout=subprocess.PIPE, check=False,
        env={**os.environ, "LD_PRELOAD": shim, "KVT_POWERCUT_DIR": directory,
             "KVT_POWERCUT_JOURNAL": journal, "KVT_POWERCUT_IGNORE_SYNC": ignore})
    assert done.returncode == -9, f"the toy ended with {done.returncode}"
    said = {"synced": 0, "renamed": None, "replaced": None}
    for line in done.stdout.decode().splitlines():
        name, number = line.split()
        said[name] = int(number)
    return said


def read(directory, name):
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def look_at_records(directory, count, synced, seen):
    data = read(directory, "data")
    assert data is not None and len(data) == 2 << 20, "the file was there and had its size"
    states = []
    for i in range(count):
        record = data[i * RECORD:(i + 1) * RECORD]
        right = sum(record[at:at + SECTOR] == i.to_bytes(4, "little") * 128
                    for at in range(0, RECORD, SECTOR))
        zero = sum(not any(record[at:at + SECTOR]) for at in range(0, RECORD, SECTOR))
        zero -= i == 0 and right  # record 0 is zeros
        assert i == 0 or right + zero == 8, f"record {i} has bytes that nobody wrote"
        states.append("whole" if right == 8 else "lost" if right == 0 else "torn")
    seen["violations"] += sum(state != "whole" for state in states[:synced])
    for i in range(max(synced, 1), count):
        seen[states[i]] += 1
        seen["reordered"] += states[i] == "whole" and "lost" in states[synced:i]


def look_at_others(directory, said, seen):
    meta = read(directory, "meta")
    if said["synced"] > 0:
        assert int.from_bytes(meta[:4], "little") == said["synced"], "O_DSYNC is safe at once"
    index = read(directory, "index")
    if said["replaced"] is not None:
        assert index is not None, "a name that was synced"
    if index is not None:
        generation = int.from_bytes(index[:4], "little")
        assert index == index[:4] * 1000, "a file that was synced before it got its name"
        assert generation >= (said["replaced"] or 0), "an older file than the one that was synced"
        seen["old_index"] += generation < said["renamed"]
    seen["late"] += read(directory, "late") is not None
    seen["no_late"] += read(directory, "late") is None


def run(shim, powercut, ignore):
    seen = {name: 0 for name in ("violations", "whole", "lost", "torn", "reordered", "old_index",
                                 "late", "no_late")}
    for seed in range(CUTS):
        with tempfile.TemporaryDirectory(prefix="kvt-") as scratch:
            directory = os.path.join(scratch, "disk")
            journal = os.path.join(scratch, "journal")
            store = os.path.join(scratch, "store")
            os.mkdir(directory)
            os.mkdir(store)
            mirror = powercut.Mirror(directory, store)
            count = random.Random(seed).randrange(1, 60)
            said = run_toy(shim, directory, journal, count, ignore)
            mirror.cut(journal, random.Random(seed))
            look_at_records(directory, count, said["synced"], seen)
            look_at_others(directory, said, seen)
            mirror.close()
    return seen


def check_torn_journal(powercut):
    """A process that dies while it writes a record down leaves a part of it; what another process
    writes behind it must still be read."""
    whole = powercut.HEADER.pack(powercut.MAGIC, 1, 7, 0, 0, powercut.WRITE, 0, 2, 5) + b"/aDATA1"
    ended = powercut.HEADER.pack(powercut.MAGIC, 1, 0, 0, 5, powercut.END, 0, 0, 0)
    other = powercut.HEADER.pack(powercut.MAGIC, 2, 7, 0, 0, powercut.WRITE, 0, 2, 99) + b"/aDA"
    for raw, ids in ((whole + ended, [(1, 5)]), (other + whole + ended, [(1, 5)]),
                     (whole + other, [(1, None)]), (whole + whole[:5], [(1, None)]),
                     (whole[:30] + whole, [(1, None)])):
        with tempfile.NamedTemporaryFile() as file:
            file.write(raw)
            file.flush()
            calls = powercut.read_journal(file.name)
        assert [(call.id, call.result) for call in calls] == ids, raw


def main(shim, root):
    sys.path.insert(0, os.path.join(root, "tools", "lib"))
    import powercut
    check_torn_journal(powercut)
    seen = run(shim, powercut, "")
    print("synced as it should:", seen)
    assert seen["violations"] == 0, "what was synced is not there"
    for name in ("whole", "lost", "torn", "reordered", "late", "no_late", "old_index"):
        assert seen[name] > 0, f"no cut has shown: {name}"
    seen = run(shim, powercut, "data")
    print("with syncs left out:", seen)
    assert seen["violations"] > 0, "left out syncs were not found"


if __name__ == "__main__":
    main(*(os.path.abspath(path) for path in sys.argv[1:3]))
