"""The table of arenas, on a driver that hangs: only who opens there waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import kvtier
from engine import wait_until
from kvtier import _attach, cuda
from kvtier._proto import kvtier_pb2 as pb
from kvtier._session import Identity, RankSession
from kvtier.types import Arena
from test_regions_lost import Daemon, Lender

_WAIT_S = 20.0


class Driver:
    """Opens arena n, by the first byte of its handle, at n << 20, each time once more; opening and
    closing of those in `stuck` hang until `let_go`. Never called with the table's lock held."""

    def __init__(self, arenas: Callable[[], cuda.Arenas]) -> None:
        self._arenas = arenas
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.stuck: set[str] = set()
        self.status = 0  # of the next opening
        self.open: dict[int, int] = {}  # by address
        self.opened = 0
        self.waiting = 0
        self.pushed: list[int | None] = []

    def let_go(self) -> None:
        self.stuck.clear()
        self._released.set()

    def _call(self, name: str) -> None:
        with self._lock:
            self.waiting += 1
        self._arenas().count()  # would never come back with the lock held
        if name in self.stuck:
            assert self._released.wait(_WAIT_S)
        with self._lock:
            self.waiting -= 1

    def cuCtxGetCurrent(self, ref: Any) -> int:  # noqa: N802
        ref._obj.value = 0x77
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.pushed.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, ref: Any) -> int:  # noqa: N802
        return 0

    def cuIpcOpenMemHandle_v2(self, ref: Any, handle: Any, flags: int) -> int:  # noqa: N802
        self._call("open")
        if self.status:
            status, self.status = self.status, 0
            return status
        address = handle.bytes[0] << 20
        with self._lock:
            self.opened += 1
            self.open[address] = self.open.get(address, 0) + 1
        ref._obj.value = address
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        self._call("close")
        with self._lock:
            self.open[address.value] -= 1
            assert self.open[address.value] >= 0
        return 0

    @property
    def imports(self) -> int:
        return sum(self.open.values())


def arena(number: int, device: int = 0) -> Arena:
    return Arena(number, bytes([number]) * 64, bytes([device]) * 16, 1 << 20, 1)


def on_driver() -> tuple[cuda.Arenas, Driver]:
    driver = Driver(lambda: arenas)
    arenas = cuda.Arenas(driver)
    return arenas, driver


def in_thread(fn: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=fn, daemon=True)
    thread.start()
    return thread


def goes_on(fn: Callable[[], object]) -> None:
    """It comes back, whatever hangs."""
    thread = in_thread(fn)
    thread.join(_WAIT_S)
    assert not thread.is_alive(), "it hangs"


def test_retired_is_closed_after_its_reader_in_the_context_that_opened() -> None:
    arenas, driver = on_driver()
    assert arenas.take(arena(1)) == arenas.take(arena(1)) == 1 << 20
    assert driver.opened == 1
    arenas.retire()
    arenas.give_back(arena(1))
    assert arenas.count() == driver.imports == 1
    arenas.give_back(arena(1))
    wait_until(lambda: arenas.count() == 0)
    assert driver.imports == 0
    assert driver.pushed == [0x77]
    arenas.take(arena(2))
    arenas.take(arena(3, device=1))
    arenas.give_back(arena(2))
    arenas.give_back(arena(3, device=1))
    arenas.take(arena(4))  # the GPU's arena is another one now
    wait_until(lambda: arenas.count() == 2)
    assert driver.open == {1 << 20: 0, 2 << 20: 0, 3 << 20: 1, 4 << 20: 1}
    arenas.give_back(arena(4))
    arenas.close()
    assert driver.imports == 0


def test_closing_that_hangs_holds_up_nobody() -> None:
    arenas, driver = on_driver()
    arenas.take(arena(1))
    arenas.give_back(arena(1))
    driver.stuck.add("close")
    goes_on(arenas.retire)
    wait_until(lambda: driver.waiting == 1)
    goes_on(arenas.retire)
    goes_on(lambda: arenas.take(arena(1)))  # the daemon says that it is there again: opened anew
    goes_on(lambda: arenas.take(arena(2, device=1)))
    goes_on(arenas.retire)
    goes_on(lambda: arenas.give_back(arena(1)))
    goes_on(lambda: arenas.close(0.05))
    assert arenas.count() == driver.imports == 3
    driver.let_go()
    wait_until(lambda: arenas.count() == 1)
    arenas.give_back(arena(2, device=1))
    arenas.close()
    assert arenas.count() == driver.imports == 0


