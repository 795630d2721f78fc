"""A daemon whose L3 may be damaged between starts: what is stored in it is known to the block
(kvtier-crash fill), and where each slot lies is read from the files by this module's own reader, so
that it can be said which answers a damage may change and which it may not."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time

KVTIERD = CRASH = CTL = ""
MIB = 1 << 20
L1, L2 = 2 * MIB, 32 * MIB
INDEX = 4 * MIB
DATA_OFFSET = 2 * MIB
CATALOG_OFFSET, RECORD_BYTES = MIB, 8192
SLOT_ALIGN = 4096
SLOT_MAGIC = b"KVTSLOT1"
TALKS, BLOCKS, SHARED = 8, 16, 3
SPACES = {7680: "full", 7168: "hybrid", 3584: "hybrid", 12000: "hybrid"}  # by payload
SECONDS_MAX = 60


def import_scratch(root):
    sys.path.insert(0, os.path.join(root, "tools", "lib"))
    import scratch
    return scratch


class Slot:
    """One slot of a device's data, by its header."""

    FIELDS = {  # name: (offset, bytes) in the header; docs/formats.md
        "magic": (0, 8), "version": (8, 4), "header_bytes": (12, 4), "fingerprint": (16, 32),
        "root_digest": (48, 32), "extra_key": (80, 32), "epoch": (112, 8), "block_id": (120, 8),
        "parent_id": (128, 8), "block_idx": (136, 8), "generation": (144, 8),
        "stored_real_ns": (152, 8), "payload_bytes": (160, 8), "block_tokens": (168, 4),
        "component": (172, 2), "rank": (174, 2), "payload_hash": (176, 8), "store_id": (184, 16),
        "reserved": (200, 48), "header_hash": (248, 8), "tokens": (256, 64)}

    def __init__(self, path, offset, header):
        self.path, self.offset = path, offset
        number = {name: int.from_bytes(header[at:at + size], "little")
                  for name, (at, size) in self.FIELDS.items()}
        self.header_bytes, self.payload_bytes = number["header_bytes"], number["payload_bytes"]
        self.block_id, self.parent_id = number["block_id"], number["parent_id"]
        self.block_idx, self.generation = number["block_idx"], number["generation"]
        self.component, self.rank = number["component"], number["rank"]
        self.tokens = number["tokens"]
        self.space = SPACES.get(self.payload_bytes)
        self.bytes = -(-(self.header_bytes + self.payload_bytes) // SLOT_ALIGN) * SLOT_ALIGN

    def is_own(self):
        """Of one talk alone: its damage is met by one reader."""
        return self.block_idx >= SHARED

    def is_needed(self):
        """A lookup of the whole talk needs it: docs/architecture.md, the boundary rule."""
        first = {"full": [0], "hybrid": [0, 13, 15]}[self.space][self.component]
        return self.block_idx >= first


def read_slots(path):
    slots = []
    with open(path, "rb") as file:
        data = file.read()
    for at in range(DATA_OFFSET, len(data), SLOT_ALIGN):
        if data[at:at + 8] == SLOT_MAGIC:
            slots.append(Slot(path, at, data[at:at + 512]))
    return slots


def write_at(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip_bit(path, offset, bit):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def damage(generator, path, offset, size):
    """One bit of these bytes."""
    flip_bit(path, offset + generator.randrange(size), generator.randrange(8))


def copy_tree(source, target):
    """The files of @target are those of @source afterwards."""
    for name in os.listdir(target):
        os.unlink(os.path.join(target, name))
    for name in os.listdir(source):
        shutil.copyfile(os.path.join(source, name), os.path.join(target, name))


def make_world_class(scratch):
    class World(scratch.ScratchDaemon):
        """A fresh start of the daemon is start(); everything else may happen while it is down."""

        def __init__(self, build, seed, devices=2, data=16 * MIB, settings=()):
            super().__init__(build, L1, L2, data + INDEX, build, index="16MiB", devices=devices)
            self.seed = seed
            self.base_settings = [
                f"tiers.l3.index_bytes={INDEX}B", "tiers.l2.slab_unit=1MiB",
                "tiers.l3.stripe_blocks=4", "stop.deadline=20s", "tiers.l3.retry_min=50ms",
                "tiers.l3.retry_max=200ms", "tiers.l3.lost_after=300s", "index.memory=16MiB",
                *settings]
            self.settings = list(self.base_settings)
            self.paths = None
            self.log_from = 0
            self.helpers_seen = []

        # ---- places -------------------------------------------------------------------------

        def make_places(self):
            self.directory = scratch.tempfile.mkdtemp(prefix="kvtier-")
            self.disk = scratch.tempfile.mkdtemp(prefix="faults-", dir=self.disk_parent)

        @property
        def l3_paths(self):
            return self.paths if self.paths is not None else super().l3_paths

        def index_paths(self):
            return [path + ".index" for path in self.l3_paths]

        @property
        def journal(self):
            return os.path.join(self.directory, "journal")

        def save(self, name):
            """The files of L3 and the journal, as they are now."""
            store = os.path.join(self.directory, name)
            shutil.rmtree(store, ignore_errors=True)
            os.mkdir(store)
            copy_tree(self.disk, store)
            shutil.copyfile(self.journal, store + ".journal")

        def restore(self, name):
            self.settings, self.paths = list(self.base_settings), None
            self.environment = dict(os.environ)
            store = os.path.join(self.directory, name)
            copy_tree(store, self.disk)
            shutil.copyfile(store + ".journal", self.journal)

        def saved(self, name, path):
            return os.path.join(self.directory, name, os.path.basename(path))

        # ---- running ------------------------------------------------------------------------

        def spawn(self, *options):
            if self.log is None:
                self.log = open(self.log_path, "ab")
            self.log_from = os.path.getsize(self.log_path)
            program = self.program
            if options:  # through a shell: the base class knows settings only
                self.program = os.path.join(self.directory, "kvtierd-with-options")
                with open(self.program, "w", encoding="utf-8") as file:
                    file.write(f"#!/bin/sh\nexec '{program}' {' '.join(options)} \"$@\"\n")
                os.chmod(self.program, 0o700)
            try:
                super().spawn()
            finally:
                self.program = program

        def start(self, *options):
            self.spawn(*options)
            until = time.monotonic() + SECONDS_MAX
            while "is ready in" not in self.log_text() or not self.can_connect():
                if self.process.poll() is not None:
                    raise AssertionError(f"kvtierd ended with {self.process.returncode}:\n"
                                         f"{self.log_text()}")
                if time.monotonic() > until:
                    raise AssertionError(f"kvtierd is not up:\n{self.log_text()}")
                time.sleep(0.005)

        def down(self):
            """SIGKILL; returns when its helpers have followed and their locks are free."""
            helpers = self.helpers()
            self.kill()
            self.wait_gone(helpers)

        def stop(self):
            helpers = self.helpers()
            super().stop()
            self.wait_gone(helpers)

        def wait_gone(self, pids):
            until = time.monotonic() + 20
            while any(os.path.exists(f"/proc/{pid}") and is_alive(pid) for pid in pids):
                if time.monotonic() > until:
                    raise AssertionError("helpers outlive their daemon")
                time.sleep(0.005)

        def log_text(self):
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                log.seek(self.log_from)
                return log.read()

        # ---- asking -------------------------------------------------------------------------

        def engine(self, command, *arguments, journal=None):
            done = subprocess.run(
                [CRASH, command, "--socket", self.socket, "--admin", self.admin_socket,
                 "--journal", journal or self.journal, "--seed", str(self.seed), *arguments],
                stdout=subprocess.PIPE, timeout=120, check=False)
            if not done.stdout.strip():
                raise AssertionError(f"kvtier-crash {command} failed: {done.returncode}\n"
                                     f"{self.log_text()}")
            return json.loads(done.stdout)

        def fill(self, *arguments, **keywords):
            return self.engine("fill", "--talks", str(TALKS), *arguments, **keywords)

        def check(self, *arguments, **keywords):
            return self.engine("check", *arguments, **keywords)

        def ctl(self, *arguments, status=None):
            done = subprocess.run([CTL, *arguments, "--socket", self.admin_socket],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
                                  check=False)
            text = done.stdout.decode()
            if status is not None and done.returncode not in status:
                raise AssertionError(f"kvtier-ctl {arguments}: {done.returncode}\n{text}")
            return text

        def stats(self):
            return json.loads(self.ctl("stats", "--json", status=(0,)))

        def health(self):
            return self.ctl("health", "--strict", status=(0, 1))

        def wait_indexes(self, *states):
            """Until the index of every device is in one of @states; returns the stats."""
            until = time.monotonic() + SECONDS_MAX
            while True:
                stats = self.stats()
                if all(device["index"]["state"] in states for device in stats["devices"]):
                    return stats
                if time.monotonic() > until:
                    raise AssertionError(f"indexes are {[d['index'] for d in stats['devices']]}"
                                         f"\n{self.log_text()}")
                time.sleep(0.01)

        def wait_in_service(self):
            until = time.monotonic() + SECONDS_MAX
            while any(device["health"] != "ok" for device in self.stats()["devices"]):
                if time.monotonic() > until:
                    raise AssertionError(f"{self.health()}\n{self.log_text()}")
                time.sleep(0.02)

        def scrub(self):
            """A whole round over what is on L3, however often a device is out of service; returns
            how many copies were bad."""
            def status():
                return json.loads(self.ctl("scrub", "status", "--json", status=(0, 1)))["scrub"]
            self.wait_indexes("ready", "lost", "off")  # it looks at what is loaded
            self.ctl("scrub", "start", "--rate", "1GiB", status=(0, 1))
            before, outages, until = status(), -1, time.monotonic() + SECONDS_MAX
            while True:
                now = status()
                if now["rounds"] > before["rounds"]:
                    seen = sum(device["outages"] for device in self.stats()["devices"])
                    if seen in (0, outages):
                        break
                    before, outages = now, seen
                if time.monotonic() > until:
                    raise AssertionError(f"the scrubber does not come round\n{self.log_text()}")
                time.sleep(0.02)
            self.ctl("scrub", "stop", status=(0, 1))
            assert now["skipped_copies"] == 0, "L2 is too small for what this test is about"
            return now["bad_copies"]

        def errors(self):
            """By kind, of all devices."""
            total = {}
            for device in self.stats()["devices"]:
                for name, value in device["errors"].items():
                    total[name] = total.get(name, 0) + value
            return {name: value for name, value in total.items() if value > 0}

    return World


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def record_offset(namespace, copy):
    return CATALOG_OFFSET + namespace * 2 * RECORD_BYTES + copy * RECORD_BYTES


def warnings_in(log):
    return [line for line in log.splitlines() if re.match(r"<[34]>", line)]


def number_at(path, offset, form):
    with open(path, "rb") as file:
        file.seek(offset)
        return struct.unpack(form, file.read(struct.calcsize(form)))[0]
