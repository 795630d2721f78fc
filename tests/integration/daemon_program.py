"""kvtierd as a process: its command line, start and stop, signals, crashes and second daemons.

    daemon_program.py KVTIERD BENCH SOURCE_ROOT [--sanitized] [unittest arguments]

Each test has a scratch directory and small pools. Readiness is the READY=1 datagram where the
program speaks to systemd, else a connection to the socket."""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

KVTIERD = BENCH = ROOT = ""
SANITIZED = False
START_S_MAX, STOP_S_MAX = 10.0, 15.0  # a stop that waits for its deadline takes 20
MIB = 1 << 20


def run(*arguments):
    done = subprocess.run([KVTIERD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=60, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Daemon:
    """One daemon; its log is a file so that a full pipe can never stall it."""

    def __init__(self, directory, name="d", **overrides):
        self.socket = os.path.join(directory, name + ".sock")
        settings = {"server.socket": self.socket,
                    "server.admin_socket": os.path.join(directory, name + "-admin.sock"),
                    "index.memory": "16MiB", "tiers.l2.bytes": "64MiB", "tiers.l2.lock": "try",
                    "stop.deadline": "20s", "log.level": "debug"}
        settings.update({key.replace("__", "."): value for key, value in overrides.items()})
        command = [KVTIERD]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        self.log_path = os.path.join(directory, name + ".log")
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify_path = os.path.join(directory, name + ".notify")
        if os.path.exists(notify_path):
            os.unlink(notify_path)
        self.notify.bind(notify_path)
        self.notify.setblocking(False)
        self.messages = ""
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log,
                                            env={**os.environ, "NOTIFY_SOCKET": notify_path})

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def read_notices(self):
        while True:
            try:
                self.messages += self.notify.recv(65536).decode() + "\n"
            except BlockingIOError:
                return self.messages

    def can_connect(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(self.socket)
                return True
            except OSError:
                return False

    def wait_ready(self, limit_s=30.0):
        """Seconds until it serves."""
        start = time.monotonic()
        while time.monotonic() - start < limit_s:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.log()}")
            if "is ready in" in self.log() and self.can_connect():
                return time.monotonic() - start
            time.sleep(0.02)
        raise AssertionError(f"not ready in {limit_s} s:\n{self.log()}")

    def stop(self, number=signal.SIGTERM, limit_s=40.0):
        """(exit status, seconds)."""
        start = time.monotonic()
        self.process.send_signal(number)
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not stopped in {limit_s} s:\n{self.log()}") from None
        return status, time.monotonic() - start

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.notify.close()


class Base(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory(prefix="kvt-")
        self.addCleanup(self.scratch.cleanup)
        self.directory = self.scratch.name

    def daemon(self, name="d", **overrides):
        daemon = Daemon(self.directory, name, **overrides)
        self.addCleanup(daemon.close)
        return daemon

    def fails(self, status, message, name="d", **overrides):
        """A daemon that must not start: its status and a part of its last words."""
        daemon = self.daemon(name, **overrides)
        got = daemon.process.wait(30)
        self.assertEqual(got, status, daemon.log())
        self.assertRegex(daemon.log(), message)
        return daemon


class CommandLine(Base):
    def write(self, text):
        path = os.path.join(self.directory, "kvtierd.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def test_help_and_version(self):
        status, out, _ = run("--help")
        self.assertEqual(status, 0)
        self.assertIn("--check-config", out)
        status, out, _ = run("--version")
        self.assertEqual(status, 0)
        self.assertRegex(out, r"^kvtierd \d+\.\d+\.\d+ ")

    def test_wrong_options(self):
        for arguments in (["--no-such"], ["extra"], ["--config"]):
            status, _, err = run(*arguments)
            self.assertEqual(status, 2, err)
            self.assertNotEqual(err, "")

    def test_errors_name_file_and_line(self):
        path = self.write("server:\n  threads: 1\ntiers:\n  l2:\n    bytes: 4G\n  l9: 1\n")
        status, _, err = run("--check-config", "--config", path)
        self.assertEqual(status, 2)
        self.assertIn(f"{path}:6: tiers.l9: no such key", err)
        path = self.write("tiers:\n  l2:\n    bytes: 4G\nlog:\n  level: loud\n")
        status, _, err = run("--check-config", "--config", path)
        self.assertEqual(status, 2)
        self.assertIn(f"{path}:3: tiers.l2.bytes: \"4G\"", err)
        self.assertIn(f"{path}:5: log.level: \"loud\"", err)
        status, _, err = run("--config", path)
        self.assertEqual(status, 2)
        self.assertIn(f"{path}:3: tiers.l2.bytes", err)

    def test_pools_above_memory_are_refused_with_numbers(self):
        status, _, err = run("--check-config", "--set", "tiers.l2.bytes=64TiB")
        self.assertEqual(status, 2)
        self.assertRegex(err, r"L2 64\.00 TiB .* is [\d.]+ .iB: lower tiers\.l2\.bytes")

    def test_options_of_one_start_are_no_keys(self):
        plain = run("--print-config")
        self.assertEqual(run("--print-config", "--rebuild-l3", "--format"), plain)
        self.assertNotIn("rebuild", plain[1])
        for option in ("--rebuild-l3", "--format"):
            self.assertIn(option, run("--help")[1])

    def test_what_was_checked_is_named(self):
        self.assertEqual(run("--check-config"), (0, "defaults: the configuration is fine\n", ""))
        self.assertEqual(run("--check-config", "--set", "tiers.l2.bytes=8MiB"),
                         (0, "defaults with --set: the configuration is fine\n", ""))
        status, out, err = run("--check-config", "--set", "tiers.l1.export=true")
        self.assertEqual((status, out), (0, "defaults with --set: the configuration is fine\n"))
        self.assertIn("warning: tiers.l1.export is set, but tiers.l1.backend is none", err)

    def test_print_config_round_trips(self):
        sets = ["--set", "tiers.l2.bytes=96MiB", "--set", "stop.drain=false",
                "--set", f"server.socket={self.directory}/a b.sock"]
        status, printed, err = run("--print-config", *sets)
        self.assertEqual((status, err), (0, ""))
        path = self.write(printed)
        status, out, err = run("--check-config", "--config", path)
        self.assertEqual((status, err), (0, ""), out)
        self.assertEqual(run("--print-config", "--config", path), (0, printed, ""))

    def test_example_and_document_are_the_defaults(self):
        _, defaults, _ = run("--print-config")
        example = os.path.join(ROOT, "deploy", "kvtierd.yaml")
        self.assertEqual(run("--print-config", "--config", example), (0, defaults, ""))
        with open(example, encoding="utf-8") as file:
            keys_of_example = re.findall(r"^ *(\w+):", file.read(), re.M)
        with open(os.path.join(ROOT, "docs", "configuration.md"), encoding="utf-8") as file:
            document = file.read()
        for line in run("--print-keys")[1].splitlines():
            key, default, accepts = line.split("\t")
            self.assertIn(key.split(".")[-1], keys_of_example, "deploy/kvtierd.yaml")
            shown = "" if accepts.startswith("a path") and default == "none" else f"`{default}`"
            self.assertIn(f"| `{key}` | {shown} | {accepts} | ", document)


class StartAndStop(Base):
    def test_start_serve_stop(self):
        daemon = self.daemon(tiers__l1__backend="host", tiers__l1__bytes="32MiB",
                             tiers__l3__path=os.path.join(self.directory, "l3"),
                             tiers__l3__bytes="64MiB")
        if not SANITIZED:
            self.assertLess(daemon.wait_ready(), START_S_MAX)
            self.check_memory(daemon, (32 + 64 + 16 + 64) * MIB)
        else:
            daemon.wait_ready()
        self.check_modes(daemon)
        daemon.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 10
        while "SIGHUP" not in daemon.log():
            self.assertLess(time.monotonic(), until, daemon.log())
            time.sleep(0.02)
        status, seconds = daemon.stop()
        self.assertEqual(status, 0, daemon.log())
        self.assertLess(seconds, STOP_S_MAX)
        self.assertFalse(os.path.exists(daemon.socket))
        if "service manager: systemd" in run("--version")[1]:
            notices = daemon.read_notices()
            self.assertIn("READY=1", notices)
            self.assertIn("STATUS=L1 32", notices)
            self.assertLess(notices.index("READY=1"), notices.index("STOPPING=1"))

    def check_memory(self, daemon, limit_bytes):
        with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as file:
            rss_bytes = int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) * 1024
        self.assertLessEqual(rss_bytes, limit_bytes)

    def check_modes(self, daemon):
        self.assertEqual(os.stat(daemon.socket).st_mode & 0o777, 0o660)
        self.assertEqual(os.stat(daemon.socket[:-5] + "-admin.sock").st_mode & 0o777, 0o600)
        self.assertEqual(os.stat(os.path.join(self.directory, "l3")).st_mode & 0o777, 0o600)

    def test_second_daemon_is_refused(self):
        first = self.daemon()
        first.wait_ready()
        path = os.path.join(self.directory, "second")
        os.mkdir(path)
        second = Daemon(path, server__socket=first.socket)
        self.addCleanup(second.close)
        self.assertEqual(second.process.wait(30), 3, second.log())
        self.assertRegex(second.log(), rf"another daemon is running there, pid {first.process.pid}")
        self.assertTrue(first.can_connect())
        self.assertEqual(first.stop()[0], 0)

    def test_second_daemon_on_one_l3_file_is_refused(self):
        l3 = {"tiers__l3__path": os.path.join(self.directory, "l3"), "tiers__l3__bytes": "64MiB"}
        first = self.daemon(**l3)
        first.wait_ready()
        second = self.fails(3, "another daemon is running there", name="second", **l3)
        self.assertIn(str(first.process.pid), second.log())
        self.assertEqual(first.stop()[0], 0)

    def test_stale_socket_is_replaced(self):
        first = self.daemon()
        first.wait_ready()
        first.process.kill()
        first.process.wait()
        self.assertTrue(os.path.exists(first.socket))
        again = self.daemon()
        again.wait_ready()
        self.assertEqual(again.stop(signal.SIGINT)[0], 0)

    def test_socket_directory_that_is_missing(self):
        self.fails(1, "directory must exist", server__socket=self.directory + "/none/d.sock")

    def test_l3_directory_that_is_missing(self):
        """One device cannot be: it is out of service, the other and the daemon go on."""
        daemon = self.daemon(tiers__l3__bytes="64MiB", tiers__l3__path=self.directory + "/none/l3,"
                             + self.directory + "/l3")
        daemon.wait_ready()
        self.assertRegex(daemon.log(), "L3: .*/none/l3 is out of service: .*; its directory must "
                         "exist and be writable")
        self.assertRegex(daemon.log(), "L3: 1 of 2 devices")
        self.assertEqual(daemon.stop()[0], 0)

    def test_l3_devices_that_cannot_be(self):
        for settings, message in (
                ({"path": "l3"}, "tiers.l3.path: l3 is not an absolute path"),
                ({"path": self.directory + "/l3," + self.directory + "/l3"}, "two files of L3"),
                ({"path": "/dev/null"}, "is a raw device and its index needs a file system"),
                ({"path": self.directory + "/l3", "bytes": "16MiB"}, "leaves no room for data")):
            settings = {"tiers__l3__bytes": "64MiB"} | {
                f"tiers__l3__{key}": value for key, value in settings.items()}
            self.fails(2, re.escape(message), **settings)

    def test_l3_file_of_somebody_else_is_not_touched(self):
        path = os.path.join(self.directory, "l3")
        content = b"somebody's file" * 1000
        with open(path, "wb") as file:
            file.write(content)
        daemon = self.daemon(tiers__l3__path=path, tiers__l3__bytes="64MiB")
        daemon.wait_ready()
        self.assertRegex(daemon.log(), "L3: .* is out of service: .*it was not touched")
        self.assertEqual(daemon.stop()[0], 0)
        with open(path, "rb") as file:
            self.assertEqual(file.read(), content)

    def test_stop_while_idle_connections_are_open(self):
        daemon = self.daemon()
        daemon.wait_ready()
        probes = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
        for probe in probes:
            probe.connect(daemon.socket)
            probe.send(b"no HTTP/2")
        status, seconds = daemon.stop()
        for probe in probes:
            probe.close()
        self.assertEqual(status, 0, daemon.log())
        self.assertLess(seconds, STOP_S_MAX)

    def test_stop_under_load(self):
        daemon = self.daemon(tiers__l3__path=os.path.join(self.directory, "l3"),
                             tiers__l3__bytes="256MiB")
        daemon.wait_ready()
        bench = subprocess.Popen([BENCH, "synth", "--socket", daemon.socket, "--limit", "1000000",
                                  "--engines", "2", "--deadline", "2000", "--quiet", "--json"],
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            time.sleep(2)
            self.assertIsNone(bench.poll(), "the load ended by itself")
            status, seconds = daemon.stop()
            out = bench.communicate(timeout=60)[0].decode()
        finally:
            if bench.poll() is None:
                bench.kill()
                bench.wait()
            bench.stdout.close()
        self.assertEqual(status, 0, daemon.log())
        self.assertLess(seconds, 20 if not SANITIZED else 35)
        self.assertNotEqual(bench.returncode, 0, "it cannot have finished")
        self.assertNotRegex(out, r'"wrong_bytes":\s*[1-9]')


class WithoutGpu(Base):
    """What is configured for GPUs on a machine that has none, which is where this test runs: with a
    GPU it says so and leaves."""

    def setUp(self):
        super().setUp()
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has an NVIDIA driver")

    def test_l1_off_is_one_line(self):
        for overrides, line in (({}, "L1: off: not configured"),
                                ({"tiers__l1__backend": "cuda", "tiers__l1__bytes": "60%"},
                                 "L1: off: \\S.*")):
            daemon = self.daemon(name=f"d{len(overrides)}", **overrides)
            daemon.wait_ready()
            lines = [line for line in daemon.log().splitlines() if "L1:" in line]
            self.assertEqual(len(lines), 1, daemon.log())
            self.assertRegex(lines[0], line)
            self.assertEqual(daemon.stop()[0], 0, daemon.log())

    def test_check_config(self):
        cuda = ["--set", "tiers.l1.backend=cuda", "--set", "tiers.l1.bytes=60%"]
        self.assertEqual(run("--check-config", *cuda)[0], 0)
        status, _, err = run("--check-config", *cuda, "--set", "tiers.l1.gpus=0,0")
        self.assertEqual(status, 2)
        self.assertIn("tiers.l1.gpus: \"0,0\" names a GPU twice", err)


class Unit(Base):
    def test_systemd_accepts_the_unit_for_gpus(self):
        drop_ins = os.path.join(self.directory, "kvtierd.service.d")
        os.mkdir(drop_ins)
        with open(os.path.join(ROOT, "deploy", "kvtierd-gpu.conf"), encoding="utf-8") as file:
            text = file.read()
        with open(os.path.join(drop_ins, "gpu.conf"), "w", encoding="utf-8") as file:
            file.write(text)
        self.test_systemd_accepts_the_unit()

    def test_systemd_accepts_the_unit(self):
        path = os.path.join(self.directory, "kvtierd.service")
        with open(os.path.join(ROOT, "deploy", "kvtierd.service"), encoding="utf-8") as file:
            text = file.read()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("/usr/sbin/kvtierd", KVTIERD))
        try:
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], timeout=60,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        except FileNotFoundError:
            self.skipTest("systemd-analyze is not installed")
        complaints = [line for line in done.stdout.decode().splitlines() if "kvtierd" in line]
        self.assertEqual((done.returncode, complaints), (0, []), done.stdout.decode())


def main(argv):
    global KVTIERD, BENCH, ROOT, SANITIZED
    KVTIERD, BENCH, ROOT = (os.path.abspath(path) for path in argv[1:4])
    SANITIZED = "--sanitized" in argv
    rest = [argument for argument in argv[4:] if argument != "--sanitized"]
    unittest.main(argv=[argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main(sys.argv)
