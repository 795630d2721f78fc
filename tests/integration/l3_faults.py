"""The daemon with an L3 that is damaged, missing, foreign or failing.

    l3_faults.py KVTIERD CRASH CTL BUILD SOURCE_ROOT [--sanitized] [unittest arguments]

What every case demands: the daemon comes up (or stays up) and serves, no byte is wrong, what is not
damaged is served, what is damaged is a miss and counted by its kind, the log names it in few lines,
`kvtier-ctl health` says what is degraded, and L3 takes blocks again where its device is in service.
The seed of everything random is printed; L3_FAULTS_SEED repeats it."""
import glob
import os
import random
import re
import subprocess
import sys
import time
import unittest

sys.dont_write_bytecode = True
import l3_world  # noqa: E402
from l3_world import (DATA_OFFSET, MIB, Slot, damage, flip_bit, read_slots, record_offset,
                      warnings_in, write_at)  # noqa: E402

BUILD = ""
SANITIZED = False
SEED = int(os.environ.get("L3_FAULTS_SEED") or random.SystemRandom().randrange(1 << 31))
World = None
SUPER_BYTES, STATE_OFFSET = 4096, 8192
# What a check reads when all is there: 8 talks of 16 blocks; and for two ranks 16 blocks, the last
# 3 of the window and the state of the last.
ALL = 8 * 16 + 8 * 2 * (16 + 3 + 1)
LOG_LINES_MAX = 60


class Base(unittest.TestCase):
    """A world a class, filled once; each case begins with the files of that moment."""
    devices = 2

    @classmethod
    def setUpClass(cls):
        print(f"seed {SEED}", file=sys.stderr)
        cls.world = World(BUILD, SEED % 100000, devices=cls.devices)
        try:
            cls.world.make_places()
            cls.world.start()
            cls.world.wait_indexes("ready")
            cls.prepare()
            cls.world.stop()
            cls.world.save("full")
        except BaseException:
            cls.world.clean_up()
            raise

    @classmethod
    def prepare(cls):
        filled = cls.world.fill()
        assert filled["durable_answers"] == 16, (filled, cls.world.log_text())

    @classmethod
    def tearDownClass(cls):
        cls.world.clean_up()

    def setUp(self):
        self.random = random.Random(f"{SEED} {self.id()}")
        self.world.restore("full")
        self.slots_before = self.slots()

    def tearDown(self):
        if self.world.process.poll() is None:
            self.world.down()

    def slots(self):
        return [slot for path in self.world.l3_paths for slot in read_slots(path)]

    def check(self, *arguments, **keywords):
        """Every byte that is served is right."""
        result = self.world.check(*arguments, **keywords)
        self.world.check_alive()
        self.assertEqual((result["wrong_bytes"], result["first_fault"]), (0, ""),
                         self.world.log_text())
        return result

    def served(self, *arguments):
        return self.check(*arguments)["served_blocks"]

    def expect_all(self):
        self.assertEqual(self.served("--keeping"), ALL, self.world.log_text())

    def expect_without(self, lost, *arguments, hybrid=0):
        """Of namespace "full" what comes before the first block of each talk on a @lost device is
        served, of the other at least @hybrid."""
        slots = {slot.block_id: slot for slot in self.slots_before if slot.space == "full"}
        leaves = [slot for slot in slots.values() if slot.block_idx == 15]
        boundaries = []
        for slot in leaves:
            path = []
            while slot is not None:
                path.insert(0, slot)
                slot = slots.get(slot.parent_id)
            here = [slot.path not in lost for slot in path]
            boundaries.append(here.index(False) if False in here else len(here))
        self.assertEqual(len(leaves), l3_world.TALKS)
        self.assertGreaterEqual(self.served(*arguments), sum(boundaries) + hybrid)

    def expect_takes(self):
        """All is stored again where it is missing, and outlives a kill. What is damaged and was
        never read is found before, by the scrubber."""
        self.world.wait_in_service()
        self.world.scrub()
        self.world.wait_in_service()
        filled = self.world.fill()
        self.assertEqual((filled["first_fault"], filled["durable_answers"]), ("", 16),
                         self.world.log_text())
        self.world.down()
        self.world.start()
        self.expect_all()

    def expect_few_lines(self):
        lines = warnings_in(self.world.log_text())
        self.assertLess(len(lines), LOG_LINES_MAX, "\n".join(lines))

    def expect_misses(self, damaged, errors):
        """A first check after @damaged slots, each of one talk alone: what needs one is a miss (by
        one rank or by both), all else is served; @errors are counted."""
        copies = {(slot.path, slot.block_id, slot.component): slot for slot in damaged
                  if slot.is_needed()}
        low = len(copies)
        high = sum(1 if slot.space == "full" else 2 for slot in copies.values())
        result = self.check()
        self.assertEqual(result["served_blocks"] + result["missed_blocks"], ALL,
                         self.world.log_text())
        self.assertTrue(low <= result["missed_blocks"] <= high,
                        f"{low} <= {result['missed_blocks']} <= {high}")
        self.assertEqual(self.world.errors(), errors, self.world.log_text())
        return result


