"""`python -m kvtier doctor`: does the daemon work, seen from where an engine stands?

What a person with kvtier-ctl cannot see is looked at here: the versions on this side, what this
process may do, and a store and a load through shared memory whose bytes are compared. How the
machine is set up is `kvtier-ctl doctor`'s.
"""

from __future__ import annotations

import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc
import numpy as np

from kvtier import _wire, errors
from kvtier._daemon import RegionSocket
from kvtier._proto import kvtier_pb2 as pb
from kvtier._session import RankSession
from kvtier.client import Client
from kvtier.region import Region
from kvtier.types import (
    API_VERSION,
    BlockRange,
    Component,
    Kind,
    Layout,
    ModelSpec,
    MoveResult,
    Moves,
    Piece,
    Role,
)

_TIMEOUT_S = 5.0
_BLOCKS = 8
_BLOCK_TOKENS = 16
_BLOCK_BYTES = 64 << 10
_SPEC = ModelSpec(
    block_tokens=_BLOCK_TOKENS,
    ranks=1,
    components=(Component(Kind.FULL, _BLOCK_BYTES, name="full"),),
    model="kvtier doctor",
)
_NEARLY_FULL = 0.97
_TIER_OUT, _TIER_OFF = 1, 2
_DEVICE_STATES = {1: "is out of service (its blocks are kept)", 2: "was lost"}
_GPU_STATES = {1: "is lost", 2: "is not used"}
_GPU_INDEX_NONE = 2**32 - 1
_INDEX_STATES = {0: "is being loaded", 1: "is being rebuilt", 3: "was lost"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: level is "ok", "warn" or "bad"; hint says what to do about it."""

    level: str
    name: str
    text: str
    hint: str = ""


def examine(socket: str, admin_socket: str) -> Iterator[Finding]:
    """The findings about the daemon on a socket, as they come. Stops at the first thing without
    which nothing else makes sense."""
    yield _versions_here()
    path = _wire.checked_socket(socket)
    reachable = list(_reach(path))
    yield from reachable
    if any(finding.level == "bad" for finding in reachable):
        return
    with Client(path, timeout_s=_TIMEOUT_S) as client:
        try:
            stats = client.stats()
        except errors.KvtierError as error:
            yield Finding("bad", "answer", _no_answer(error), _hint_of(error))
            return
        yield _serving(client)
        yield _version_there(stats)
        yield from _tiers(stats)
        yield from _gpus(stats)
        yield from _devices(stats)
        yield _index(stats)
        yield _engines(stats)
        yield from _self_test(client, admin_socket)


def report(socket: str, admin_socket: str, say: Callable[[str], None] = print) -> int:
    """Says all findings; 0 when none of them is bad, else 1."""
    counts = {"ok": 0, "warn": 0, "bad": 0}
    for finding in examine(socket, admin_socket):
        counts[finding.level] += 1
        say(f"{finding.level:<5} {finding.name:<13} {finding.text}")
        if finding.hint:
            say(f"{'':<19} -> {finding.hint}")
    say("")
    say(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['bad']} bad")
    return 1 if counts["bad"] else 0


# ---- this side -----------------------------------------------------------------------------------


def _versions_here() -> Finding:
    names = ("kvtier", "grpcio", "protobuf", "numpy")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            # Only this package can run without being installed.
            versions.append(f"{name} from {os.path.dirname(__file__)}")
    return Finding("ok", "here", f"Python {platform.python_version()}, {', '.join(versions)}")


def _reach(path: str) -> Iterator[Finding]:
    """Can this process talk to the two sockets at all?"""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        yield Finding(
            "bad",
            "socket",
            f"there is no {path}",
            "start the daemon (systemctl start kvtierd), or name its socket with --socket or "
            "KVTIERD_SOCKET; in a container, mount its folder",
        )
        return
    except OSError as error:
        yield Finding("bad", "socket", f"{path}: {error.strerror}", _access_hint(path))
        return
    if not stat.S_ISSOCK(mode):
        yield Finding("bad", "socket", f"{path} is no socket", "name the daemon's with --socket")
        return
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding(
            "bad",
            "socket",
            f"this user may not use {path} (mode {mode & 0o777:04o})",
            _access_hint(path),
        )
        return
    try:
        with RegionSocket(path, _TIMEOUT_S) as lender:
            process = lender.process()
    except errors.Unavailable as error:
        yield Finding("bad", "socket", error.text, "start the daemon: systemctl start kvtierd")
        return
    who = f"process {process.pid}" if process.pid else "a process in another pid namespace"
    watched = process.is_watched
    process.close()
    yield Finding("ok", "socket", f"{path}: {who} listens, mode {mode & 0o777:04o}")
    if not watched:
        yield Finding(
            "warn",
            "its end",
            "the end of the daemon's process cannot be seen from here",
            "after a crash, blocks of running operations stay locked until the daemon is back, or "
            "60 s; a kernel from 6.5 on, or a shared pid namespace (hostPID), lifts that",
        )


def _access_hint(path: str) -> str:
    return (
        f"add the user to the group of {path} (usermod -aG kvtierd USER), or set server.socket_mode"
    )


# ---- the daemon ----------------------------------------------------------------------------------


def _no_answer(error: errors.KvtierError) -> str:
    if isinstance(error, errors.DeadlineExceeded):
        return f"it listens, and gave no answer within {_TIMEOUT_S:g} s"
    return f"{error.text} ({error.code})"


def _hint_of(error: errors.KvtierError) -> str:
    if isinstance(error, errors.DeadlineExceeded):
        return "the daemon hangs or is stopped: look at its log, systemctl status kvtierd"
    return "look at the daemon's log: journalctl -u kvtierd"


def _serving(client: Client) -> Finding:
    started_s = time.perf_counter()
    is_serving = client.serving()
    took_ms = 1e3 * (time.perf_counter() - started_s)
    if is_serving:
        return Finding("ok", "serving", f"yes, an answer takes {took_ms:.1f} ms")
    return Finding(
        "bad", "serving", "it answers, and that it does not serve", "kvtier-ctl health says why"
    )


def _version_there(stats: Any) -> Finding:
    from kvtier import __version__

    up_s = stats.uptime_ns / 1e9
    text = f"kvtierd {stats.version}, up {_duration(up_s)}"
    if stats.version == __version__:
        return Finding("ok", "version", text)
    return Finding(
        "warn",
        "version",
        f"{text}; this package is {__version__}",
        f"they talk as long as both speak API version {API_VERSION}; update the older one",
    )


def _tiers(stats: Any) -> Iterator[Finding]:
    for tier in stats.tiers:
        name = f"L{tier.tier}"
        if tier.health == _TIER_OFF:
            yield Finding("ok", name, "off")
            continue
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        text = (
            f"{_size(tier.used_bytes)} of {_size(tier.capacity_bytes)} used ({share:.0%}), "
            f"{tier.copies} copies"
        )
        if tier.health == _TIER_OUT:
            why = f": {tier.detail}" if tier.detail else ""
            yield Finding(
                "warn", name, f"out of service{why}; {text}", "kvtier-ctl stats, and its log"
            )
        elif tier.errors:
            yield Finding("warn", name, f"{text}, {tier.errors} errors", "kvtier-ctl stats")
        else:
            yield Finding("ok", name, text)


def gpu_name(gpu: Any) -> str:
    """ "GPU 3 NVIDIA H200". One that nobody has is known by its UUID alone; the reason says it."""
    if gpu.index == _GPU_INDEX_NONE:
        return "GPU"
    return f"GPU {gpu.index} {gpu.name}".rstrip()


def _gpus(stats: Any) -> Iterator[Finding]:
    """L1 that is to be on GPUs, where something keeps it from that; nothing otherwise."""
    remedy = "kvtier-ctl doctor on the node says what to do; L2 and L3 serve"
    if stats.l1.why:
        yield Finding("warn", "L1", f"off: {stats.l1.why}", remedy)
    for gpu in stats.gpus:
        if gpu.state in _GPU_STATES:
            text = f"{gpu_name(gpu)} {_GPU_STATES[gpu.state]}: {gpu.why}"
            yield Finding("warn", "GPU", text, remedy)


def _devices(stats: Any) -> Iterator[Finding]:
    for device in stats.devices:
        if device.health in _DEVICE_STATES:
            state = _DEVICE_STATES[device.health]
            yield Finding("warn", "device", f"{device.path} {state}", "kvtier-ctl doctor")
        if device.index.state in _INDEX_STATES:
            yield Finding(
                "warn",
                "device",
                f"the index of {device.path} {_INDEX_STATES[device.index.state]}",
                "until it is there, blocks of this device are misses",
            )


def _index(stats: Any) -> Finding:
    share = stats.index_used_bytes / max(1, stats.index_memory_bytes)
    text = (
        f"{_size(stats.index_used_bytes)} of {_size(stats.index_memory_bytes)} ({share:.0%}), "
        f"{stats.blocks} blocks"
    )
    if share > _NEARLY_FULL:
        return Finding(
            "warn", "index", text, "blocks are evicted to make room in it: raise index.memory"
        )
    return Finding("ok", "index", text)


def _engines(stats: Any) -> Finding:
    if not stats.engines:
        return Finding("ok", "engines", "none is attached")
    names = []
    for one in stats.engines:
        rate = one.hit_tokens / one.lookup_tokens if one.lookup_tokens else 0.0
        names.append(
            f"{one.name or one.engine_id.hex()[:8]} ({one.sessions} sessions, "
            f"{one.lookup_tokens} tokens looked up, {rate:.0%} hit)"
        )
    return Finding("ok", "engines", "; ".join(names))


# ---- the self-test -------------------------------------------------------------------------------


def _self_test(client: Client, admin_socket: str) -> Iterator[Finding]:
    """Stores random blocks, finds them, and loads them into other memory."""
    name = "self-test"
    started_s = time.perf_counter()
    try:
        with Region.create(2 * _BLOCKS * _BLOCK_BYTES) as region:
            session = _attach(client, region)
            yield _session(session)
            try:
                fault = _round_trip(session, region)
            finally:
                session.close(_TIMEOUT_S)
    except errors.KvtierError as error:
        yield Finding("bad", name, str(error), _hint_of(error))
        return
    except OSError as error:
        yield Finding(
            "bad", name, f"no shared memory: {error.strerror}", "free memory, or raise the limit"
        )
        return
    took_ms = 1e3 * (time.perf_counter() - started_s)
    if fault is not None:
        yield fault
    else:
        yield Finding(
            "ok",
            name,
            f"{_size(_BLOCKS * _BLOCK_BYTES)} stored, found, loaded and compared in {took_ms:.0f} "
            "ms",
        )
    yield _clean_up(client, admin_socket)


def _attach(client: Client, region: Region) -> RankSession:
    layout = Layout(0, 1, (Piece(0, _BLOCK_BYTES, 0, _BLOCK_BYTES),))
    return client.attach(
        _SPEC,
        engine_id=os.urandom(16),
        role=Role.SCHEDULER,
        rank=0,
        regions=(region,),
        layouts=(layout,),
        name=f"kvtier doctor pid {os.getpid()}",
        wait_s=_TIMEOUT_S,
    )


def _session(session: RankSession) -> Finding:
    at = session.current
    if at is None:
        return Finding("bad", "session", str(session.last_error), "look at the daemon's log")
    return Finding(
        "ok",
        "session",
        f"API version {at.api_version}, shared memory is taken; leases up to "
        f"{_duration(at.lease_s_max)}, tickets up to {_duration(at.ticket_s_max)}",
    )


def _round_trip(session: RankSession, region: Region) -> Finding | None:
    """None, or what went wrong. Blocks 0 .. _BLOCKS - 1 of the region are stored, those after them
    are loaded into."""
    random = np.random.default_rng()
    payload = random.bytes(_BLOCKS * _BLOCK_BYTES)
    tokens = random.integers(0, 2**32, _BLOCKS * _BLOCK_TOKENS, np.uint32)
    region.memory[: len(payload)] = payload
    reserved = session.reserve(tokens, [BlockRange(0, 0, _BLOCKS)])
    if reserved.ticket is None:
        return _refused("reserved", reserved.states[0])
    op: Any = session.demote(
        [Moves(0, range(_BLOCKS), np.arange(_BLOCKS, dtype=np.uint64))], ticket=reserved.ticket
    )
    if not op.wait(2 * _TIMEOUT_S) or not op.result.all_done:
        return _failed("stored", op)
    found = session.lookup(tokens, lease_s=_TIMEOUT_S)
    if found.boundary_tokens != len(tokens) or found.lease is None:
        return _lost(found.boundary_tokens, len(tokens))
    to = np.arange(_BLOCKS, 2 * _BLOCKS, dtype=np.uint64)
    op = session.promote([Moves(0, range(_BLOCKS), to)], lease=found.lease)
    if not op.wait(2 * _TIMEOUT_S) or not op.result.all_done:
        return _failed("loaded", op)
    session.release(found.lease)
    if bytes(region.memory[len(payload) :]) != payload:
        return Finding("bad", "self-test", "other bytes came back than went in", "report it")
    return None


def _refused(verb: str, states: bytes) -> Finding:
    return Finding(
        "bad",
        "self-test",
        f"no block could be {verb} (states {list(states)})",
        "the tiers have no room that can be evicted: kvtier-ctl stats",
    )


def _failed(verb: str, op: Any) -> Finding:
    if op.result is None or op.result.error is not None:
        why = "no answer" if op.result is None else str(op.result.error)
    else:
        why = ", ".join(
            sorted({MoveResult(code).name for row in op.result.results for code in row})
        )
    return Finding(
        "bad", "self-test", f"blocks could not be {verb}: {why}", "kvtier-ctl stats, and its log"
    )


def _lost(boundary_tokens: int, tokens: int) -> Finding:
    return Finding(
        "bad",
        "self-test",
        f"of {tokens} tokens stored a moment ago {boundary_tokens} are found",
        "L2 is too small or too busy to keep them: kvtier-ctl stats",
    )


def _clean_up(client: Client, admin_socket: str) -> Finding:
    """Takes the test's blocks out again, where this user may."""
    fingerprint = client.open_namespace(_SPEC).fingerprint
    try:
        with grpc.insecure_channel("unix:" + os.path.abspath(admin_socket)) as channel:
            evict = channel.unary_unary(
                "/kvtier.v1.KvTierAdmin/Evict",
                request_serializer=pb.EvictRequest.SerializeToString,
                response_deserializer=pb.EvictAnswer.FromString,
            )
            request = pb.EvictRequest(fingerprint=fingerprint, is_whole_namespace=True)
            blocks = _wire.call(evict, request, _TIMEOUT_S).evicted_blocks
    except errors.KvtierError as error:
        return Finding(
            "ok",
            "clean-up",
            f"{_BLOCKS} test blocks stay until they are evicted: no use of {admin_socket} "
            f"({error.code}); --admin-socket names another",
        )
    return Finding("ok", "clean-up", f"{blocks} test blocks evicted")


# ---- words ---------------------------------------------------------------------------------------


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _duration(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
