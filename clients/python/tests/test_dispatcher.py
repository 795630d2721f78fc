"""The thread that does what comes later."""

from __future__ import annotations

import os
import threading
import time

import pytest

from engine import WAIT_S, wait_until
from kvtier._dispatcher import Dispatcher


def test_in_the_order_of_their_times() -> None:
    dispatcher = Dispatcher()
    seen: list[str] = []
    dispatcher.call_later(1.5, lambda: seen.append("late"))
    dispatcher.call_soon(lambda: seen.append("soon"))
    dispatcher.call_later(0.05, lambda: dispatcher.call_soon(lambda: seen.append("from within")))
    wait_until(lambda: len(seen) == 3)
    assert seen == ["soon", "from within", "late"]
    dispatcher.stop()


def test_stop_does_what_is_due_and_drops_the_rest() -> None:
    dispatcher = Dispatcher()
    seen: list[str] = []
    is_stopping = threading.Event()

    def block() -> None:
        is_stopping.wait(WAIT_S)

    dispatcher.call_soon(block)
    dispatcher.call_later(0.0, lambda: seen.append("due"))
    dispatcher.call_later(60.0, lambda: seen.append("never"))
    threading.Timer(0.1, is_stopping.set).start()
    dispatcher.stop()
    dispatcher.call_soon(lambda: seen.append("after"))
    assert seen == ["due"]


def test_watch_tells_once() -> None:
    dispatcher = Dispatcher()
    reader, writer = os.pipe()
    seen: list[int] = []
    dispatcher.watch(reader, lambda: seen.append(reader))
    time.sleep(0.05)
    assert seen == []
    os.write(writer, b"x")
    wait_until(lambda: seen == [reader])
    os.write(writer, b"x")
    time.sleep(0.05)
    assert seen == [reader]
    os.read(reader, 2)
    dispatcher.watch(reader, lambda: seen.append(-1))
    dispatcher.unwatch(reader)
    dispatcher.stop()
    os.close(reader)
    os.close(writer)


def test_stop_in_its_own_thread(capfd: pytest.CaptureFixture[str]) -> None:
    """As when the last operation of a closed client finishes."""
    dispatcher = Dispatcher()
    seen: list[str] = []

    def stop() -> None:
        dispatcher.call_soon(lambda: seen.append("due"))
        dispatcher.stop()
        seen.append("back")

    dispatcher.call_soon(stop)
    thread = dispatcher._thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert seen == ["back", "due"]
    assert capfd.readouterr().err == "", "the thread ended with an exception"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(dispatcher._wake_fd)
