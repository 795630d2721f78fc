"""The daemon with an L3 that was damaged while it was down: bits in each region of the data, of
whole files, of an index, of another moment.

    l3_damage.py KVTIERD CRASH CTL BUILD SOURCE_ROOT [--sanitized] [unittest arguments]

The seed of everything random is printed; L3_FAULTS_SEED repeats it."""
import os
import re
import shutil
import sys

sys.dont_write_bytecode = True
import l3_case  # noqa: E402
import l3_world  # noqa: E402
from l3_case import ALL, STATE_OFFSET, SUPER_BYTES, Base, Others, is_sanitized  # noqa: E402
from l3_world import (DATA_OFFSET, MIB, Slot, damage, read_slots, record_offset,  # noqa: E402
                      write_at)


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
        for _ in range(1 if is_sanitized() else 2):
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
        for _ in range(2 if is_sanitized() else 5):
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


class WholeFile(Others):
    """A data file that is missing, cut off, foreign, another device's, of another moment."""

    def test_deleted(self):
        lost = self.world.l3_paths[self.random.randrange(2)]
        os.unlink(lost)
        self.world.start()
        self.expect_without([lost])
        self.assertNotIn("degraded", self.world.health())
        self.expect_takes()

    def test_all_deleted(self):
        for path in self.world.l3_paths:
            os.unlink(path)
        self.world.start()
        self.assertEqual(self.served(), 0)
        self.expect_takes()

    def test_cut_off(self):
        """Within superblock, state, catalog and data."""
        sizes = (0, 100, 5000, 9000, MIB + 5000, 2 * MIB - 1, 2 * MIB + 123, 4 * MIB)
        for size in sizes[1::3] if is_sanitized() else sizes:
            self.world.restore("full")
            path = self.world.l3_paths[self.random.randrange(2)]
            os.truncate(path, size)
            self.world.start()
            self.expect_without([path])
            if size >= DATA_OFFSET:
                self.assertIn(f"{path} was cut off", self.world.log_text())
            self.expect_few_lines()
            self.expect_takes()
            self.world.down()

    def test_somebody_elses(self):
        """Garbage, and a file system: not touched, out of service; the other device goes on."""
        path = self.world.l3_paths[0]
        for content in (self.random.randbytes(3 * MIB), bytes(1080) + b"\x53\xef" + b"\1" * 9000):
            self.world.restore("full")
            with open(path, "wb") as file:
                file.write(content)
            self.world.start()
            self.assertRegex(self.world.log_text(), f"L3: {path} is out of service: .*not touched")
            self.assertIn(path, self.world.health())
            self.expect_without([path], "--out-allowed")
            self.world.down()
            with open(path, "rb") as file:
                self.assertEqual(file.read(), content)

    def test_of_another_store(self):
        first, second = self.world.l3_paths
        self.world.paths = [first + ".new"]
        self.world.start()
        self.world.stop()
        os.rename(first + ".new", second)
        self.world.paths = None
        self.world.start()
        self.assertRegex(self.world.log_text(),
                         f"L3: {second} is out of service: belongs to another store")
        self.assertIn(second, self.world.health())
        self.expect_without([second], "--out-allowed")
        self.world.stop()
        self.world.start("--format")
        self.assertNotIn("degraded", self.world.health())
        self.expect_takes()

    def test_swapped(self):
        first, second = self.world.l3_paths
        os.rename(first, first + ".other")
        os.rename(second, first)
        os.rename(first + ".other", second)
        self.world.start()
        self.expect_all()
        self.assertIn("belongs to another device of this store", self.world.log_text())
        self.expect_takes()

    def later(self):
        """The files of a later moment: more was stored, a namespace was reset."""
        self.world.start()
        self.fill_more(1001)
        self.reset("crash-hybrid")
        self.fill_more(1002)
        self.world.stop()
        self.world.save("later")

    def expect_right(self, full):
        """Nothing of before the reset comes back; of namespace "full" there is @full."""
        self.world.start()
        self.assertEqual(self.served(), full, self.world.log_text())
        self.check_more(1001)
        self.check_more(1002)
        self.expect_few_lines()
        self.expect_takes()
        for seed in (1001, 1002):
            self.check_more(seed)
            self.fill_more(seed)
        self.world.down()
        self.world.start()
        for seed in (1001, 1002):
            self.assertEqual(self.check_more(seed, "--keeping"), ALL)
        self.world.down()

    def test_data_of_an_older_moment(self):
        self.later()
        self.take("full", "")
        self.world.start()
        self.check()  # the record of the reset is as old as the data
        self.check_more(1001)
        self.check_more(1002)
        self.expect_takes()

    def test_one_device_of_an_older_moment(self):
        self.later()
        path = self.world.l3_paths[self.random.randrange(2)]
        for suffix in ("", ".index"):
            shutil.copyfile(self.world.saved("full", path + suffix), path + suffix)
        self.expect_right(8 * 16)

    def test_indexes_of_an_older_moment(self):
        self.later()
        self.take("full", ".index")
        self.expect_right(8 * 16)

    def test_all_of_an_older_moment(self):
        self.later()
        self.take("full", "", ".index")
        self.world.start()
        self.expect_all()


class Catalog(Others):
    """What only the records of the catalog say: how far numbers go, what was reset."""
    devices = 1

    def damage_record(self, offset, size, copy_bytes):
        for path in self.world.l3_paths:
            for copy in range(2):
                damage(self.random, path, offset + copy * copy_bytes, size)

    def test_numbers_are_not_given_twice(self):
        self.damage_record(STATE_OFFSET, 80, SUPER_BYTES)
        self.world.start()
        self.assertEqual(self.served(), 0)
        self.fill_more(1001)
        self.world.down()
        before = {(slot.block_id, slot.generation) for slot in self.slots_before}
        new = {(slot.block_id, slot.generation) for slot in self.slots()} - before
        self.assertGreater(len(new), 100)
        self.assertGreater(min(id for id, _ in new), max(id for id, _ in before))
        self.assertGreater(min(stamp for _, stamp in new), max(stamp for _, stamp in before))
        os.unlink(self.world.index_paths()[0])  # the slots of before are still there
        self.world.start()
        self.check()
        self.assertEqual(self.check_more(1001, "--keeping"), ALL, self.world.log_text())

    def test_a_reset_holds_without_its_record(self):
        self.world.start()
        self.reset("crash-hybrid")
        self.world.stop()
        self.damage_record(record_offset(1, 0), 200, l3_world.RECORD_BYTES)
        os.unlink(self.world.index_paths()[0])
        self.world.start()
        self.assertEqual(self.served(), 8 * 16, "of the namespace that was not reset")
        self.world.down()
        os.unlink(self.world.index_paths()[0])
        self.world.start()
        self.assertEqual(self.served(), 8 * 16, self.world.log_text())
        self.expect_takes()


if __name__ == "__main__":
    sys.exit(l3_case.main(sys.argv))
