"""One thread that does what comes later: callbacks of finished operations, questions that are asked
again after a pause, and the ends of processes. gRPC's own thread only ever notes an answer."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger("kvtier")


class Dispatcher:
    """Runs functions in the order of their times, in a thread of its own that starts with the
    first of them. Any thread may call; functions must not block for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._watched: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def call_soon(self, fn: Callable[[], None]) -> None:
        self.call_later(0.0, fn)

    def call_later(self, delay_s: float, fn: Callable[[], None]) -> None:
        """Runs fn after delay_s; after stop() it is dropped."""
        with self._lock:
            if self._is_stopping:
                return
            heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._order), fn))
            self._wake()

    def watch(self, fd: int, fn: Callable[[], None]) -> None:
        """Runs fn once when fd can be read; fd must stay open until then, or until unwatch()."""
        with self._lock:
            self._watched[fd] = fn
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._wake()

    def unwatch(self, fd: int) -> None:
        with self._lock:
            if self._watched.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def stop(self) -> None:
        """Ends the thread after what is due; what was to come later is dropped. May be called in
        that thread: it ends when it comes back from there."""
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
            self._wake()
            thread = self._thread
        if thread is threading.current_thread():
            return
        if thread is None:
            self.close_descriptors()
        else:
            thread.join()

    def close_descriptors(self) -> None:
        """Of the stopped dispatcher, or of the copy that a fork made (its thread is not here)."""
        self._epoll.close()
        os.close(self._wake_fd)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier", daemon=True)
            self._thread.start()
        elif self._thread is not threading.current_thread():
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                is_last = self._is_stopping
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
            if is_last:
                wait_s = 0.0
            events = self._epoll.poll(None if wait_s is None else max(wait_s, 0.0))
            for fn in self._ready([fd for fd, _ in events]):
                run_safely(fn)
            if is_last:
                self.close_descriptors()
                return

    def _ready(self, fds: list[int]) -> list[Callable[[], None]]:
        ready = []
        now_s = time.monotonic()
        with self._lock:
            for fd in fds:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif (fn := self._watched.pop(fd, None)) is not None:
                    self._epoll.unregister(fd)
                    ready.append(fn)
            while self._heap and self._heap[0][0] <= now_s:
                ready.append(heapq.heappop(self._heap)[2])
        return ready


def run_safely(fn: Callable[[], None]) -> None:
    """Runs a function of somebody else; what it raises is logged and ends only itself."""
    try:
        fn()
    except Exception:
        _LOG.exception("a callback failed")
