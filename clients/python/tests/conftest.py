"""Fixtures for tests that talk to a real kvtierd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import daemon as daemons


@pytest.fixture
def daemon() -> Iterator[daemons.Daemon]:
    """A daemon that serves, with nothing in it."""
    if not daemons.PROGRAM:
        pytest.skip(daemons.NO_PROGRAM)
    one = daemons.Daemon()
    try:
        one.start()
        yield one
    finally:
        one.close()
