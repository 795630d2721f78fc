"""A private daemon in a scratch directory, for scripts: started with small tiers, stopped and
removed whatever happens; and where traces lie. Used by tools/soak, tools/crash and
tools/lib/quickstart.py."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
START_SECONDS_MAX = 30
STOP_SECONDS_MAX = 60
SOCKET_BYTES_MAX = 100  # sun_path has 108
AGENTS_TRACE = "claude_code_merged_blk512.jsonl.zst"


class Broken(Exception):
    """Something that ends the script, with text for people."""


def find_trace():
    """The agents' trace, where the machine has it; None."""
    for folder in (os.environ.get("KVT_TRACES"), os.path.join(ROOT, "..", "shared", "traces")):
        path = os.path.join(folder or "", AGENTS_TRACE)
        if folder and os.path.exists(path):
            return path
    return None


def mib(size):
    return f"{size / (1 << 20):.1f} MiB"


class ScratchDaemon:
    """with ScratchDaemon(build, l1=.., l2=.., l3=..) as daemon: ... daemon.socket ...

    Sockets lie in a short temporary directory; the files of L3 (@devices of them, of @l3 bytes
    each) lie below @disk, which has to be a file system with O_DIRECT (a tmpfs is none). The
    daemon may be killed and started again in the same places. When @is_kept is set, these stay."""

    def __init__(self, build, l1, l2, l3, disk=None, index="128MiB", settings=(), devices=1):
        self.program = os.path.join(build, "daemon", "kvtierd")
        self.ctl_program = os.path.join(build, "tools", "kvtier-ctl", "kvtier-ctl")
        self.sizes = (l1, l2, l3)
        self.devices = devices
        self.disk_parent = os.path.abspath(disk or build)
        self.settings = [f"index.memory={index}", *settings]
        self.environment = dict(os.environ)
        self.is_kept = False
        self.directory = self.disk = self.process = self.log = None

    def __enter__(self):
        try:
            self.directory = tempfile.mkdtemp(prefix="kvtier-")
            self.disk = tempfile.mkdtemp(prefix="scratch-", dir=self.disk_parent)
            self.before_start()
            self.start()
        except BaseException:
            self.clean_up()
            raise
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.stop()
        finally:
            self.clean_up()

    def before_start(self):
        """For those who need the directories to choose the environment."""

    @property
    def socket(self):
        return os.path.join(self.directory, "kvtierd.sock")

    @property
    def admin_socket(self):
        return os.path.join(self.directory, "admin.sock")

    @property
    def log_path(self):
        return os.path.join(self.directory, "log")

    @property
    def l3_paths(self):
        return [os.path.join(self.disk, f"l3-{i}" if i else "l3") for i in range(self.devices)]

    def can_connect(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(self.socket)
                return True
            except OSError:
                return False

    def start(self):
        """Starts it (again) and waits until it serves."""
        self.spawn()
        until = time.monotonic() + START_SECONDS_MAX
        while not self.can_connect():
            if self.process.poll() is not None:
                raise Broken(f"kvtierd ended with status {self.process.returncode}:\n"
                             f"{self.log_tail()}")
            if time.monotonic() > until:
                raise Broken(f"kvtierd did not come up in {START_SECONDS_MAX} s:\n"
                             f"{self.log_tail()}")
            time.sleep(0.01)

    def spawn(self):
        """Starts it without waiting for anything."""
        if len(self.admin_socket) > SOCKET_BYTES_MAX:
            raise Broken(f"{self.directory} is too long for a socket's path: set TMPDIR")
        l1, l2, l3 = self.sizes
        settings = [
            f"server.socket={self.socket}", f"server.admin_socket={self.admin_socket}",
            *([f"tiers.l1.backend=host", f"tiers.l1.bytes={l1}B"] if l1 else []),
            f"tiers.l2.bytes={l2}B", f"tiers.l2.pages=plain",
            f"tiers.l3.path={','.join(self.l3_paths)}", f"tiers.l3.bytes={l3}B",
            *self.settings]
        command = [self.program]
        for setting in settings:
            command += ["--set", setting]
        if self.log is None:
            self.log = open(self.log_path, "ab")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=self.log, env=self.environment)

    def helpers(self):
        """Process ids of its helper programs."""
        try:
            tasks = os.listdir(f"/proc/{self.process.pid}/task")
        except FileNotFoundError:
            return []
        pids = []
        for task in tasks:
            try:
                with open(f"/proc/{self.process.pid}/task/{task}/children") as children:
                    pids += [int(pid) for pid in children.read().split()]
            except (FileNotFoundError, ProcessLookupError):
                pass
        return pids

    def kill(self):
        """SIGKILL, as a crash or the kernel would end it."""
        self.check_alive()
        self.process.kill()
        self.process.wait()

    def log_tail(self, lines=20):
        with open(self.log_path, errors="replace") as log:
            return "".join(log.readlines()[-lines:])

    def check_alive(self):
        if self.process.poll() is not None:
            raise Broken(f"kvtierd ended by itself with status {self.process.returncode}:\n"
                         f"{self.log_tail()}")

    def ctl(self, *arguments):
        """What kvtier-ctl prints."""
        command = [self.ctl_program, "--socket", self.socket, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            raise Broken(f"{' '.join(command)} failed with status {done.returncode}")
        return done.stdout.decode()

    def stats(self):
        return json.loads(self.ctl("stats", "--json"))

    def rss_bytes(self):
        """Resident memory now, and at most so far."""
        values = {}
        with open(f"/proc/{self.process.pid}/status") as status:
            for line in status:
                name, _, rest = line.partition(":")
                if name in ("VmRSS", "VmHWM"):
                    values[name] = int(rest.split()[0]) * 1024
        return values["VmRSS"], values["VmHWM"]

    def stop(self):
        self.check_alive()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise Broken(f"kvtierd did not stop in {STOP_SECONDS_MAX} s:\n{self.log_tail()}")
        if status != 0:
            raise Broken(f"kvtierd stopped with status {status}:\n{self.log_tail()}")

    def clean_up(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.log is not None:
            self.log.close()
        for directory in (self.directory, self.disk):
            if directory is not None and not self.is_kept:
                shutil.rmtree(directory, ignore_errors=True)


def bench_program(build):
    return os.path.join(build, "tools", "kvtier-bench", "kvtier-bench")


def bench_info(build, arguments):
    """What a workload holds: `kvtier-bench info --json`."""
    command = [bench_program(build), "info", "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise Broken(f"kvtier-bench info failed with status {done.returncode}")
    return json.loads(done.stdout)


def bench_start(build, arguments):
    """Starts the bench with --json, for bench_finish."""
    return subprocess.Popen([bench_program(build), *arguments, "--json"], stdout=subprocess.PIPE)


def bench_finish(bench):
    """Waits for it: (exit status, its numbers)."""
    output = bench.communicate()[0]
    if not output.strip():
        raise Broken(f"kvtier-bench failed with status {bench.returncode}")
    return bench.returncode, json.loads(output)


def bench_run(build, arguments):
    """Runs the bench with --json: (exit status, its numbers)."""
    return bench_finish(bench_start(build, arguments))


def run_script(main):
    """The exit status of a script: of @main, or 1 with text when it is Broken."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that scratch is removed
    try:
        return main()
    except Broken as broken:
        print(f"{os.path.basename(sys.argv[0])}: {broken}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
