"""`python -m kvtier` as a person sees it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import engine
import kvtier
from daemon import Daemon
from kvtier import doctor
from kvtier.__main__ import main
from kvtier._proto import kvtier_pb2 as pb


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """Exit status, and the report by the names of its lines."""
    status = main(list(arguments))
    lines = capsys.readouterr().out.splitlines()
    return status, {line[6:19].strip(): line for line in lines if line[:4].strip()}


def test_a_daemon_that_works(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "doctor", "--socket", daemon.socket)
    assert status == 0
    assert said["self-test"].startswith("ok")
    assert f"process {daemon.pid} listens" in said["socket"]
    assert "API version 1" in said["session"]
    assert "8 test blocks evicted" in said["clean-up"]
    with kvtier.Client(daemon.socket) as client:
        left = client.stats()
        assert (left.blocks, left.sessions, left.leases, left.tickets) == (0, 0, 0, 0)


def test_without_the_admin_socket(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    os.unlink(daemon.directory / "admin.sock")
    status, said = run(capsys, "doctor", "--socket", daemon.socket)
    assert status == 0
    assert "8 test blocks stay" in said["clean-up"]


def test_no_daemon(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, said = run(capsys, "doctor", "--socket", str(tmp_path / "d.sock"))
    assert status == 1
    assert said["socket"].startswith("bad")
    plain = tmp_path / "plain"
    plain.touch()
    assert "is no socket" in run(capsys, "doctor", "--socket", str(plain))[1]["socket"]
    assert main(["stats", "--socket", str(tmp_path / "d.sock")]) == 3


def test_a_socket_that_is_left_over(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.kill()
    status, said = run(capsys, "doctor", "--socket", daemon.socket)
    assert status == 1
    assert "nobody listens" in said["socket"]


def test_a_socket_that_is_not_for_this_user(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["doctor", "--socket", daemon.socket]) == 1
    said = capsys.readouterr().out
    assert "this user may not use" in said
    assert "-> add the user to the group" in said


def test_a_daemon_that_is_stopped(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.3)
    daemon.stop()
    status, said = run(capsys, "doctor", "--socket", daemon.socket)
    daemon.go_on()
    assert status == 1
    assert "no answer within 0.3 s" in said["answer"]


def test_bytes_that_differ_are_bad(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test can fail: here the load goes to other blocks than those that are compared."""
    monkeypatch.setattr(np, "arange", lambda *_, dtype: list(range(doctor._BLOCKS)))
    status, said = run(capsys, "doctor", "--socket", daemon.socket)
    assert status == 1
    assert "other bytes came back" in said["self-test"]


def test_stats_are_short(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    with kvtier.Client(daemon.socket) as client:
        client.open_namespace(engine.spec("a"))
    assert main(["stats", "--socket", daemon.socket]) == 0
    text = capsys.readouterr().out
    assert "0 blocks" in text
    assert " a: 0 blocks" in text
    assert len(text.splitlines()) <= 4


def test_what_is_degraded_is_said() -> None:
    stats = pb.StatsAnswer(
        version="9.9",
        index_memory_bytes=100,
        index_used_bytes=99,
        tiers=[
            pb.TierStats(tier=2, capacity_bytes=1 << 20, errors=3),
            pb.TierStats(tier=3, health=1, detail="all devices are away"),
        ],
        devices=[
            pb.DeviceStats(path="/dev/a", health=1, index=pb.IndexStats(state=2)),
            pb.DeviceStats(path="/dev/b", index=pb.IndexStats(state=3)),
        ],
        engines=[pb.EngineStats(name="vllm", sessions=2, lookup_tokens=10, hit_tokens=9)],
    )
    stats.l1.why = "no NVIDIA driver"
    stats.gpus.add(index=0, name="NVIDIA H200")
    stats.gpus.add(index=3, name="NVIDIA T4", state=2, why="sm_75 is too old")
    stats.gpus.add(index=2**32 - 1, state=2, why="no GPU-deadbeef; there are: 0")
    stats.gpus.add(index=7, state=2, why="no GPU 7; there are: 0")
    assert [finding.text for finding in doctor._gpus(stats)] == [
        "off: no NVIDIA driver",
        "GPU 3 NVIDIA T4 is not used: sm_75 is too old",
        "GPU is not used: no GPU-deadbeef; there are: 0",
        "GPU 7 is not used: no GPU 7; there are: 0",
    ]
    tiers = list(doctor._tiers(stats))
    assert [finding.level for finding in tiers] == ["warn", "warn"]
    assert "all devices are away" in tiers[1].text
    devices = [finding.text for finding in doctor._devices(stats)]
    assert devices == [
        "/dev/a is out of service (its blocks are kept)",
        "the index of /dev/b was lost",
    ]
    assert doctor._index(stats).level == "warn"
    assert doctor._version_there(stats).level == "warn"
    assert "2 sessions, 10 tokens looked up, 90% hit" in doctor._engines(stats).text


def test_stats_say_what_a_gpu_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = pb.StatsAnswer(version="9.9")
    stats.gpus.add(index=0, name="NVIDIA H200", arena_bytes=64)
    stats.gpus.add(index=2**32 - 1, state=2, why="no GPU-deadbeef; there are: 0")
    monkeypatch.setattr(kvtier.Client, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(kvtier.Client, "close", lambda _: None)
    monkeypatch.setattr(kvtier.Client, "stats", lambda _: stats)
    assert main(["stats", "--socket", "/nowhere"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "GPU 0 NVIDIA H200: ok, 0 of 64 bytes",
        "GPU: not used: no GPU-deadbeef; there are: 0, 0 of 0 bytes",
    ]
