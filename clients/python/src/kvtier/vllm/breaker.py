"""Keeps a daemon that does not answer from costing every request its deadline.

    closed --(failures_max failures in a row)--> open --(back-off passed: one probe)--> closed
                                                  ^                          |
                                                  +------ probe failed <-----+   back-off doubled

Pure: the time is passed in, in seconds of any clock that does not go backwards.
"""

from __future__ import annotations


class Breaker:
    """One for each daemon. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(
        self, *, failures_max: int = 3, backoff_s: float = 0.5, backoff_max_s: float = 10.0
    ) -> None:
        self._failures_max = failures_max
        self._backoff_first_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._backoff_s = backoff_s
        self._failures = 0
        self._closed_until_s = 0.0  # while open: no call before
        self._is_probing = False  # the probe of this back-off has been let through

    @property
    def is_open(self) -> bool:
        """Calls are kept from the daemon, but for a probe now and then."""
        return self._failures >= self._failures_max

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made. While open, True is the one probe of this back-off."""
        if not self.is_open:
            return True
        if now_s < self._closed_until_s:
            return False
        self._closed_until_s = now_s + self._backoff_s
        self._is_probing = True
        return True

    def succeeded(self) -> None:
        """A call was answered, whatever the answer."""
        self._failures = 0
        self._backoff_s = self._backoff_first_s
        self._is_probing = False

    def failed(self, now_s: float) -> None:
        """A call was not answered in time, or not at all. While open, only a probe counts: what was
        begun before and fails now says nothing new."""
        if self.is_open and not self._is_probing:
            return
        if self.is_open:
            self._backoff_s = min(2 * self._backoff_s, self._backoff_max_s)
        self._failures += 1
        self._is_probing = False
        if self.is_open:
            self._closed_until_s = now_s + self._backoff_s
