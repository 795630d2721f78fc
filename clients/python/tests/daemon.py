"""A kvtierd for a test: its own directory, small tiers, killed at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from kvtier._proto import kvtier_pb2 as pb

PROGRAM = os.environ.get("KVTIERD", "")
NO_PROGRAM = "KVTIERD names no kvtierd program (tools/python test sets it where build/ has one)"
START_TIMEOUT_S = 15.0


class Daemon:
    """Starts with start(); may be stopped, continued, killed and started again."""

    def __init__(
        self,
        *settings: str,
        program: str = PROGRAM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-")
        self.directory = Path(self._directory.name)
        self.socket = str(self.directory / "d.sock")
        self._settings = settings
        self._program = program
        self.environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        settings = [
            f"server.socket={self.socket}",
            f"server.admin_socket={self.directory}/admin.sock",
            "index.memory=16MiB",
            "tiers.l2.bytes=64MiB",
            "tiers.l2.lock=try",
            *self._settings,
        ]
        arguments = [part for setting in settings for part in ("--set", setting)]
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_listening():
            assert self._process.poll() is None, f"kvtierd ended:\n{self.log()}"
            assert time.monotonic() < until_s, f"kvtierd does not listen:\n{self.log()}"
            time.sleep(0.01)

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(self.socket + ".regions") == 0

    def stop(self) -> None:
        """SIGSTOP: it lives, and does nothing. Returns when every thread of it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_stopped():
            assert time.monotonic() < until_s, "it does not stop"
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def go_on_if_stopped(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.go_on()

    def reset(self, fingerprint: bytes) -> None:
        """Raises the epoch of a namespace, as an operator would."""
        with grpc.insecure_channel(f"unix:{self.directory}/admin.sock") as channel:
            channel.unary_unary(
                "/kvtier.v1.KvTierAdmin/Reset",
                request_serializer=pb.ResetRequest.SerializeToString,
                response_deserializer=pb.ResetAnswer.FromString,
            )(pb.ResetRequest(fingerprint=fingerprint), timeout=START_TIMEOUT_S)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=START_TIMEOUT_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._directory.cleanup()
