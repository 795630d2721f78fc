#!/usr/bin/env python3
"""What a scheduler in Python pays for a lookup, beside an empty gRPC call of the same channel.

usage: bench_client.py [--json] [--quick]

Rounds of each kind are interleaved, so that a machine that is busy for a while is busy for all of
them; a figure is the median of the rounds' medians. The daemon is KVTIERD's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import kvtier
from daemon import Daemon

BLOCK_TOKENS = 64
PATH_TOKENS = 80_000
STEP_TOKENS = 512
BLOCKS = (PATH_TOKENS + STEP_TOKENS) // BLOCK_TOKENS
BLOCK_BYTES = 4096
WAIT_S = 30.0
STEP_RATIO_MAX = 1.5


def attach(client: kvtier.Client, region: kvtier.Region) -> Any:
    spec = kvtier.ModelSpec(
        BLOCK_TOKENS, 1, (kvtier.Component(kvtier.Kind.FULL, BLOCK_BYTES),), "bench"
    )
    layout = kvtier.Layout(0, 1, (kvtier.Piece(0, BLOCK_BYTES, 0, BLOCK_BYTES),))
    return client.attach(
        spec,
        engine_id=os.urandom(16),
        role=kvtier.Role.SCHEDULER,
        rank=0,
        regions=(region,),
        layouts=(layout,),
        wait_s=WAIT_S,
    )


def store(session: Any, tokens: np.ndarray[Any, Any]) -> None:
    moves = [kvtier.Moves(0, range(BLOCKS), np.arange(BLOCKS, dtype=np.uint64))]
    op = session.demote(moves, tokens=tokens, timeout_s=WAIT_S)
    if not op.wait(WAIT_S) or not op.result.all_done:
        raise RuntimeError(f"the prompt could not be stored: {op.result}")


def kinds(client: kvtier.Client, session: Any) -> dict[str, Callable[[], None]]:
    """The calls that are compared; each checks its answer."""
    tokens = np.arange(BLOCKS * BLOCK_TOKENS, dtype=np.uint32)
    store(session, tokens)
    cursor = session.lookup(tokens[:PATH_TOKENS]).cursor
    step = tokens[PATH_TOKENS:]
    moves = [kvtier.Moves(0, range(8), np.arange(8, dtype=np.uint64))]
    lease = session.lookup(tokens, lease_s=600).lease

    def empty() -> None:
        if not client.serving():
            raise RuntimeError("not serving")

    def with_cursor() -> None:
        if session.lookup(step, cursor=cursor).boundary_tokens != len(tokens):
            raise RuntimeError("a lookup missed")

    def full() -> None:
        if session.lookup(tokens).boundary_tokens != len(tokens):
            raise RuntimeError("a lookup missed")

    def promote() -> None:
        op = session.promote(moves, lease=lease)
        if not op.wait(WAIT_S) or not op.result.all_done:
            raise RuntimeError(f"a load failed: {op.result}")

    return {"empty": empty, "step": with_cursor, "full": full, "promote": promote}


def measure(calls: dict[str, Callable[[], None]], rounds: int, times: int) -> dict[str, float]:
    """Seconds of each kind of call: the median of the rounds' medians."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(times):
            call()  # warm
    for _ in range(rounds):
        for name, call in calls.items():
            taken = []
            for _ in range(times):
                started_s = time.perf_counter()
                call()
                taken.append(time.perf_counter() - started_s)
            medians[name].append(statistics.median(taken))
    return {name: statistics.median(values) for name, values in medians.items()}


def rows(seconds: dict[str, float]) -> list[dict[str, Any]]:
    empty = seconds["empty"]
    texts = {
        "step": f"Python: Lookup of {STEP_TOKENS} tokens after a cursor at {PATH_TOKENS:,}",
        "full": f"Python: Lookup of {PATH_TOKENS + STEP_TOKENS:,} tokens, all sent",
        "promote": f"Python: Promote of 8 blocks of {BLOCK_BYTES} bytes, until finished",
    }
    found = []
    for name, text in texts.items():
        row: dict[str, Any] = {
            "figure": text,
            "value": 1e6 * seconds[name],
            "unit": "us",
            "limit": "empty gRPC call from Python",
            "limit_value": 1e6 * empty,
            "ratio": seconds[name] / empty,
        }
        if name == "step":
            row |= {
                "target": f"<= {STEP_RATIO_MAX}",
                "met": row["ratio"] <= STEP_RATIO_MAX,
            }
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object a row")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    options = parser.parse_args()
    rounds, times = (3, 20) if options.quick else (25, 100)
    daemon = Daemon()
    try:
        daemon.start()
        with (
            kvtier.Region.create(BLOCKS * BLOCK_BYTES) as region,
            kvtier.Client(daemon.socket, timeout_s=WAIT_S) as client,
        ):
            found = rows(measure(kinds(client, attach(client, region)), rounds, times))
    finally:
        daemon.close()
    for row in found:
        print(json.dumps(row) if options.json else f"{row['figure']}: {row['value']:.0f} us, "
              f"{row['ratio']:.2f} of an empty call")


if __name__ == "__main__":
    main()
