"""L1 read where it is, by a process that imports the arenas of a real daemon: both on the fake CUDA
runtime. What is read is compared with what was stored."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
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
from kvtier._proto import kvtier_pb2 as pb

BLOCKS = 8

pytestmark = pytest.mark.skipif(not (gpu.PROGRAM and gpu.LIBRARY), reason=gpu.NOT_BUILT)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with gpu.serving(gpu.daemon_on_fake()) as one:
        yield one


@pytest.fixture
def arenas() -> Iterator[cuda.Arenas]:
    gpu.set_device(0)
    one = cuda.Arenas(gpu.library())
    yield one
    one.close()
    assert gpu.library().kvt_fake_engine_imports() == one.count() == 0


def leased(session: Any, blocks: int = BLOCKS, seed: int = 0) -> kvtier.Lease:
    found = session.lookup(engine.tokens(blocks, seed), lease_s=30.0)
    assert found.boundary_tokens == blocks * BLOCK_TOKENS
    lease: kvtier.Lease = found.lease
    return lease


def moves(blocks: int = BLOCKS) -> list[kvtier.Moves]:
    return [kvtier.Moves(0, range(blocks))]


def bytes_of(block: kvtier.PlacedBlock) -> gpu.Bytes:
    return gpu.view(block.address, BLOCK_BYTES)


def test_blocks_are_what_was_stored_and_stay(daemon: Daemon, arenas: cuda.Arenas) -> None:
    """Also while much more is stored than L1 holds: what is held keeps its place."""
    cache = GpuCache(64)
    with kvtier.Client(daemon.socket, timeout_s=5.0) as client:
        session = engine.attach(client, cache)
        content = engine.store(session, cache, BLOCKS)
        lease = leased(session)
        with kvtier.read_in_place(session, moves(), lease=lease, arenas=arenas) as reading:
            placed = reading.blocks(0)
            assert [block.block_idx for block in placed] == list(range(BLOCKS))
            assert len({block.offset_bytes for block in placed}) == BLOCKS
            for seed in range(1, 80):
                engine.store(session, cache, 64, seed)
            for block in placed:
                assert np.array_equal(bytes_of(block), content[block.block_idx])
            assert reading.confirm()
            assert not reading.is_void
            assert client.stats().leases == 1
        wait_until(lambda: client.stats().leases == 0)
        assert arenas.count() == 1  # kept for the next reading, until the session ends
    wait_until(lambda: arenas.count() == 0)
    cache.free()


def test_lease_is_given_back_whatever_happens(daemon: Daemon, arenas: cuda.Arenas) -> None:
    cache = GpuCache(16)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, BLOCKS)
        with (
            pytest.raises(ZeroDivisionError),
            kvtier.read_in_place(session, moves(), lease=leased(session), arenas=arenas),
        ):
            raise ZeroDivisionError
        wait_until(lambda: client.stats().leases == 0)
        with (
            pytest.raises(kvtier.InvalidArgument),
            kvtier.read_in_place(session, moves(BLOCKS + 1), lease=leased(session), arenas=arenas),
        ):
            raise AssertionError("there is nothing to read")
        wait_until(lambda: client.stats().leases == 0)
        lease = leased(session)
        session.release(lease)
        with kvtier.read_in_place(session, moves(), lease=lease, arenas=arenas) as reading:
            assert reading.blocks(0) == []  # a miss, which is no error
            assert set(reading.outcome.results[0]) == {kvtier.MoveResult.ABORTED}
    cache.free()


def test_scheduler_gives_back_what_workers_hold(daemon: Daemon, arenas: cuda.Arenas) -> None:
    """A worker's end is its rank's only; the lease, and what is held under it, ends with the last
    rank, or with the scheduler, which has to insist: it does not know what workers did."""
    cache = GpuCache(16)
    spec = engine.spec(ranks=2)
    with kvtier.Client(daemon.socket) as client:
        engine_id = os.urandom(16)
        caches = {"engine_id": engine_id, "spec": spec, "role": kvtier.Role.WORKER}
        scheduler = engine.attach(client, engine_id=engine_id, spec=spec, rank=-1)
        workers = [engine.attach(client, cache, rank=rank, **caches) for rank in range(2)]
        wants = [kvtier.BlockRange(0, 0, BLOCKS)]
        ticket = scheduler.reserve(engine.tokens(BLOCKS), wants).ticket
        contents: list[gpu.Bytes] = []
        for worker in workers:
            contents.append(cache.fill(0, BLOCKS, len(contents)))
            stored = [kvtier.Moves(0, range(BLOCKS), engine.ids(0, BLOCKS))]
            op = worker.demote(stored, ticket=ticket.handle)
            assert op.wait(WAIT_S)
            assert op.result.all_done
        for insists in (False, True):
            lease = leased(scheduler).handle
            for worker, content in list(zip(workers, contents, strict=True))[: 1 + (not insists)]:
                with kvtier.read_in_place(worker, moves(), lease=lease, arenas=arenas) as reading:
                    for block in reading.blocks(0):
                        assert np.array_equal(bytes_of(block), content[block.block_idx])
                    assert reading.confirm()
            if insists:
                time.sleep(0.2)
                assert client.stats().leases == 1
                scheduler.release(lease, surely=True)
            wait_until(lambda: client.stats().leases == 0)
    cache.free()


def test_it_does_not_end_by_time(daemon: Daemon, arenas: cuda.Arenas) -> None:
    cache = GpuCache(16)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, BLOCKS)
        found = session.lookup(engine.tokens(BLOCKS), lease_s=0.2)
        with kvtier.read_in_place(session, moves(), lease=found.lease, arenas=arenas):
            other = session.lookup(engine.tokens(BLOCKS), lease_s=0.2)
            assert client.stats().leases == 2
            wait_until(lambda: client.stats().leases == 1)
            time.sleep(0.5)
            assert client.stats().leases == 1
            session.release(other.lease)
        wait_until(lambda: client.stats().leases == 0)
    cache.free()


def test_release_is_asked_for_until_it_is_answered(daemon: Daemon, arenas: cuda.Arenas) -> None:
    """A daemon that stands still meanwhile would else hold the blocks as long as the engine is."""
    cache = GpuCache(16)
    with kvtier.Client(daemon.socket, timeout_s=0.3) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, BLOCKS)
        with kvtier.read_in_place(session, moves(), lease=leased(session), arenas=arenas):
            daemon.stop()
        try:
            wait_until(lambda: session.release_errors > 0)
        finally:
            daemon.go_on()
        wait_until(lambda: client.stats(timeout_s=5.0).leases == 0)
        assert session.attached
    cache.free()


def test_daemon_that_dies_under_a_reader(daemon: Daemon, arenas: cuda.Arenas) -> None:
    """What is mapped stays mapped until the reader has gone, and no longer."""
    cache = GpuCache(16)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        content = engine.store(session, cache, BLOCKS)
        with kvtier.read_in_place(session, moves(), lease=leased(session), arenas=arenas) as read:
            placed = read.blocks(0)
            daemon.kill()
            wait_until(lambda: read.is_void)
            assert not read.confirm()
            assert arenas.count() == 1
            assert np.array_equal(bytes_of(placed[3]), content[3])  # no fault; but for nothing
        wait_until(lambda: arenas.count() == 0)
        daemon.start()
        wait_until(lambda: session.attached)
        content = engine.store(session, cache, BLOCKS, 1)
        lease = leased(session, seed=1)
        with kvtier.read_in_place(session, moves(), lease=lease, arenas=arenas) as read:
            assert np.array_equal(bytes_of(read.blocks(0)[2]), content[2])
    wait_until(lambda: arenas.count() == 0)
    cache.free()


def try_store(session: Any, cache: GpuCache, seed: int) -> Any:
    """What was stored, or None: the GPU was lost in the middle of it."""
    try:
        return engine.store(session, cache, BLOCKS, seed)
    except (kvtier.KvtierError, AssertionError):
        time.sleep(0.01)
        return None


def read_until_lost(
    reading: kvtier.Reading, content: Any, traffic: Callable[[], object], until_s: float
) -> int:
    """How often it was read and confirmed. Nothing wrong is ever confirmed."""
    confirmed = 0
    while time.monotonic() < until_s:
        placed = reading.blocks(0)
        is_right = all(np.array_equal(bytes_of(b), content[b.block_idx]) for b in placed)
        if not reading.confirm(timeout_s=WAIT_S):
            return confirmed
        assert is_right, "bytes that were confirmed are wrong"
        confirmed += len(placed) > 0
        traffic()
    raise AssertionError("no GPU was lost")


def lost_notice(notices: list[Any]) -> Any:
    return next((n for n in notices if n.kind == pb.Notice.REGIONS_LOST), None)


@pytest.mark.parametrize("is_notice_late", [False, True])
def test_gpu_that_is_lost_under_readers(arenas: cuda.Arenas, is_notice_late: bool) -> None:
    """A reader without memory on a GPU hears of it, too, and stays attached. What it was told to be
    good is right, also when the notice comes after all else, and no import of an arena that was
    lost stays open."""
    late: list[Any] = []
    cache = GpuCache(16)
    one = gpu.daemon_on_fake(fake="lose_every=1500,late=1")
    seeds = itertools.count(1)
    confirmed = losses = 0
    until_s = time.monotonic() + 60.0
    try:
        one.start()
        with kvtier.Client(one.socket, timeout_s=5.0) as client:
            writer = engine.attach(client, cache)
            reader = engine.attach(client, rank=0)
            hear = reader.on_notice
            if is_notice_late:
                reader.on_notice = late.append
            while losses < 3 or confirmed < 20:
                assert time.monotonic() < until_s, (confirmed, losses)
                seed = next(seeds)
                content = try_store(writer, cache, seed)
                found = reader.lookup(engine.tokens(BLOCKS, seed), lease_s=30.0)
                if content is None or found.lease is None:
                    continue
                blocks = found.boundary_tokens // BLOCK_TOKENS
                with kvtier.read_in_place(
                    reader, moves(blocks), lease=found.lease, arenas=arenas
                ) as reading:
                    if reading.blocks(0):
                        confirmed += read_until_lost(
                            reading,
                            content,
                            lambda: try_store(writer, cache, next(seeds)),
                            until_s,
                        )
                        if is_notice_late:
                            assert not reading.is_void
                            wait_until(lambda: lost_notice(late) is not None)
                            hear(lost_notice(late))
                            late.clear()
                        wait_until(lambda: reading.is_void)
                        losses += 1
            print(f"{next(seeds)} stores, {confirmed} times confirmed, {losses} losses")
            assert reader.generation == 1
            assert reader.voids >= losses
        assert one.terminate() == 0, one.log()
    finally:
        one.close()
    wait_until(lambda: arenas.count() == 0)
    cache.free()


def test_daemon_that_does_not_export(arenas: cuda.Arenas) -> None:
    cache = GpuCache(16)
    with (
        gpu.serving(gpu.daemon_on_fake("tiers.l1.export=false")) as one,
        kvtier.Client(one.socket) as client,
    ):
        session = engine.attach(client, cache)
        engine.store(session, cache, BLOCKS)
        with (
            pytest.raises(kvtier.FailedPrecondition, match=r"tiers\.l1\.export"),
            kvtier.read_in_place(session, moves(), lease=leased(session), arenas=arenas),
        ):
            raise AssertionError("there is nothing to read")
        wait_until(lambda: client.stats().leases == 0)
    cache.free()


def test_import_that_cannot_be_exported_again(daemon: Daemon, arenas: cuda.Arenas) -> None:
    """It has no handle, as memory of torch's expandable segments: the error says where to look."""
    cache = GpuCache(16)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, BLOCKS)
        lease = leased(session)
        with kvtier.read_in_place(session, moves(), lease=lease, arenas=arenas) as read:
            address = read.blocks(0)[0].address
            with pytest.raises(cuda.CudaError, match="expandable segments"):
                cuda.export(address, BLOCK_BYTES, driver=gpu.library())
    cache.free()


def test_arguments_that_exclude_each_other(daemon: Daemon) -> None:
    cache = GpuCache(16)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        with pytest.raises(kvtier.InvalidArgument, match="copied nowhere"):
            session.promote(moves(), lease=b"l" * 24, in_place=True, inline=True)
        op = session.promote(moves(), lease=b"l" * 24, in_place=True)
        assert op.wait(WAIT_S)
        assert isinstance(op.result.error, kvtier.KvtierError)
    cache.free()