def test_opening_that_hangs_holds_up_who_opens() -> None:
    arenas, driver = on_driver()
    found: list[int] = []
    driver.stuck.add("open")
    threads = [in_thread(lambda: found.append(arenas.take(arena(1)))) for _ in range(3)]
    wait_until(lambda: driver.waiting == 1)
    goes_on(arenas.retire)
    assert arenas.count() == 1
    assert found == []
    driver.let_go()
    for thread in threads:
        thread.join(_WAIT_S)
    assert found == [1 << 20] * 3
    assert driver.opened == 1
    arenas.retire()
    for _ in range(3):
        assert driver.imports == 1
        arenas.give_back(arena(1))
    wait_until(lambda: arenas.count() == 0)
    arenas.close()
    assert driver.imports == 0


def test_lost_while_it_was_opened_is_closed_after_its_reader() -> None:
    arenas, driver = on_driver()
    driver.stuck.add("open")
    thread = in_thread(lambda: arenas.take(arena(1)))
    wait_until(lambda: driver.waiting == 1)
    arenas.retire()
    driver.let_go()
    thread.join(_WAIT_S)
    assert driver.imports == 1
    arenas.give_back(arena(1))
    wait_until(lambda: arenas.count() == 0)
    assert driver.imports == 0
    arenas.close()


def test_arena_that_does_not_open_is_tried_again() -> None:
    arenas, driver = on_driver()
    driver.status = 201
    with pytest.raises(cuda.CudaError, match="no CUDA context"):
        arenas.take(arena(1))
    assert arenas.count() == 0
    assert arenas.take(arena(1)) == 1 << 20
    arenas.give_back(arena(1))
    arenas.close()
    assert driver.imports == 0


def test_closed_table_gives_nothing_and_leaves_no_thread() -> None:
    arenas, driver = on_driver()
    arenas.close()
    arenas, driver = on_driver()
    arenas.take(arena(1))
    goes_on(lambda: arenas.close(0.05))  # a reader is still there
    with pytest.raises(cuda.CudaError, match="closed"):
        arenas.take(arena(1))
    assert driver.imports == 1
    arenas.give_back(arena(1))
    arenas.close()
    arenas.close()
    assert driver.imports == 0
    assert not any(t.name == "kvtier-arenas" for t in threading.enumerate())


@pytest.mark.parametrize("what", ["open", "close"])
def test_session_goes_on_while_the_driver_hangs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """REGIONS_LOST comes just then: the notices after it are heard, and it attaches again."""
    monkeypatch.setattr(_attach, "RegionSocket", Lender)
    arenas, driver = on_driver()
    if what == "close":
        arenas.take(arena(1))
        arenas.give_back(arena(1))
    driver.stuck.add(what)
    if what == "open":
        opener = in_thread(lambda: arenas.take(arena(1)))
        wait_until(lambda: driver.waiting == 1)
    spec = kvtier.ModelSpec(64, 1, (kvtier.Component(kvtier.Kind.FULL, 4096),), "m")
    region = kvtier.CudaIpcRegion(b"h" * 64, 0, 4096, b"u" * 16)
    layout = kvtier.Layout(0, 1, (kvtier.Piece(0, 4096, 0, 4096),))
    who = Identity(spec, b"e" * 16, kvtier.Role.WORKER, 0, (region,), (layout,), "test")
    heard: list[int] = []

    class Session(RankSession):
        def on_notice(self, notice: Any) -> None:
            super().on_notice(notice)
            heard.append(notice.kind)

    session = Session(Daemon(), who, None)  # type: ignore[arg-type]
    session.add_void_callback(arenas.retire)
    session.start()
    try:
        wait_until(lambda: session.generation == 2, _WAIT_S)
        assert heard == [pb.Notice.EPOCH, pb.Notice.REGIONS_LOST, pb.Notice.EPOCH]
        assert session.voids == 2
        assert driver.waiting == 1
    finally:
        driver.let_go()
        session.close()
    if what == "open":
        opener.join(_WAIT_S)
        arenas.give_back(arena(1))
    arenas.close()
    assert driver.imports == 0
