"""Every call against a real daemon, and what each refuses."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import daemon as daemons
import engine
import kvtier
from daemon import Daemon
from engine import BLOCK_BYTES, BLOCK_TOKENS, WAIT_S, Cache, wait_until
from kvtier.client import _check_quantised


def test_nothing_is_opened_before_the_first_call() -> None:
    client = kvtier.Client("/nowhere/kvtierd.sock")
    assert not client.serving()
    with pytest.raises(kvtier.Unavailable):
        client.stats()
    client.close()
    client.close()


def test_socket_path_that_cannot_be() -> None:
    with pytest.raises(kvtier.InvalidArgument, match="longer than"):
        kvtier.Client("/tmp/" + "x" * 100)


def test_attach_without_a_daemon_says_why() -> None:
    with kvtier.Client("/nowhere/kvtierd.sock") as client:
        with pytest.raises(kvtier.Unavailable, match=r"no daemon at /nowhere/kvtierd\.sock"):
            engine.attach(client, wait_s=0.3)
        session = engine.attach(client, wait_s=None)
        assert not session.attached
        assert session.generation == 0
        with pytest.raises(kvtier.NotAttached):
            session.lookup(engine.tokens(1))
        session.release(b"l" * 24)


def test_stats_serving_and_namespaces(daemon: Daemon) -> None:
    with kvtier.Client(daemon.socket) as client:
        assert client.serving()
        assert client.stats().version == kvtier.__version__
        first = client.open_namespace(engine.spec())
        again = client.open_namespace(engine.spec())
        other = client.open_namespace(engine.spec("other"))
        assert (first.was_known, again.was_known, other.was_known) == (False, True, False)
        assert first.fingerprint == again.fingerprint != other.fingerprint
        with pytest.raises(kvtier.InvalidArgument, match="block_tokens"):
            client.open_namespace(kvtier.ModelSpec(0, 1, engine.spec().components, "m"))


def test_round_trip_through_a_region(daemon: Daemon) -> None:
    cache = Cache(32)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        assert session.daemon_pid == daemon.pid
        assert session.generation == 1
        content = engine.store(session, cache, 8)
        found = session.lookup(engine.tokens(8), lease_s=30.0, why=True)
        assert found.boundary_tokens == found.path_tokens == 8 * BLOCK_TOKENS
        assert found.components[0].blocks_at == (0, 8, 0)
        assert found.lease.lifetime_s == pytest.approx(30.0)
        # A list of blocks, in an order of the engine's own.
        moves = [kvtier.Moves(0, [1, 4, 6], [29, 9, 31])]
        op = session.promote(moves, lease=found.lease)
        assert op.wait(WAIT_S)
        assert op.finished()
        assert op.result.all_done
        assert op.result.moved_bytes == 3 * BLOCK_BYTES
        assert op.result.moved_blocks_from == (0, 3, 0)
        for block, at in ((1, 29), (4, 9), (6, 31)):
            assert np.array_equal(cache.blocks[at], content[block])
        session.release(found.lease)
        wait_until(lambda: client.stats().leases == 0)
        assert session.release_errors == 0


def test_no_block_is_not_written(daemon: Daemon) -> None:
    cache = Cache(8)
    layouts = (kvtier.Layout(0, 2, (kvtier.Piece(0, BLOCK_BYTES // 2, 0, BLOCK_BYTES),)),)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache, layouts=layouts)
        half = BLOCK_BYTES // 2
        content = cache.fill(0, 2)
        op = session.demote([kvtier.Moves(0, [0], [0, 1])], tokens=engine.tokens(1))
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        cache.blocks[4:] = 0
        lease = session.lookup(engine.tokens(1), lease_s=0).lease
        op = session.promote([kvtier.Moves(0, [0], [kvtier.NO_BLOCK, 5])], lease=lease)
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        assert np.array_equal(cache.blocks[5, :half], content[1, :half])
        assert not cache.blocks[4].any()
        assert not cache.blocks[6:].any()


def test_cursor_continues_a_prompt(daemon: Daemon) -> None:
    cache = Cache(32)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, 8)
        prompt = engine.tokens(8)
        first = session.lookup(prompt[: 5 * BLOCK_TOKENS])
        assert first.cursor.tokens == 5 * BLOCK_TOKENS
        rest = session.lookup(prompt[first.cursor.tokens :], cursor=first.cursor)
        assert rest.boundary_tokens == 8 * BLOCK_TOKENS
        assert rest.cursor.tokens == 8 * BLOCK_TOKENS
        limited = session.lookup(
            prompt[first.cursor.tokens :],
            cursor=first.cursor,
            limit_tokens=8 * BLOCK_TOKENS - 1,
        )
        assert limited.boundary_tokens == 7 * BLOCK_TOKENS


def test_extra_keys_salt_and_lora_are_part_of_a_prompt(daemon: Daemon) -> None:
    cache = Cache(8)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        who: dict[str, Any] = {"salt": b"s", "lora": b"l", "extra_keys": [(1, b"k" * 32)]}
        cache.fill(0, 2)
        op = session.demote(
            [kvtier.Moves(0, range(2), engine.ids(0, 2))], tokens=engine.tokens(2), **who
        )
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        changes: dict[str, dict[str, Any]] = {
            "same": {},
            "salt": {"salt": b"t"},
            "lora": {"lora": b""},
            "key": {"extra_keys": [(1, b"q" * 32)]},
        }
        found = {
            name: session.lookup(engine.tokens(2), **(who | change)).boundary_tokens
            for name, change in changes.items()
        }
        assert found == {"same": 2 * BLOCK_TOKENS, "salt": 0, "lora": 0, "key": BLOCK_TOKENS}


def test_inline(daemon: Daemon) -> None:
    payload = os.urandom(2 * BLOCK_BYTES)
    layouts = (kvtier.Layout(0, 1, (kvtier.Piece(0, BLOCK_BYTES, 0, BLOCK_BYTES),)),)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, regions=(kvtier.InlineRegion(),), layouts=layouts)
        moves = [kvtier.Moves(0, range(2))]
        op = session.demote(moves, tokens=engine.tokens(2), inline_data=payload)
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        lease = session.lookup(engine.tokens(2), lease_s=0).lease
        op = session.promote(moves, lease=lease, inline=True)
        assert op.wait(WAIT_S)
        assert op.result.inline_data == payload


def test_progress_of_layer_groups(daemon: Daemon) -> None:
    pieces = tuple(kvtier.Piece(0, BLOCK_BYTES // 4, i * 1024, BLOCK_BYTES) for i in range(4))
    cache = Cache(16)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache, layouts=(kvtier.Layout(0, 1, pieces),))
        content = engine.store(session, cache, 8)
        lease = session.lookup(engine.tokens(8), lease_s=0).lease
        seen: list[tuple[int, int]] = []
        op = session.promote(
            [kvtier.Moves(0, range(8), engine.ids(8, 8))],
            lease=lease,
            layer_groups=4,
            on_progress=lambda group, groups: seen.append((group, groups)),
        )
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        assert np.array_equal(cache.blocks[8:], content)
        # Progress may be merged: a group implies those before it.
        assert seen == sorted(seen)
        assert all(groups == 4 for _, groups in seen)


def test_durable_without_l3_is_not_durable(daemon: Daemon) -> None:
    cache = Cache(8)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        cache.fill(0, 1)
        op = session.demote(
            [kvtier.Moves(0, [0], [0])], tokens=engine.tokens(1), durable=True, timeout_s=5.0
        )
        assert op.wait(WAIT_S)
        assert not op.result.is_durable


def test_errors_name_the_field(daemon: Daemon) -> None:
    cache = Cache(8)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        with pytest.raises(kvtier.InvalidArgument, match="tokens"):
            session.lookup(b"12345")
        with pytest.raises(kvtier.InvalidArgument, match="2\\^32"):
            session.lookup([-1])
        with pytest.raises(kvtier.InvalidArgument, match="integers"):
            session.lookup([1.5])
        with pytest.raises(kvtier.InvalidArgument, match="ticket or tokens"):
            session.demote([])
        with pytest.raises(kvtier.InvalidArgument, match="engine_id"):
            engine.attach(client, engine_id=b"short")
        with pytest.raises(kvtier.InvalidArgument, match="component"):
            session.reserve(engine.tokens(1), [kvtier.BlockRange(5, 0, 1)])
        op = session.demote([kvtier.Moves(0, [0], [8])], tokens=engine.tokens(1))
        assert op.wait(WAIT_S)
        assert isinstance(op.result.error, kvtier.InvalidArgument)
        op = session.promote([kvtier.Moves(0, [0], [0])], lease=b"l" * 24)
        assert op.wait(WAIT_S)
        assert isinstance(op.result.error, kvtier.KvtierError)


def test_an_attach_that_can_never_work_says_so(daemon: Daemon) -> None:
    with kvtier.Client(daemon.socket) as client:
        started_s = time.monotonic()
        with pytest.raises(kvtier.InvalidArgument, match="rank 3"):
            engine.attach(client, rank=3, wait_s=WAIT_S)
        assert time.monotonic() - started_s < WAIT_S / 2, "to wait is of no use"
        gpu = kvtier.CudaIpcRegion(b"h" * 64, 0, BLOCK_BYTES, b"u" * 16)
        with pytest.raises(kvtier.FailedPrecondition, match=r"(?i)cuda"):
            engine.attach(client, regions=(gpu,), wait_s=1.0)


def test_done_callbacks_run_once(daemon: Daemon) -> None:
    cache = Cache(8)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        op = session.demote([kvtier.Moves(0, [0], [0])], tokens=engine.tokens(1))
        seen: list[kvtier.Op] = []
        both = threading.Barrier(2)

        def early(of: kvtier.Op) -> None:
            seen.append(of)
            raise ValueError("a callback's fault is its own")

        op.add_done_callback(early)
        assert op.wait(WAIT_S)

        def late(of: kvtier.Op) -> None:
            seen.append(of)
            both.wait(WAIT_S)

        op.add_done_callback(late)
        both.wait(WAIT_S)
        assert seen == [op, op]


@pytest.mark.skipif(not daemons.PROGRAM, reason=daemons.NO_PROGRAM)
def test_lease_beyond_the_limit_is_shorter_and_says_so() -> None:
    fit = (1 << 20) // BLOCK_BYTES
    cache = Cache(fit + 64)
    one = Daemon("limits.leased_bytes_per_engine=1MiB")
    try:
        one.start()
        with kvtier.Client(one.socket) as client:
            session = engine.attach(client, cache)
            engine.store(session, cache, fit + 64)
            found = session.lookup(engine.tokens(fit + 64))
            assert (found.boundary_tokens, found.is_lease_limited) == (
                (fit + 64) * BLOCK_TOKENS,
                False,
            )
            found = session.lookup(engine.tokens(fit + 64), lease_s=30.0)
            assert (found.boundary_tokens, found.is_lease_limited) == (fit * BLOCK_TOKENS, True)
            session.release(found.lease)
            wait_until(lambda: client.stats().leases == 0)
            found = session.lookup(engine.tokens(fit + 64), lease_s=30.0, limit_tokens=160)
            assert (found.boundary_tokens, found.is_lease_limited) == (160, False)
    finally:
        one.close()


def test_two_ranks_share_a_lease_and_a_ticket(daemon: Daemon) -> None:
    caches = [Cache(16), Cache(16)]
    engine_id = os.urandom(16)
    with kvtier.Client(daemon.socket) as client:
        common: dict[str, Any] = {"spec": engine.spec(ranks=2), "engine_id": engine_id}
        scheduler = engine.attach(client, rank=-1, **common)
        workers = [
            engine.attach(client, cache, role=kvtier.Role.WORKER, rank=rank, **common)
            for rank, cache in enumerate(caches)
        ]
        contents = [cache.fill(0, 4, seed=rank) for rank, cache in enumerate(caches)]
        reserved = scheduler.reserve(engine.tokens(4), [kvtier.BlockRange(0, 0, 4)])
        stores = [kvtier.Moves(0, range(4), engine.ids(0, 4))]
        ops = [workers[0].demote(stores, ticket=reserved.ticket.handle)]
        assert ops[0].wait(WAIT_S)
        assert scheduler.lookup(engine.tokens(4)).boundary_tokens == 0, "half a copy was served"
        ops.append(workers[1].demote(stores, ticket=reserved.ticket.handle))
        assert all(op.wait(WAIT_S) and op.result.all_done for op in ops)
        found = scheduler.lookup(engine.tokens(4), lease_s=0)
        assert found.boundary_tokens == 4 * BLOCK_TOKENS
        loads = [kvtier.Moves(0, range(4), engine.ids(8, 4))]
        ops = [worker.promote(loads, lease=found.lease.handle) for worker in workers]
        assert all(op.wait(WAIT_S) and op.result.all_done for op in ops)
        for cache, content in zip(caches, contents, strict=True):
            assert np.array_equal(cache.blocks[8:12], content)


def test_threads_share_a_session(daemon: Daemon) -> None:
    threads_count, blocks = 8, 4
    cache = Cache(threads_count * blocks)
    with kvtier.Client(daemon.socket, timeout_s=WAIT_S) as client:
        session = engine.attach(client, cache)
        faults: list[str] = []

        def work(number: int) -> None:
            try:
                mine = engine.ids(number * blocks, blocks)
                content = cache.fill(number * blocks, blocks, seed=number)
                prompt = engine.tokens(blocks, seed=number)
                for _ in range(5):
                    op = session.demote([kvtier.Moves(0, range(blocks), mine)], tokens=prompt)
                    assert op.wait(WAIT_S)
                    assert op.result.all_done, op.result
                    cache.blocks[mine] = 0
                    lease = session.lookup(prompt, lease_s=0).lease
                    op = session.promote([kvtier.Moves(0, range(blocks), mine)], lease=lease)
                    assert op.wait(WAIT_S)
                    assert op.result.all_done, op.result
                    assert np.array_equal(cache.blocks[mine], content)
                    session.release(lease)
            except AssertionError as error:
                faults.append(f"{number}: {error}")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert faults == []
        wait_until(lambda: client.stats().leases == 0)


def test_held_gives_back(daemon: Daemon) -> None:
    cache = Cache(8)
    with kvtier.Client(daemon.socket) as client:
        session = engine.attach(client, cache)
        engine.store(session, cache, 2)
        found = session.lookup(engine.tokens(2), lease_s=60)
        with kvtier.held(session, found.lease) as lease:
            op = session.promote([kvtier.Moves(0, range(2), engine.ids(4, 2))], lease=lease)
            assert op.wait(WAIT_S)
            assert op.result.all_done
            assert client.stats().leases == 1
        wait_until(lambda: client.stats().leases == 0)


def test_close_gives_everything_up(daemon: Daemon) -> None:
    cache = Cache(8)
    with kvtier.Client(daemon.socket) as watcher, kvtier.Client(daemon.socket) as client:
        changes: list[bool] = []
        session = engine.attach(client, cache, on_change=changes.append)
        engine.store(session, cache, 4)
        assert session.lookup(engine.tokens(4), lease_s=60).lease is not None
        assert session.reserve(engine.tokens(4, 1), [kvtier.BlockRange(0, 0, 4)]).ticket
        assert watcher.stats().leases == 1
        client.close()
        left = watcher.stats()
        assert (left.sessions, left.leases, left.tickets, left.reserved_copies) == (0, 0, 0, 0)
        assert changes == [True, False]
        with pytest.raises(kvtier.NotAttached, match="closed"):
            session.lookup(engine.tokens(1))
        with pytest.raises(kvtier.NotAttached, match="closed"):
            engine.attach(client)


def quantised(x: npt.NDArray[np.float16], kind: kvtier.QuantKind) -> npt.NDArray[np.float16]:
    """[block, token, head, dim] there and back, as docs/formats.md says; each block is a plane."""
    wide = x.astype(np.float32)
    most = np.abs(wide).max(axis=(1, 3), keepdims=True)
    if kind is kvtier.QuantKind.INT8:
        scale = (most / np.float32(127)).astype(np.float32)
        return np.asarray(np.rint(wide / scale) * scale, dtype=np.float16)
    codes = np.arange(127)
    exponents, mantissas = codes // 8, codes % 8
    values = np.where(
        exponents == 0, mantissas / 512, (8 + mantissas) / 8 * 2.0 ** (exponents - 7)
    )
    scale = (most / np.float32(448)).astype(np.float32)
    y = np.abs(wide / scale).astype(np.float64)
    above = np.clip(np.searchsorted(values, y), 1, 126)
    low, high = y - values[above - 1], values[above] - y
    nearest = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    code = np.copysign(values[nearest].astype(np.float32), wide)
    return np.asarray(code * scale, dtype=np.float16)


@pytest.mark.parametrize("kind", list(kvtier.QuantKind))
def test_a_quantised_component_comes_back_as_its_codes(
    daemon: Daemon, kind: kvtier.QuantKind
) -> None:
    cache = Cache(16)
    quantisation = kvtier.Quantisation(
        kind, kvtier.Element.FP16, kvtier.PlaneOrder.TOKENS_FIRST, BLOCK_TOKENS, 4, 32
    )
    component = kvtier.Component(kvtier.Kind.FULL, BLOCK_BYTES, quantisation=quantisation)
    spec = kvtier.ModelSpec(BLOCK_TOKENS, 1, (component,), "model")
    random = np.random.default_rng(5)
    sizes = 2.0 ** random.integers(-6, 6, (8, 1, 4, 1))
    x = (random.standard_normal((8, BLOCK_TOKENS, 4, 32)) * sizes).astype(np.float16)
    with kvtier.Client(daemon.socket) as client:
        plain = client.open_namespace(engine.spec())
        assert client.open_namespace(spec).fingerprint != plain.fingerprint
        session = engine.attach(client, cache, spec=spec)
        cache.blocks[:8] = x.view(np.uint8).reshape(8, BLOCK_BYTES)
        moves = [kvtier.Moves(0, range(8), engine.ids(0, 8))]
        op = session.demote(moves, tokens=engine.tokens(8))
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        cache.blocks[:] = 0
        lease = session.lookup(engine.tokens(8), lease_s=30.0).lease
        op = session.promote([kvtier.Moves(0, range(8), engine.ids(8, 8))], lease=lease)
        assert op.wait(WAIT_S)
        assert op.result.all_done, op.result
        back = cache.blocks[8:].copy().view(np.float16).reshape(x.shape)
        assert np.array_equal(back, quantised(x, kind))
        assert not np.array_equal(back, x)
        (ns,) = (n for n in client.stats().namespaces if n.components[0].HasField("quantisation"))
        assert list(ns.stored_bytes_per_block) == [component.stored_bytes] == [2048 + 16]
        # Pieces of half a plane: the daemon says which and what a plane is.
        half = (kvtier.Piece(0, BLOCK_BYTES // 2, 0, BLOCK_BYTES),)
        with pytest.raises(kvtier.InvalidArgument, match="piece 0 of 2048 bytes is not whole"):
            engine.attach(client, cache, spec=spec, layouts=(kvtier.Layout(0, 2, half),))


def test_a_daemon_that_knows_no_quantisation_is_told_apart() -> None:
    plain = engine.spec()
    quantisation = kvtier.Quantisation(
        kvtier.QuantKind.INT8, kvtier.Element.FP16, kvtier.PlaneOrder.TOKENS_FIRST, 16, 4, 32
    )
    component = kvtier.Component(kvtier.Kind.FULL, BLOCK_BYTES, quantisation=quantisation)
    spec = kvtier.ModelSpec(BLOCK_TOKENS, 1, (component,), "model")
    _check_quantised(plain, [])
    _check_quantised(spec, [component.stored_bytes])
    for stored_bytes in ([], [BLOCK_BYTES]):
        with pytest.raises(kvtier.FailedPrecondition, match="a version without quantisation"):
            _check_quantised(spec, stored_bytes)
