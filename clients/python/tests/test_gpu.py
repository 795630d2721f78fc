"""Memory of a GPU that a real daemon opens, reads and writes: on the fake CUDA runtime, whose GPU
memory is shared between the two processes. Every byte that comes back is compared with what was
written before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import engine
import gpu
import kvtier
from daemon import Daemon
from engine import BLOCK_BYTES, BLOCK_TOKENS, WAIT_S, wait_until
from gpu import GpuCache
from kvtier import cuda

BLOCKS = 16

pytestmark = pytest.mark.skipif(not (gpu.PROGRAM and gpu.LIBRARY), reason=gpu.NOT_BUILT)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with gpu.serving(gpu.daemon_on_fake()) as one:
        yield one


def load(session: Any, cache: GpuCache, seed: int = 0) -> kvtier.Outcome:
    """Promotes a stored prompt into the second half of the cache, which is wiped before."""
    cache.blocks[BLOCKS:] = 0
    found = session.lookup(engine.tokens(BLOCKS, seed), lease_s=30.0)
    assert found.boundary_tokens == BLOCKS * BLOCK_TOKENS
    with kvtier.held(session, found.lease):
        moves = [kvtier.Moves(0, range(BLOCKS), engine.ids(BLOCKS, BLOCKS))]
        op = session.promote(moves, lease=found.lease)
        assert op.wait(WAIT_S)
    outcome: kvtier.Outcome = op.result
    return outcome


def round_trip(session: Any, cache: GpuCache, seed: int = 0) -> None:
    content = engine.store(session, cache, BLOCKS, seed)
    outcome = load(session, cache, seed)
    assert outcome.all_done, outcome
    assert np.array_equal(cache.blocks[BLOCKS:], content)


def test_stored_and_loaded_on_each_gpu(daemon: Daemon) -> None:
    """Two engines with memory on different GPUs; each loads what the other one stored."""
    caches = [GpuCache(2 * BLOCKS, device=device) for device in range(gpu.DEVICES)]
    assert caches[0].lent != caches[1].lent
    with kvtier.Client(daemon.socket) as client:
        sessions = [engine.attach(client, cache) for cache in caches]
        for seed, (session, cache) in enumerate(zip(sessions, caches, strict=True)):
            round_trip(session, cache, seed)
        for seed in range(2):
            outcome = load(sessions[1 - seed], caches[1 - seed], seed)
            assert outcome.all_done
            assert np.array_equal(caches[1 - seed].blocks[BLOCKS:], caches[seed].blocks[:BLOCKS])
        stats = client.stats()
        assert all(sum(p.transfers for p in g.paths) > 0 for g in stats.gpus), stats.gpus
    for cache in caches:
        cache.free()


def test_what_is_left_alone_stays(daemon: Daemon) -> None:
    cache = GpuCache(2 * BLOCKS)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        content = engine.store(session, cache, 4)
        cache.blocks[4:] = 0x55
        found = session.lookup(engine.tokens(4), lease_s=30.0)
        ids = [9, kvtier.NO_BLOCK, 7, kvtier.NO_BLOCK]
        op = session.promote([kvtier.Moves(0, range(4), ids)], lease=found.lease)
        assert op.wait(WAIT_S)
        assert op.result.all_done
        assert np.array_equal(cache.blocks[9], content[0])
        assert np.array_equal(cache.blocks[7], content[2])
        others = [b for b in range(4, 2 * BLOCKS) if b not in (7, 9)]
        assert np.all(cache.blocks[others] == 0x55)
    cache.free()


def test_two_allocations_one_after_the_other(daemon: Daemon) -> None:
    """An engine that allocates anew attaches anew, with another handle."""
    with kvtier.Client(daemon.socket) as client:
        lent = []
        for seed in range(2):
            cache = GpuCache(2 * BLOCKS)
            lent.append(cache.lent)
            session = engine.attach(client, cache)
            round_trip(session, cache, seed)
            session.close()
            cache.free()
        assert lent[0].handle != lent[1].handle


def test_daemon_that_restarts(daemon: Daemon) -> None:
    cache = GpuCache(2 * BLOCKS)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        round_trip(session, cache)
        daemon.kill()
        wait_until(lambda: not session.attached)
        daemon.start()
        wait_until(lambda: session.attached)
        assert session.generation == 2
        assert session.lookup(engine.tokens(BLOCKS)).boundary_tokens == 0
        round_trip(session, cache)
    cache.free()


def test_gpu_that_is_lost_again_and_again() -> None:
    """The session hears of it and attaches again; what is loaded is right, or it is not there."""
    cache = GpuCache(2 * BLOCKS)
    one = gpu.daemon_on_fake(fake="lose_every=1500,late=1")
    right = seed = 0
    contents: dict[int, Any] = {}
    try:
        one.start()
        with kvtier.Client(one.socket, timeout_s=5.0) as client:
            session = engine.attach(client, cache)
            until_s = time.monotonic() + 60.0
            while session.generation < 4 or right == 0:
                assert time.monotonic() < until_s, (session.generation, right)
                seed += 1
                right += try_round(session, cache, seed % 5, contents)
            assert session.voids >= 3
            assert sum(g.losses for g in client.stats().gpus) >= 3
            print(f"{seed} rounds, {right} right loads, {session.generation} generations")
        assert one.terminate() == 0, one.log()
    finally:
        one.close()
    cache.free()


def try_round(session: Any, cache: GpuCache, seed: int, contents: dict[int, Any]) -> bool:
    """Stores and loads if the daemon lets it; the load was right. A wrong byte ends the test."""
    tokens = engine.tokens(BLOCKS, seed)
    try:
        reserved = session.reserve(tokens, [kvtier.BlockRange(0, 0, BLOCKS)])
        if reserved.ticket is not None:
            contents[seed] = cache.fill(0, BLOCKS, seed)
            moves = [kvtier.Moves(0, range(BLOCKS), engine.ids(0, BLOCKS))]
            op = session.demote(moves, ticket=reserved.ticket)
            assert op.wait(WAIT_S)
            session.release(reserved.ticket)
        found = session.lookup(tokens, lease_s=30.0)
        blocks = found.boundary_tokens // BLOCK_TOKENS
        if blocks == 0:
            return False
        cache.blocks[BLOCKS:] = 0
        with kvtier.held(session, found.lease):
            moves = [kvtier.Moves(0, range(blocks), engine.ids(BLOCKS, blocks))]
            op = session.promote(moves, lease=found.lease)
            assert op.wait(WAIT_S)
    except kvtier.KvtierError:
        return False
    done = [i for i, r in enumerate(b"".join(op.result.results)) if r == kvtier.MoveResult.DONE]
    for i in done:
        assert np.array_equal(cache.blocks[BLOCKS + i], contents[seed][i]), (seed, i)
    return len(done) > 0


# ---- regions that cannot be ----------------------------------------------------------------------


def test_region_that_the_daemon_refuses(daemon: Daemon) -> None:
    cache = GpuCache(2 * BLOCKS)
    bad = {
        "of no GPU here": (replace(cache.lent, device_uuid=b"u" * 16), kvtier.FailedPrecondition),
        "no handle": (replace(cache.lent, handle=bytes(64)), kvtier.InvalidArgument),
        "beyond its allocation": (
            replace(cache.lent, offset_bytes=cache.lent.offset_bytes + 513),
            kvtier.InvalidArgument,
        ),
    }
    with kvtier.Client(daemon.socket) as client:
        for region, error in bad.values():
            with pytest.raises(error):
                engine.attach(client, cache, regions=(region,), wait_s=1.0)
        round_trip(engine.attach(client, cache), cache)
    cache.free()


def test_numbers_that_no_region_has() -> None:
    for offset, size in ((-1, 1), (0, 0), (2**62, 2**62)):
        with pytest.raises(ValueError, match="cannot be"):
            kvtier.CudaIpcRegion(b"h" * 64, offset, size, b"u" * 16)


# ---- exporting -----------------------------------------------------------------------------------


def test_region_within_its_allocation() -> None:
    allocation = gpu.Allocation(3 * gpu.MIB, device=1)
    gpu.set_device(0)  # the current device is not what counts
    region = cuda.export(allocation.address + 4096, 8192, owner=allocation, driver=gpu.library())
    assert (region.offset_bytes, region.bytes) == (4096, 8192)
    assert region.owner is allocation
    assert region.device_uuid == cuda.device_uuid(gpu.library(), 1)
    assert region.device_uuid != cuda.device_uuid(gpu.library(), 0)
    with pytest.raises(cuda.CudaError, match="ends after 4096"):
        cuda.export(allocation.address + allocation.bytes - 4096, 4097, driver=gpu.library())
    allocation.free()
    with pytest.raises(cuda.CudaError, match="cuMemGetAddressRange"):
        cuda.export(allocation.address, 4096, driver=gpu.library())


def test_thread_without_a_device_cannot_export() -> None:
    allocation = gpu.Allocation(gpu.MIB)
    said: list[str] = []

    def run() -> None:
        try:
            cuda.export(allocation.address, 4096, driver=gpu.library())
        except cuda.CudaError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "set its device first" in said[0]
    allocation.free()


def test_driver_that_lacks_a_call() -> None:
    """Such as the stub that programs are linked with."""
    assert cuda.load_driver(gpu.LIBRARY) is not None
    with pytest.raises(cuda.CudaError, match=r"has no cuCtxGetCurrent: the driver is too old"):
        cuda.load_driver("libc.so.6")


def test_no_driver() -> None:
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has a driver")
    with pytest.raises(cuda.CudaError, match=r"libcuda\.so\.1"):
        cuda.export(1 << 40, BLOCK_BYTES)
