"""What all cases of an L3 that is damaged, missing, foreign or failing demand of the daemon: it
comes up (or stays up) and serves, no byte is wrong, what is not damaged is served, what is damaged
is a miss and counted by its kind, the log names it in few lines, `kvtier-ctl health` says what is
degraded, and L3 takes blocks again where its device is in service."""
import glob
import os
import random
import shutil
import sys
import unittest

import l3_world
from l3_world import read_slots, warnings_in

SEED = int(os.environ.get("L3_FAULTS_SEED") or random.SystemRandom().randrange(1 << 31))
SUPER_BYTES, STATE_OFFSET = 4096, 8192
# What a check reads when all is there: 8 talks of 16 blocks; and for two ranks 16 blocks, the last
# 3 of the window and the state of the last.
ALL = 8 * 16 + 8 * 2 * (16 + 3 + 1)
LOG_LINES_MAX = 60
SKIPPED = 77
program = {"is_sanitized": False, "build": "", "world_class": None}


def is_sanitized():
    return program["is_sanitized"]


class Base(unittest.TestCase):
    """A world a class, filled once; each case begins with the files of that moment."""
    devices = 2

    @classmethod
    def setUpClass(cls):
        print(f"seed {SEED}", file=sys.stderr)
        cls.world = program["world_class"](program["build"], SEED % 100000,
                                             devices=cls.devices)
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
        self.expect_but(lambda slot: slot.path in lost, *arguments, hybrid=hybrid)

    def expect_but(self, is_lost, *arguments, hybrid=0):
        slots = {slot.block_id: slot for slot in self.slots_before if slot.space == "full"}
        leaves = [slot for slot in slots.values() if slot.block_idx == 15]
        boundaries = []
        for slot in leaves:
            path = []
            while slot is not None:
                path.insert(0, slot)
                slot = slots.get(slot.parent_id)
            lost = [is_lost(slot) for slot in path]
            boundaries.append(lost.index(True) if True in lost else len(lost))
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


class Others(Base):
    """For cases that store more than the fill: each seed has its own talks, and its own journal."""

    def tearDown(self):
        super().tearDown()
        for journal in glob.glob(self.world.journal + "-*"):
            os.unlink(journal)

    def journal(self, seed):
        return f"{self.world.journal}-{seed}"

    def fill_more(self, seed, *arguments):
        filled = self.world.fill("--seed", str(seed), *arguments, journal=self.journal(seed))
        self.assertEqual((filled["first_fault"], filled["durable_answers"]), ("", 16),
                         self.world.log_text())

    def check_more(self, seed, *arguments):
        return self.check("--seed", str(seed), *arguments,
                          journal=self.journal(seed))["served_blocks"]

    def reset(self, model):
        for space in self.world.stats()["namespaces"]:
            if space["model"] == model:
                self.world.ctl("reset", "--namespace", space["fingerprint"], "--yes", status=(0,))

    def take(self, name, *suffixes):
        """Files of a saved moment instead of those that are there."""
        for path in self.world.l3_paths:
            for suffix in suffixes:
                shutil.copyfile(self.world.saved(name, path + suffix), path + suffix)


def main(argv):
    """KVTIERD CRASH CTL BUILD SOURCE_ROOT [--sanitized] [unittest arguments]"""
    l3_world.KVTIERD, l3_world.CRASH, l3_world.CTL, build, root = (
        os.path.abspath(path) for path in argv[1:6])
    program.update(build=build, is_sanitized="--sanitized" in argv,
                   world_class=l3_world.make_world_class(l3_world.import_scratch(root)))
    rest = [argument for argument in argv[6:] if argument != "--sanitized"]
    result = unittest.main(argv=[argv[0], *rest], verbosity=2, exit=False).result
    if result.wasSuccessful() and result.skipped and len(result.skipped) >= result.testsRun:
        return SKIPPED
    return 0 if result.wasSuccessful() else 1
