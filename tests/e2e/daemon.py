"""The daemon under test: small tiers in a scratch directory, and what is done to it there."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "lib"))
from scratch import ScratchDaemon  # noqa: E402

MIB = 1 << 20
L1_BYTES, L2_BYTES, L3_BYTES = 16 * MIB, 256 * MIB, 256 * MIB
SETTINGS = ("tiers.l3.index_bytes=16MiB", "stop.deadline=20s", "limits.lease_max=30s")
READY_SECONDS_MAX = 20


class Daemon(ScratchDaemon):  # type: ignore[misc]
    """with Daemon(build) as daemon: ..."""

    def __init__(self, build: str, *settings: str, is_verifying: bool = True) -> None:
        super().__init__(
            build, L1_BYTES, L2_BYTES, L3_BYTES, index="32MiB", settings=(*SETTINGS, *settings)
        )
        if not is_verifying:  # a program of the tests: CONTRIBUTING.md
            self.program = os.path.join(build, "tests", "integration", "kvtierd-no-verify")

    def pause(self) -> None:
        """It answers nobody until resume()."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
        super().clean_up()

    def counter(self, name: str, label: str = "") -> int:
        for counter in self.stats()["counters"]:
            if counter["name"] == name and counter["label"] == label:
                return int(counter["value"])
        raise KeyError(f"{name} {label}: no such counter")

    def hit_tokens(self) -> list[int]:
        """Tokens that lookups found, in L1, L2 and L3."""
        return [int(tier["hit_tokens"]) for tier in self.stats()["tiers"]]

    def held(self) -> dict[str, int]:
        """Everything that is nonzero only while somebody uses or fills something."""
        stats = self.stats()
        held = {
            name: int(stats[name])
            for name in ("leases", "tickets", "reserved_copies", "pins", "ops_running")
        }
        for name in ("pinned_copies", "filling_copies", "inflight"):
            held[name] = sum(int(tier[name]) for tier in stats["tiers"])
        return held

    def wait(
        self, what: str, is_so: Callable[[], bool], seconds: float = READY_SECONDS_MAX
    ) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until:
                raise AssertionError(f"not within {seconds} s: {what}; held: {self.held()}")
            time.sleep(0.02)

    def wait_nothing_held(self, seconds: float = READY_SECONDS_MAX) -> None:
        self.wait("nothing is held", lambda: not any(self.held().values()), seconds)

    def wait_sessions(self, count: int) -> None:
        self.wait(f"{count} sessions", lambda: self.stats()["sessions"] == count)

    def l2_path(self) -> str:
        """The memory of L2 as a file, by the daemon's descriptor of it."""
        directory = f"/proc/{self.process.pid}/fd"
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if os.readlink(path).startswith("/memfd:kvtierd-l2"):
                return path
        raise AssertionError("the daemon has no memfd for L2")

    def foreign_memory(self) -> list[str]:
        """Memory files of others that it has open or mapped: the regions of engines."""
        process = pathlib.Path(f"/proc/{self.process.pid}")
        names = {os.readlink(path) for path in (process / "fd").iterdir()}
        names |= {line.split(maxsplit=5)[-1].strip() for line in (process / "maps").open()}
        return sorted(n for n in names if n.startswith("/memfd:") and "kvtierd" not in n)

    def log_from(self, at: int) -> str:
        with open(self.log_path, errors="replace") as log:
            log.seek(at)
            return log.read()