def used_bytes(path):
    """To the last byte of an index that is not zero."""
    with open(path, "rb") as file:
        return len(file.read().rstrip(b"\0"))


class DataFile(Base):
    """Flipped bits in each region of the data."""

    def sample(self, count, space="full"):
        found = [slot for slot in self.slots() if slot.is_own() and slot.is_needed()
                 and slot.space == space]
        return self.random.sample(found, count)

    def test_one_superblock(self):
        for copy, path in enumerate(self.world.l3_paths):
            damage(self.random, path, copy * SUPER_BYTES, SUPER_BYTES)
        self.world.start()
        self.expect_all()
        self.assertNotIn("degraded", self.world.health())
        for path in self.world.l3_paths:
            with open(path, "rb") as file:
                self.assertEqual(file.read(SUPER_BYTES), file.read(SUPER_BYTES), "both are whole")

    def test_both_superblocks(self):
        path = self.world.l3_paths[0]
        for copy in range(2):
            damage(self.random, path, copy * SUPER_BYTES, SUPER_BYTES)
        with open(path, "rb") as file:
            before = file.read()
        self.world.start()
        self.assertRegex(self.world.log_text(), f"{path} is out of service: .*not touched")
        self.assertRegex(self.world.health(), f"{path}\\b")
        self.expect_without([path], "--out-allowed")
        self.world.stop()
        with open(path, "rb") as file:
            self.assertEqual(file.read(), before, "it was not touched")
        self.world.start("--format")
        self.assertNotIn("degraded", self.world.health())
        self.expect_takes()

    def test_one_state_record(self):
        for copy, path in enumerate(self.world.l3_paths):
            damage(self.random, path, STATE_OFFSET + copy * SUPER_BYTES, 80)
        self.world.start()
        self.expect_all()

    def test_both_state_records(self):
        path = self.world.l3_paths[0]
        for copy in range(2):
            damage(self.random, path, STATE_OFFSET + copy * SUPER_BYTES, 80)
        self.world.start()
        self.assertRegex(self.world.log_text(), f"{path}: the record of numbers .* is damaged")
        self.expect_without([path])
        self.expect_takes()

    def test_one_namespace_record(self):
        for copy, path in enumerate(self.world.l3_paths):
            for number in range(2):
                damage(self.random, path, record_offset(number, copy), 200)
        self.world.start()
        self.expect_all()

    def test_both_namespace_records(self):
        path = self.world.l3_paths[0]
        for copy in range(2):
            damage(self.random, path, record_offset(0, copy), 200)
        self.world.start()
        self.assertRegex(self.world.log_text(), f"{path}: 1 records of its catalog are damaged")
        self.expect_without([path], hybrid=8 * 2 * 20)
        self.expect_takes()

    def test_both_namespace_records_of_all(self):
        for path in self.world.l3_paths:
            for copy in range(2):
                damage(self.random, path, record_offset(0, copy), 200)
        self.world.start()
        self.assertEqual(self.served(), 8 * 2 * 20, "the other namespace is whole")
        self.expect_takes()

    def test_every_field_of_a_slot_header(self):
        fields = dict(Slot.FIELDS)
        slots = self.sample(len(fields) + 2)
        for slot, (at, size) in zip(slots, fields.values()):
            damage(self.random, slot.path, slot.offset + at, size)
        for slot in slots[-2:]:  # behind the tokens, to the end of the header
            damage(self.random, slot.path, slot.offset + 320, slot.header_bytes - 320)
        self.world.start()
        self.expect_misses(slots, {"slot_no_header": 1, "slot_other_version": 1,
                                   # whose lengths are compared before its checksum
                                   "slot_other_content": 2,
                                   "slot_bad_header": len(slots) - 4})
        named = [slot for slot in slots
                 if f"{slot.path} slot at {slot.offset - DATA_OFFSET}:" in self.world.log_text()]
        self.assertGreaterEqual(len(named), 20, self.world.log_text())  # then it is enough
        self.expect_few_lines()
        before = self.world.errors()
        self.check()
        self.assertEqual(self.world.errors(), before, "dropped: they are not read again")
        self.expect_takes()

    def test_payloads(self):
        slots = self.sample(6) + self.sample(6, "hybrid")
        for slot in slots:
            damage(self.random, slot.path, slot.offset + slot.header_bytes, slot.payload_bytes)
        self.world.start()
        self.expect_misses(slots, {"slot_bad_payload": len(slots)})
        self.expect_takes()

    def test_padding_means_nothing(self):
        for slot in self.slots():
            used = slot.header_bytes + slot.payload_bytes
            if used < slot.bytes:
                damage(self.random, slot.path, slot.offset + used, slot.bytes - used)
        self.world.start()
        self.expect_all()
        self.assertEqual(self.world.errors(), {})

    def test_bits_anywhere(self):
        for _ in range(1 if SANITIZED else 2):
            self.world.restore("full")
            for path in self.world.l3_paths:
                for _ in range(self.random.choice((3, 30, 300))):
                    damage(self.random, path, 2 * SUPER_BYTES,
                           os.path.getsize(path) - 2 * SUPER_BYTES)
            self.world.start()
            self.check()
            self.expect_few_lines()
            self.expect_takes()
            self.world.down()

    def test_all_data_is_garbage(self):
        for path in self.world.l3_paths:
            write_at(path, DATA_OFFSET, self.random.randbytes(os.path.getsize(path) - DATA_OFFSET))
        self.world.start()
        self.assertEqual(self.served("--out-allowed"), 0)
        self.assertGreater(self.world.errors()["slot_no_header"], 10)
        self.expect_few_lines()
        self.expect_takes()


