"""kvtier-ctl as a program against a real kvtierd: what it prints, and its exit status, on which
scripts and probes rely.

    ctl_program.py KVTIERD BENCH CTL [unittest arguments]"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

KVTIERD = BENCH = CTL = ""
START_S_MAX = 60


class Base(unittest.TestCase):
    SETTINGS = {}

    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory(prefix="kvt-ctl-")
        self.addCleanup(self.scratch.cleanup)
        self.socket = os.path.join(self.scratch.name, "kvtierd.sock")
        settings = {"server.socket": self.socket,
                    "server.admin_socket": os.path.join(self.scratch.name, "admin.sock"),
                    "index.memory": "16MiB", "tiers.l2.bytes": "16MiB", "tiers.l2.pages": "plain",
                    "tiers.l2.slab_unit": "1MiB", "tiers.l3.bytes": "64MiB",
                    "tiers.l3.path": os.path.join(self.scratch.name, "l3"), **self.SETTINGS}
        command = [KVTIERD]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        with open(os.path.join(self.scratch.name, "log"), "wb") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log)
        self.addCleanup(self.stop)
        until = time.monotonic() + START_S_MAX
        while self.ctl("health")[0] != 0:
            self.assertIsNone(self.daemon.poll(), "the daemon ended")
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)

    def stop(self):
        if self.daemon.poll() is None:
            self.daemon.kill()
        self.daemon.wait()

    def ctl(self, *arguments, stdin=None):
        done = subprocess.run([CTL, *arguments], input=stdin, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=120, check=False,
                              env={**os.environ, "KVTIERD_SOCKET": self.socket}, text=True)
        return done.returncode, done.stdout, done.stderr

    def ok(self, *arguments):
        code, out, err = self.ctl(*arguments)
        self.assertEqual(code, 0, (arguments, out, err))
        self.assertNotIn("\033", out)
        return out

    def await_none(self, *names):
        """The stats, when there is none of these: the daemon sees a moment later that a program
        has ended."""
        until = time.monotonic() + 20
        while True:
            stats = json.loads(self.ok("stats", "--json"))
            left = {name: stats[name] for name in names if stats[name] != 0}
            if not left:
                return stats
            self.assertLess(time.monotonic(), until, left)
            time.sleep(0.05)

    def fill(self):
        subprocess.run([BENCH, "synth", "--socket", self.socket, "--preset", "window", "--limit",
                        "30", "--tenants", "2", "--quiet"], check=True, timeout=120,
                       stdout=subprocess.DEVNULL)


class Ctl(Base):
    def test_empty(self):
        self.assertIn("no engine has declared a model yet", self.ok("stats"))
        code, _, err = self.ctl("lookup", "--tokens", "1,2")
        self.assertEqual(code, 1)
        self.assertIn("no namespace", err)
        self.assertEqual(json.loads(self.ok("health", "--json"))["is_serving"], True)
        self.assertIn("nothing is stored", self.ok("tree"))

    def test_one_name_of_the_socket(self):
        """Every tool takes the socket from the same variable."""
        nowhere = os.path.join(self.scratch.name, "nowhere.sock")
        for command in ([BENCH, "synth", "--limit", "1"], [CTL, "stats"]):
            done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True,
                                  env={**os.environ, "KVTIERD_SOCKET": nowhere})
            self.assertNotEqual(done.returncode, 0, command)
            self.assertIn("nowhere.sock", done.stderr, command)

    def test_devices(self):
        out = self.ok("devices")
        self.assertIn("L1\n  off: not configured (tiers.l1.backend is none)\n", out)
        self.assertIn("Devices of L3\n", out)
        devices = json.loads(self.ok("devices", "--json"))
        self.assertEqual((devices["l1"]["backend"], devices["l1"]["why"], devices["gpus"]),
                         ("none", "", []))
        self.assertEqual(len(devices["devices"]), 1)

    def test_filled(self):
        self.fill()
        stats = self.await_none("leases", "tickets", "reserved_copies")
        space = stats["namespaces"][0]
        self.assertGreater(space["hit_tokens"], 0)
        self.assertEqual(stats["tiers"][1]["copies"],
                         sum(c["copies_at"][1] for c in space["components"]))
        self.assertIn("kvtier-bench", self.ok("namespaces"))
        tree = json.loads(self.ok("tree", "--json", "--nodes", "100000", "--depth", "1000"))
        self.assertFalse(tree["is_cut"])
        self.assertEqual(sum(n["blocks"] for n in tree["nodes"]), space["blocks"])
        code, out, _ = self.ctl("lookup", "--tokens", ",".join(map(str, range(200))))
        self.assertEqual(code, 1)
        self.assertIn("3 blocks of 64, and 8 tokens", out)
        why = json.loads(self.ok("explain", "--json", "--namespace", space["fingerprint"][:8],
                                 "--tokens", ",".join(map(str, range(200)))))
        self.assertEqual([c["why"] for c in why["components"]], ["never_stored"] * 2)
        lines = self.ok("stats", "--json", "--watch", "0.1", "--rounds", "3").splitlines()
        self.assertEqual(len([json.loads(line) for line in lines]), 3)
        self.await_none("sessions")  # a lookup's is gone with the command

    def test_forgetting(self):
        self.fill()
        epoch = json.loads(self.ok("stats", "--json"))["namespaces"][0]["epoch"]
        code, _, err = self.ctl("reset", stdin="")
        self.assertEqual(code, 2)
        self.assertIn("needs --yes", err)
        self.assertGreater(json.loads(self.ok("evict", "--all", "--yes", "--json"))
                           ["evicted_blocks"], 0)
        self.assertEqual(json.loads(self.ok("reset", "--yes", "--json"))["epoch"], epoch + 1)
        self.assertEqual(json.loads(self.ok("stats", "--json"))["namespaces"][0]["blocks"], 0)
        # Admin verbs are refused where they do not belong.
        code, _, err = self.ctl("tree", "--admin-socket", self.socket)
        self.assertEqual(code, 4, err)

    def test_drain_and_scrub(self):
        self.fill()
        lacking = json.loads(self.ok("scrub", "status", "--json"))["drain"]["copies_left"]
        self.assertGreater(lacking, 0)
        drained = json.loads(self.ok("drain", "--json"))["drain"]
        self.assertEqual((drained["is_running"], drained["copies_left"],
                          drained["copies_failed"]), (False, 0, 0))
        self.assertEqual(drained["copies_written"], lacking)
        stats = json.loads(self.ok("stats", "--json"))
        self.assertEqual(stats["tiers"][-1]["tier"], 3)
        self.assertGreaterEqual(stats["tiers"][-1]["copies"], lacking)
        self.assertIn("written   0 copies", self.ok("drain"))
        self.assertIn("reads 100.0 MiB a second", self.ok("scrub", "start", "--rate", "100MiB"))
        until = time.monotonic() + 60
        while True:
            scrub = json.loads(self.ok("scrub", "status", "--json"))["scrub"]
            if scrub["rounds"] >= 2:
                break
            self.assertLess(time.monotonic(), until)
            time.sleep(0.1)
        self.assertGreaterEqual(scrub["checked_copies"], 2 * lacking)
        self.assertEqual((scrub["bad_copies"], scrub["skipped_copies"]), (0, 0))
        self.assertIn("scrubber  off", self.ok("scrub", "stop"))
        # Not on the main socket.
        for command in (["drain"], ["scrub", "status"]):
            self.assertEqual(self.ctl(*command, "--admin-socket", self.socket)[0], 4)
        self.daemon.send_signal(signal.SIGTERM)
        self.assertEqual(self.daemon.wait(60), 0)

    def test_l3_offline(self):
        self.fill()
        self.ok("drain")
        self.daemon.send_signal(signal.SIGTERM)
        self.assertEqual(self.daemon.wait(60), 0)
        path = os.path.join(self.scratch.name, "l3")
        with open(path, "rb") as file:
            before = file.read()
        self.assertIn("format version 2", self.ok("l3", "inspect", path))
        found = json.loads(self.ok("l3", "inspect", path, "--json"))
        self.assertEqual((found["path"], found["version"], found["is_verified"]), (path, 2, False))
        self.assertEqual((found["device_bytes"], found["there_bytes"]), (len(before),) * 2)
        slots = found["slots"]
        self.assertGreater(slots["good"], 0)
        found = json.loads(self.ok("l3", "verify", path, "--json"))
        self.assertEqual((found["bad"], found["unreadable_bytes"]), ([], 0))
        self.assertEqual(found["read_bytes"] // 2**20, len(before) // 2**20 - 2)
        with open(path, "rb") as file:
            self.assertEqual(file.read(), before)
        # One copy of the superblock is damaged: it serves, and verify says so.
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"x")
        self.assertEqual(self.ctl("l3", "inspect", path)[0], 0)
        code, out, _ = self.ctl("l3", "verify", path)
        self.assertEqual(code, 1)
        self.assertIn("B DAMAGED", out)
        code, _, err = self.ctl("l3", "verify", __file__)
        self.assertEqual(code, 4)
        self.assertIn("is not of kvtierd", err)
        self.assertEqual(self.ctl("l3", "verify", path + ".none")[0], 4)

    def test_doctor_and_no_daemon(self):
        code, out, _ = self.ctl("doctor", "--json")
        findings = json.loads(out)["findings"]
        self.assertEqual(code, 1 if any(f["level"] == "bad" for f in findings) else 0)
        self.assertTrue(all(f["remedy"] for f in findings if f["level"] != "ok"))
        self.assertIn(f"process {self.daemon.pid} listens", findings[0]["text"])
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()
        for command in ("stats", "health", "tree"):
            code, _, err = self.ctl(command)
            self.assertEqual(code, 3)
            self.assertIn("is kvtierd running?", err)
        self.assertIn("nobody listens", self.ctl("doctor")[1])


class WithoutGpu(Base):
    """L1 is to be on GPUs, and there is none: L2 and L3 serve, and all that one asks says why."""
    SETTINGS = {"tiers.l1.backend": "cuda", "tiers.l1.bytes": "60%"}

    def setUp(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has an NVIDIA driver")
        super().setUp()

    def test_it_says_why(self):
        self.fill()
        l1 = json.loads(self.ok("devices", "--json"))["l1"]
        self.assertEqual(l1["backend"], "cuda")
        self.assertNotEqual(l1["why"], "")
        self.assertIn(f"  off: {l1['why'][:100]}", self.ok("devices"))
        self.assertIn(f"  L1 is off: {l1['why'][:100]}", self.ok("health"))
        self.assertEqual(self.ctl("health", "--strict")[0], 1)
        code, out, _ = self.ctl("doctor", "--json")
        bad = {f["what"]: f for f in json.loads(out)["findings"] if f["level"] == "bad"}
        self.assertEqual(code, 1)
        self.assertIn("no NVIDIA driver is loaded", bad["GPU driver"]["text"])
        self.assertIn(l1["why"][:100], bad["L1"]["text"])


if __name__ == "__main__":
    KVTIERD, BENCH, CTL = (os.path.abspath(path) for path in sys.argv[1:4])
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
