"""The daemon with devices of L3 that change, fail and vanish: other sizes and numbers of them,
damage while it serves, helpers that end, file systems that are full or read-only, raw devices.

    l3_devices.py KVTIERD CRASH CTL BUILD SOURCE_ROOT [--sanitized] [unittest arguments]

The seed of everything random is printed; L3_FAULTS_SEED repeats it."""
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.dont_write_bytecode = True
import l3_case  # noqa: E402
import l3_world  # noqa: E402
from l3_case import ALL, SUPER_BYTES, Base, Others  # noqa: E402
from l3_world import DATA_OFFSET, MIB, damage, read_slots, write_at  # noqa: E402


class Devices(Others):
    """Other sizes, more and fewer devices, in another order, apart from each other."""

    def test_bigger(self):
        self.world.sizes = (l3_world.L1, l3_world.L2, 32 * MIB)
        try:
            self.world.start()
            self.expect_all()
            self.assertEqual({os.path.getsize(path) for path in self.world.l3_paths}, {28 * MIB})
            self.expect_takes()
        finally:
            self.world.sizes = self.sizes

    def test_smaller(self):
        """What still fits is kept; what does not stays gone when it is bigger again."""
        data = self.random.choice((4, 6)) * MIB
        self.world.sizes = (l3_world.L1, l3_world.L2, data + l3_world.INDEX)
        try:
            self.world.start()
            self.expect_but(lambda slot: slot.offset + slot.bytes > data)
            self.assertLess(self.served(), ALL)
            self.assertEqual({os.path.getsize(path) for path in self.world.l3_paths}, {data})
            self.expect_few_lines()
            self.world.stop()
        finally:
            self.world.sizes = self.sizes
        self.world.start()
        self.check()
        self.expect_takes()

    def setUp(self):
        super().setUp()
        self.sizes = self.world.sizes

    def test_another_size_of_the_indexes(self):
        for size in (8, 16, 4):
            self.world.sizes = (l3_world.L1, l3_world.L2, (16 + size) * MIB)
            try:
                self.world.settings.append(f"tiers.l3.index_bytes={size}MiB")
                self.world.start()
                self.expect_all()
                self.world.stop()
                for path in self.world.index_paths():
                    self.assertLessEqual(os.path.getsize(path), size * MIB)
            finally:
                self.world.sizes = self.sizes

    def test_one_more(self):
        """What is put on the new device outlives the daemon like all else."""
        self.world.paths = self.world.l3_paths + [self.world.l3_paths[0] + "-new"]
        self.world.start()
        self.expect_all()
        self.fill_more(1001)
        self.fill_more(1002)
        self.assertGreater(len(read_slots(self.world.paths[2])), 0)
        self.world.down()
        self.world.start()
        self.expect_all()
        self.assertEqual(self.check_more(1001, "--keeping"), ALL, self.world.log_text())
        self.assertEqual(self.check_more(1002, "--keeping"), ALL, self.world.log_text())

    def test_one_less_and_again(self):
        first, second = self.world.l3_paths
        self.world.paths = [first]
        self.world.start()
        self.expect_without([second])
        self.fill_more(1001)
        self.world.stop()
        self.world.paths = None
        self.world.start()
        self.expect_all()
        self.assertEqual(self.check_more(1001, "--keeping"), ALL)

    def test_another_order(self):
        self.world.paths = self.world.l3_paths[::-1]
        self.world.start()
        self.expect_all()
        self.assertNotIn("made anew", self.world.log_text())
        self.expect_takes()

    def test_apart_from_each_other(self):
        """Each stores without the other; a namespace is reset while one is away."""
        first, second = self.world.l3_paths
        self.world.paths = [first]
        self.world.start()
        self.fill_more(1001)
        self.reset("crash-hybrid")
        self.fill_more(1003)
        self.world.stop()
        self.world.paths = [second]
        self.world.start()
        self.fill_more(1002)
        self.world.stop()
        self.world.paths = None
        for _ in range(2):
            self.world.start()
            self.assertEqual(self.served(), 8 * 16, "the other namespace was reset")
            self.check_more(1001)
            self.check_more(1002)
            self.assertEqual(self.check_more(1003, "--keeping"), ALL)
            for seed in (1001, 1002, 1003):
                self.fill_more(seed)
            self.world.down()
        self.world.start()
        for seed in (1001, 1002, 1003):
            self.assertEqual(self.check_more(seed, "--keeping"), ALL)
        self.expect_one_block_a_number()

    def expect_one_block_a_number(self):
        blocks = {}
        for slot in self.slots():
            found = blocks.setdefault(slot.block_id, slot)
            self.assertEqual((found.parent_id, found.block_idx, found.tokens),
                             (slot.parent_id, slot.block_idx, slot.tokens), "two have this number")

    def test_second_daemon(self):
        """By the same path, by a symbolic link, by another name of the file."""
        self.world.start()
        first, second = self.world.l3_paths
        link, name = first + "-link", first + "-name"
        os.symlink(first, link)
        os.link(first, name)
        for path in (first, link, name):
            text = self.run_second(path)
            self.assertRegex(text, "another daemon is running there, pid "
                             f"{self.world.process.pid}\\b")
        self.expect_all()

    def run_second(self, path):
        done = subprocess.run(
            [l3_world.KVTIERD, "--set", f"server.socket={self.world.directory}/second.sock",
             "--set", f"server.admin_socket={self.world.directory}/second-admin.sock",
             "--set", "tiers.l2.bytes=8MiB", "--set", f"tiers.l3.path={path}",
             "--set", f"tiers.l3.bytes={20 * MIB}B", "--set", "tiers.l3.index_bytes=4MiB"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
        self.assertEqual(done.returncode, 3, done.stdout.decode())
        return done.stdout.decode()


class Namespaces(Others):
    """The same model and tokens under another revision are other blocks, on the same devices."""

    def test_no_cross_hits(self):
        self.world.start()
        other = self.journal("other")
        shutil.copyfile(self.world.journal, other)
        tried = self.check("--revision", "2", journal=other)
        self.assertEqual(tried["served_blocks"], 0)
        filled = self.world.fill("--revision", "2", journal=other)
        self.assertEqual(filled["durable_answers"], 16)
        for damage_indexes in (lambda path: None, os.unlink):
            self.world.down()
            for path in self.world.index_paths():
                damage_indexes(path)
            self.world.start()
            self.expect_all()
            self.assertEqual(self.check("--revision", "2", "--keeping",
                                        journal=other)["served_blocks"], ALL)

    def test_more_than_there_may_be(self):
        """Fewer are allowed now: those that are left out are as if they were not there."""
        self.world.settings.append("limits.namespaces=1")
        self.world.start()
        self.assertEqual(len(self.world.stats()["namespaces"]), 1)
        self.world.stop()
        self.world.settings.pop()
        self.world.start()
        self.check()
        self.expect_takes()


class Serving(Base):
    """Damage while the daemon serves."""

    def test_bits(self):
        self.world.start()
        self.world.wait_indexes("ready")
        slots = self.random.sample([slot for slot in self.slots() if slot.is_own()
                                    and slot.is_needed() and slot.space == "full"], 8)
        for slot in slots:
            damage(self.random, slot.path, slot.offset + slot.header_bytes, slot.payload_bytes)
        self.expect_misses(slots, {"slot_bad_payload": 8})
        self.expect_takes()

    def test_the_scrubber_finds_them(self):
        self.world.start()
        self.world.wait_indexes("ready")
        slots = self.random.sample(self.slots(), 10)
        copies = {(slot.path, slot.block_id, slot.component) for slot in slots}
        for slot in slots:
            damage(self.random, slot.path, slot.offset + slot.header_bytes, slot.payload_bytes)
        self.assertGreaterEqual(self.world.scrub(), len(copies))
        self.assertGreaterEqual(self.world.errors()["slot_bad_payload"], len(copies))
        self.assertIn("bad", self.world.ctl("scrub", "status", status=(1,)))
        before = self.world.errors()
        self.check()
        self.assertEqual(self.world.errors(), before, "nobody meets what the scrubber has dropped")
        self.expect_few_lines()
        self.expect_takes()

    def test_cut_off(self):
        path = self.world.l3_paths[0]
        self.world.start()
        self.world.wait_indexes("ready")
        os.truncate(path, DATA_OFFSET)
        self.expect_without([path], "--out-allowed")
        self.assertGreater(self.world.errors().get("short", 0), 0, self.world.errors())
        self.expect_few_lines()
        self.world.down()
        self.world.start()
        self.expect_takes()

    def test_folder_that_vanishes(self):
        """What is open goes on; after the restart that device is out of service."""
        folder = os.path.join(self.world.disk, "folder")
        os.mkdir(folder)
        try:
            for suffix in ("", ".index"):
                os.rename(self.world.l3_paths[1] + suffix, os.path.join(folder, "l3-1" + suffix))
            self.world.paths = [self.world.l3_paths[0], os.path.join(folder, "l3-1")]
            self.world.start()
            self.world.wait_indexes("ready")
            before = self.slots_before
            self.slots_before = self.slots()
            shutil.rmtree(folder)
            self.expect_all()
            self.world.stop()
            self.world.start()
            self.assertRegex(self.world.log_text(), f"{self.world.paths[1]} is out of service: .*"
                             "its directory must exist")
            self.assertIn(self.world.paths[1], self.world.health())
            self.expect_without([self.world.paths[1]], "--out-allowed")
            self.slots_before = before
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def test_helper_that_is_killed(self):
        self.world.start()
        self.world.wait_indexes("ready")
        os.kill(self.random.choice(self.world.helpers()), 9)
        until = time.monotonic() + 20
        while "index" not in self.world.health():
            self.assertLess(time.monotonic(), until)
        self.assertRegex(self.world.log_text(), "the index of .* is lost: helper ended by SIGKILL")
        self.expect_all()
        self.world.stop()
        self.world.start()
        self.expect_all()
        self.expect_takes()

    def test_helper_that_is_stopped(self):
        """It answers nothing: a stop does not wait for it for ever."""
        self.world.start()
        self.world.wait_indexes("ready")
        helpers = self.world.helpers()
        for pid in helpers:
            os.kill(pid, signal.SIGSTOP)
        self.expect_all()
        began = time.monotonic()
        self.world.stop()
        self.assertLess(time.monotonic() - began, 25)
        self.world.start()
        self.expect_all()

    def test_helper_that_ends_at_once(self):
        self.world.environment["KVTIER_HELPER"] = "/bin/false"
        self.world.start()
        self.world.wait_indexes("lost")
        self.assertEqual(self.served(), 0)
        self.assertRegex(self.world.health(), "index of .* is lost")
        self.world.stop()
        del self.world.environment["KVTIER_HELPER"]
        self.world.start()
        self.expect_all()

    def test_helper_that_is_missing(self):
        self.world.environment["KVTIER_HELPER"] = "/no/such/program"
        self.world.spawn()
        self.assertEqual(self.world.process.wait(30), 1)
        self.assertRegex(self.world.log_text(), "kvtierd-index cannot be run: .*install it")
        del self.world.environment["KVTIER_HELPER"]
        self.world.start()
        self.expect_all()


class FileSystem(Base):
    """A device on a file system of its own, a tmpfs, beside one that is well."""

    def setUp(self):
        super().setUp()
        self.folder = os.path.join(self.world.disk, "mount")
        os.mkdir(self.folder)
        self.addCleanup(os.rmdir, self.folder)

    def mount(self, size, *options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)),
                               "kvt-faults", self.folder], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            self.skipTest(f"no tmpfs can be mounted: {done.stdout.decode().strip()}")
        self.addCleanup(self.unmount)

    def unmount(self):
        if self.world.process.poll() is None:
            self.world.down()
        until = time.monotonic() + 20
        while subprocess.run(["umount", self.folder], check=False,
                             stderr=subprocess.DEVNULL).returncode != 0:
            if time.monotonic() > until:
                subprocess.run(["umount", "-l", self.folder], check=True)
                raise AssertionError("something still uses the file system")
            time.sleep(0.05)

    def place(self):
        """The second device goes there."""
        path = os.path.join(self.folder, "l3-1")
        for suffix in ("", ".index"):
            shutil.copyfile(self.world.l3_paths[1] + suffix, path + suffix)
        self.world.paths = [self.world.l3_paths[0], path]
        self.slots_before = self.slots()
        return path

    def test_read_only(self):
        self.mount("64m")
        path = self.place()
        self.world.start()
        self.expect_all()
        self.world.stop()
        until = time.monotonic() + 20  # a ring keeps its files for a moment
        while subprocess.run(["mount", "-o", "remount,ro", self.folder], check=False,
                             stderr=subprocess.DEVNULL).returncode != 0:
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        self.world.start()
        self.assertRegex(self.world.log_text(), f"L3: {path} is out of service: is read-only")
        self.assertIn(path, self.world.health())
        self.expect_without([path], "--out-allowed")
        self.world.stop()
        subprocess.run(["mount", "-o", "remount,rw", self.folder], check=True)
        self.world.start()
        self.expect_all()

    def use_up(self):
        with open(os.path.join(self.folder, "else"), "ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65536))
            except OSError:
                pass

    def test_full(self):
        """No room for an index that has to be made anew, nor for a data file that is."""
        self.mount("24m")
        path = self.place()
        os.unlink(path + ".index")
        self.use_up()
        self.world.start()
        self.expect_without([path], "--out-allowed")
        self.assertRegex(self.world.log_text(),
                         f"the index of {path} is lost: index .*: No space left on device")
        self.assertIn(f"the index of {path} is lost", self.world.health())
        self.world.down()
        os.unlink(path)
        until = time.monotonic() + 20
        while os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize < 8 * MIB:
            self.assertLess(time.monotonic(), until, "a ring keeps its files for a moment")
            time.sleep(0.02)
        shutil.copyfile(self.world.saved("full", path + ".index"), path + ".index")
        self.use_up()
        self.world.start()
        self.assertRegex(self.world.log_text(), f"L3: {path} is out of service: it wants .* room")
        self.expect_without([path], "--out-allowed")
        self.assertIn(path, self.world.health())


class RawDevices(Base):
    """Loop devices over files: what is damaged is damaged through them."""

    @classmethod
    def setUpClass(cls):
        cls.loops = []
        if shutil.which("losetup") is None or os.geteuid() != 0:
            raise unittest.SkipTest("no loop devices: no losetup, or not root")
        super().setUpClass()

    def attach(self, path):
        done = subprocess.run(["losetup", "--find", "--show", path], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            self.skipTest(f"no loop device: {done.stdout.decode().strip()}")
        device = done.stdout.decode().strip()
        self.addCleanup(self.detach, device)
        return device

    def detach(self, device):
        if self.world.process.poll() is None:
            self.world.down()
        subprocess.run(["losetup", "--detach", device], check=True)

    def setUp(self):
        super().setUp()
        self.world.settings.append(f"tiers.l3.index_dir={self.world.disk}")
        self.world.paths = [self.attach(path) for path in self.world.l3_paths]
        self.slots_before = self.slots()

    def index_path(self, device):
        return os.path.join(self.world.disk, device.strip("/").replace("/", "-") + ".index")

    def test_a_file_that_became_a_device(self):
        """The same bytes, without their indexes: all is found."""
        self.world.start()
        self.expect_all()
        self.assertTrue(os.path.exists(self.index_path(self.world.paths[0])))
        self.expect_takes()

    def test_bits(self):
        slots = self.random.sample([slot for slot in self.slots() if slot.is_own()
                                    and slot.is_needed() and slot.space == "full"], 8)
        self.world.start()
        self.world.wait_indexes("ready")
        for slot in slots:
            damage(self.random, slot.path, slot.offset + slot.header_bytes, slot.payload_bytes)
        self.expect_misses(slots, {"slot_bad_payload": 8})
        self.expect_takes()

    def test_superblocks(self):
        path = self.world.paths[0]
        damage(self.random, path, 0, SUPER_BYTES)
        self.world.start()
        self.expect_all()
        self.world.stop()
        for copy in range(2):
            damage(self.random, path, copy * SUPER_BYTES, SUPER_BYTES)
        self.world.start()
        self.assertRegex(self.world.log_text(), f"{path} is out of service: .*not touched")
        self.expect_without([path], "--out-allowed")
        self.world.stop()
        self.world.start("--format")
        self.expect_takes()

    def test_a_foreign_signature(self):
        """What carries one is refused, unless formatting is asked for; what is blank is taken."""
        path = self.world.paths[0]
        write_at(path, 0, bytes(MIB))
        write_at(path, 1080, b"\x53\xef")
        self.world.start()
        self.assertRegex(self.world.log_text(), f"{path} is out of service: .*ext.*not touched")
        self.assertIn(path, self.world.health())
        self.expect_without([path], "--out-allowed")
        self.world.stop()
        self.world.start("--format")
        self.expect_takes()

    def test_second_daemon(self):
        self.world.start()
        device = self.world.paths[0]
        done = subprocess.run(
            [l3_world.KVTIERD, "--set", f"server.socket={self.world.directory}/second.sock",
             "--set", f"server.admin_socket={self.world.directory}/second-admin.sock",
             "--set", "tiers.l2.bytes=8MiB", "--set", f"tiers.l3.path={device}",
             "--set", f"tiers.l3.index_dir={self.world.directory}",
             "--set", f"tiers.l3.bytes={20 * MIB}B", "--set", "tiers.l3.index_bytes=4MiB"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
        self.assertEqual(done.returncode, 3, done.stdout.decode())
        self.assertIn(f"pid {self.world.process.pid}", done.stdout.decode())


if __name__ == "__main__":
    sys.exit(l3_case.main(sys.argv))
