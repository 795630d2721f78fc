"""Options of the vLLM connector, and what its two roles tell each other."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvtier.vllm.meta import (
    ComponentMoves,
    JobReport,
    KvtierMetadata,
    LoadJob,
    StoreJob,
    WorkerReport,
)
from kvtier.vllm.options import Options, parse_bytes


def test_defaults_are_what_the_documentation_says() -> None:
    options = Options.parse({})
    assert options.lookup_timeout_s == pytest.approx(0.02)
    assert (options.store, options.load, options.memory) == ("prompt", "async", "auto")
    assert options.staging_bytes == 64 << 20
    assert options.quantise == ()


def test_values_are_taken() -> None:
    options = Options.parse(
        {
            "socket": "/x",
            "lookup_timeout_ms": 5,
            "staging_bytes": "1.5GiB",
            "store": "all",
            "namespace_tags": ["a=1"],
            "store_blocks_max": 1,
            "quantise": {"sliding_window": "int8", "full": "fp8_e4m3"},
        }
    )
    assert options.quantise == (("full", "fp8_e4m3"), ("sliding_window", "int8"))
    assert options.lookup_timeout_ms == 5.0
    assert options.staging_bytes == 3 << 29
    assert options.namespace_tags == ("a=1",)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"sokcet": "/x"}, "unknown key 'sokcet'; known are"),
        ({"store": "yes"}, "store: 'yes' is none of prompt, all, off"),
        ({"load": True}, "load: True is none of"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms: 0 is not in 1 .. 1000"),
        ({"lookup_timeout_ms": "20"}, "'20' is no number"),
        ({"lookup_timeout_ms": float("nan")}, "nan is not in"),
        ({"store_blocks_max": True}, "True is no number"),
        ({"store_blocks_max": 2}, "2 is not in 0 .. 1"),
        ({"staging_bytes": "64 M"}, "is no size"),
        ({"staging_bytes": 4096}, "is less than 1MiB"),
        ({"staging_bytes": None}, "is no size"),
        ({"socket": ""}, "socket: '' is no text"),
        ({"name": 3}, "name: 3 is no text"),
        ({"namespace_tags": "a=1"}, "is no list of texts"),
        ({"quantise": "fp8_e4m3"}, "is no object such as"),
        ({"quantise": {"full": "fp8"}}, "full: 'fp8' is none of fp8_e4m3, int8"),
        ({"quantise": {"all": "int8"}}, "'all' is none of full, sliding_window"),
        ({"quantise": {"state": "int8"}}, "recurrent states are not quantised"),
        ({"namespace_tags": [""]}, "no text or an empty one"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as caught:
        Options.parse(config)
    assert says in str(caught.value)


def test_sizes() -> None:
    assert parse_bytes(5) == 5
    assert parse_bytes("2KiB") == 2048
    assert parse_bytes(" 3 MiB") == 3 << 20
    with pytest.raises(ValueError, match="no size"):
        parse_bytes("infGiB")


def test_metadata_survives_pickling() -> None:
    moves = [ComponentMoves(0, [0, 1], [4, 5, 6, 7])]
    meta = KvtierMetadata(
        loads=[LoadJob(1, "a", b"l" * 24, moves, 30.0, False)],
        stores=[StoreJob(2, "b", b"t" * 24, moves, 30.0)],
        cancels=[1],
    )
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert not meta.is_empty()
    assert KvtierMetadata().is_empty()


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport({1: JobReport(1, True, 10, {0: 2}), 2: JobReport(1, True)})
    two = WorkerReport({1: JobReport(1, False, 5, {0: 1, 1: 1}), 3: JobReport(1, True)})
    both = one.aggregate(two)
    assert both.finished[1] == JobReport(2, False, 15, {0: 3, 1: 1})
    assert set(both.finished) == {1, 2, 3}
    assert one.finished[1] == JobReport(1, True, 10, {0: 2})
    with pytest.raises(TypeError, match="cannot merge"):
        one.aggregate(object())  # type: ignore[arg-type]