class IndexBase(Base):
    """The slots are whole: whatever becomes of an index, it is made anew from them."""

    def damage_and_check(self, change):
        for path in self.world.index_paths():
            change(path)
        self.world.start()
        self.check()
        self.world.wait_indexes("ready")
        self.expect_few_lines()

    def expect_made_anew(self, change):
        self.damage_and_check(change)
        self.assertIn("made anew from its slots", self.world.log_text())
        self.expect_all()
        self.world.down()
        self.world.start()
        self.assertNotIn("made anew", self.world.log_text())
        self.expect_all()


class IndexFile(IndexBase):
    devices = 1

    def test_missing(self):
        self.expect_made_anew(os.unlink)

    def test_empty(self):
        self.expect_made_anew(lambda path: os.truncate(path, 0))

    def test_cut_off(self):
        for share in (0.003, 0.2, 0.95):  # of what is used; what is not may be cut off
            self.world.restore("full")
            self.expect_made_anew(lambda path: os.truncate(path, int(used_bytes(path) * share)))
            self.world.down()
        self.world.restore("full")
        self.damage_and_check(lambda path: os.truncate(path, used_bytes(path)))
        self.expect_all()

    def test_garbage(self):
        self.expect_made_anew(lambda path: write_at(path, 0, self.random.randbytes(MIB)))

    def test_a_folder(self):
        def change(path):
            os.unlink(path)
            os.mkdir(path)
        for path in self.world.index_paths():
            change(path)
        try:
            self.world.start()
            self.world.wait_indexes("lost")
            self.check()
            self.assertRegex(self.world.health(), "index of .* is lost")
            self.world.stop()
        finally:
            for path in self.world.index_paths():
                os.rmdir(path)
        self.world.start()
        self.expect_all()

    def test_bits(self):
        """A page that is damaged makes the file unusable, a row alone is dropped: a few blocks are
        a miss, and the device need not be read as a whole."""
        for _ in range(2 if SANITIZED else 5):
            self.world.restore("full")
            count = self.random.choice((1, 3, 30, 300))

            def change(path):
                used = used_bytes(path)
                for _ in range(count):
                    damage(self.random, path, 0, used)
            self.damage_and_check(change)
            if not re.search(r" [1-9]\d* rows did not hold", self.world.log_text()):
                self.expect_all()
            self.expect_takes()
            self.world.down()


class IndexFiles(IndexBase):
    """With two devices: a path lies on both, its blocks' parents too."""
    devices = 2

    def test_both_missing(self):
        self.expect_made_anew(os.unlink)

    def test_of_the_other_device(self):
        first, second = self.world.index_paths()
        os.rename(first, first + ".other")
        os.rename(second, first)
        os.rename(first + ".other", second)
        self.expect_made_anew(lambda path: None)

    def test_one_of_them_missing(self):
        os.unlink(self.world.index_paths()[self.random.randrange(2)])
        self.expect_made_anew(lambda path: None)


def main(argv):
    global BUILD, SANITIZED, World
    l3_world.KVTIERD, l3_world.CRASH, l3_world.CTL, BUILD, root = (
        os.path.abspath(path) for path in argv[1:6])
    SANITIZED = "--sanitized" in argv
    World = l3_world.make_world_class(l3_world.import_scratch(root))
    rest = [argument for argument in argv[6:] if argument != "--sanitized"]
    unittest.main(argv=[argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main(sys.argv)
