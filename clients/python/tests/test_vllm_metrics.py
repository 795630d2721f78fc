"""The connector's statistics: counted, merged, carried, shown. No vLLM needed, save for the last
part, which hands them to vLLM's own logger and Prometheus registry."""

from __future__ import annotations

import json
import pickle
from typing import Any, ClassVar

import pytest

from kvtier.vllm import metrics
from kvtier.vllm.metrics import KvtierPromMetrics, KvtierStats, build_stats

LABELNAMES = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}


class Series:
    """One labelled series of a fake family; remembers what was done to it."""

    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def inc(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class Family:
    """Stands for prometheus_client's classes: named families of series."""

    made: ClassVar[dict[str, Family]] = {}

    def __init__(
        self, name: str, documentation: str, labelnames: list[str], **options: Any
    ) -> None:
        self.documentation, self.labelnames, self.options = documentation, labelnames, options
        self.series: dict[tuple[object, ...], Series] = {}
        Family.made[name] = self

    def labels(self, *values: object) -> Series:
        assert len(values) == len(self.labelnames)
        return self.series.setdefault(values, Series())


@pytest.fixture
def prom() -> KvtierPromMetrics:
    Family.made = {}
    kinds = {type(name, (), {}): Family for name in ("Counter", "Gauge", "Histogram")}
    return metrics.build_prom_metrics(kinds, LABELNAMES, ENGINES)


def series(name: str, *labels: str, engine: int = 0) -> Series:
    return Family.made[f"vllm:kvtierd_{name}"].series[(*ENGINES[engine], *labels)]


def busy(seconds: float = 0.002) -> KvtierStats:
    stats = KvtierStats()
    stats.observe_lookup(seconds, 960, 1280, "hit")
    stats.observe_load(2 * seconds, 4096, True)
    stats.observe_store(3 * seconds, 2048, False)
    stats.count_skipped("blocks_limit")
    stats.set_attached("worker", True, rank=1)
    stats.set_inflight(2, 1)
    return stats


def test_new_stats_are_empty_and_not_worth_a_message() -> None:
    stats = KvtierStats()
    assert stats.is_empty()
    assert stats.take() is None


@pytest.mark.parametrize(
    "count",
    [
        lambda s: s.observe_lookup(0.0, 0, 0, "miss"),
        lambda s: s.observe_load(0.0, 0, False),
        lambda s: s.observe_store(0.0, 0, True),
        lambda s: s.count_skipped("error"),
        lambda s: s.set_attached("scheduler", False),
        lambda s: s.set_breaker_open(False),
        lambda s: s.set_inflight(0, 0),
    ],
)
def test_any_event_is_worth_a_message(count: Any) -> None:
    stats = KvtierStats()
    count(stats)
    assert not stats.is_empty()


def test_take_gives_away_and_starts_anew() -> None:
    stats = busy()
    taken = stats.take()
    assert taken is not None
    assert stats.is_empty()
    stats.observe_load(1.0, 1, True)
    assert taken.counter("transfers", "load", "ok") == 1
    assert taken.counter("transfer_bytes", "load") == 4096


def test_a_gauge_is_told_when_it_changes() -> None:
    stats = KvtierStats()
    stats.set_inflight(1, 0)
    stats.set_inflight(2, 0)
    assert stats.take() is not None
    stats.set_inflight(2, 0)
    assert stats.take() is None
    stats.set_inflight(3, 0)
    stats.set_inflight(2, 0)  # back to what was told, after something else was written
    taken = stats.take()
    assert taken is not None
    assert taken.to_dict()["gauges"] == {"jobs_in_flight": {"load": {"": 2}}}


def test_a_lookup_that_was_not_made_has_no_duration() -> None:
    stats = KvtierStats()
    stats.observe_lookup(0.0, 0, 640, "breaker_open")
    assert stats.seconds("lookup_seconds") == []
    assert stats.counter("lookups", "breaker_open") == 1


def test_the_data_survives_pickle_and_json() -> None:
    stats = busy()
    assert pickle.loads(pickle.dumps(stats)).to_dict() == stats.to_dict()
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()


def test_ranks_and_steps_add_up() -> None:
    total = busy(0.001)
    assert total.aggregate(busy(0.003)) is total
    assert total.counter("hit_tokens") == 1920
    assert total.counter("asked_tokens") == 2560
    assert total.counter("transfers") == 4
    assert total.counter("transfer_bytes", "store") == 4096
    assert total.seconds("lookup_seconds") == [0.001, 0.003]


def test_merging_leaves_the_other_one_as_it_was() -> None:
    total, other = KvtierStats(), busy()
    before = json.dumps(other.to_dict())
    total.aggregate(other)
    total.aggregate(busy())
    assert json.dumps(other.to_dict()) == before


def test_two_loggers_of_one_message_do_not_see_each_other() -> None:
    data = busy().to_dict()
    first, second = build_stats(data), build_stats(data)
    first.aggregate(busy())
    assert first.counter("lookups") == 2
    assert second.counter("lookups") == 1
    assert build_stats(None).is_empty()


def test_the_log_has_no_line_for_gauges_alone() -> None:
    stats = KvtierStats()
    stats.set_inflight(0, 0)
    logged = build_stats(stats.to_dict())
    assert logged.is_empty()
    assert not logged.aggregate(busy()).is_empty()


def test_durations_between_two_messages_are_bounded() -> None:
    stats = KvtierStats()
    for _ in range(metrics.SAMPLES_MAX + 5):
        stats.observe_load(0.001, 1, True)
    stats.aggregate(busy())
    assert len(stats.seconds("load_seconds")) == metrics.SAMPLES_MAX
    assert stats.counter("transfers", "load", "ok") == metrics.SAMPLES_MAX + 6


def test_the_log_shows_hit_rate_and_bytes() -> None:
    stats = KvtierStats()
    stats.observe_lookup(0.002, 960, 1280, "hit")
    stats.observe_lookup(0.020, 0, 1280, "timeout")
    stats.observe_load(0.004, 3 << 20, True)
    figures = stats.reduce()
    assert figures["Hit rate (%)"] == 37.5
    assert figures["Lookups failed"] == 1
    assert figures["Avg lookup (ms)"] == 11.0
    assert figures["Loaded (MiB)"] == 3.0


def test_an_interval_without_lookups_has_a_rate_of_zero() -> None:
    stats = KvtierStats()
    stats.set_inflight(0, 1)
    assert stats.reduce()["Hit rate (%)"] == 0.0


def test_every_known_label_starts_at_zero(prom: KvtierPromMetrics) -> None:
    for engine in ENGINES:
        for outcome in metrics.LOOKUP_OUTCOMES:
            assert series("lookups", outcome, engine=engine).value == 0
        for reason in metrics.SKIP_REASONS:
            assert series("stores_skipped", reason, engine=engine).value == 0
        for direction in metrics.DIRECTIONS:
            assert series("transfers", direction, "failed", engine=engine).value == 0
            assert series("transfer_bytes", direction, engine=engine).value == 0
        for role in metrics.ROLES:
            assert series("attached", role, engine=engine).value == 0
        assert series("lookup_seconds", engine=engine).observed == []


def test_a_step_reaches_the_series_of_its_engine(prom: KvtierPromMetrics) -> None:
    prom.observe(busy().to_dict(), 1)
    prom.observe(busy().to_dict(), 1)
    assert series("hit_tokens", engine=1).value == 1920
    assert series("transfers", "store", "failed", engine=1).value == 2
    assert series("transfer_bytes", "load", engine=1).value == 8192
    assert series("load_seconds", engine=1).observed == [0.004, 0.004]
    assert series("jobs_in_flight", "load", engine=1).value == 2
    assert series("hit_tokens", engine=0).value == 0


def test_attached_means_all_ranks_even_when_one_alone_reports(prom: KvtierPromMetrics) -> None:
    def report(rank: int, is_attached: bool) -> float:
        stats = KvtierStats()
        stats.set_attached("worker", is_attached, rank=rank)
        prom.observe(stats.to_dict())
        return series("attached", "worker").value

    assert report(0, True) == 1
    assert report(1, False) == 0
    assert report(0, True) == 0
    assert report(1, True) == 1


def test_names_say_their_units_and_gauges_work_in_several_processes(
    prom: KvtierPromMetrics,
) -> None:
    for name, family in Family.made.items():
        assert name.startswith("vllm:kvtierd_")
        assert family.documentation.endswith(".")
        assert not name.endswith("_total")  # the Prometheus client appends it
        if "buckets" in family.options:
            assert name.endswith("_seconds")
            assert family.options["buckets"] == sorted(family.options["buckets"])
    assert Family.made["vllm:kvtierd_attached"].options == {"multiprocess_mode": "mostrecent"}


def test_vllms_own_classes_show_it() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    prometheus = pytest.importorskip("prometheus_client", reason="vLLM is not installed")
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    kinds = {kind: kind for kind in (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)}
    prom = metrics.build_prom_metrics(kinds, LABELNAMES, ENGINES)
    stats = busy()
    assert isinstance(stats, KVConnectorStats)
    prom.observe(stats.to_dict(), 1)
    page = prometheus.generate_latest().decode()
    assert 'vllm:kvtierd_hit_tokens_total{engine="1",model_name="tiny"} 960.0' in page
    assert (
        'vllm:kvtierd_stores_skipped_total{engine="0",model_name="tiny",reason="no_ticket"} 0.0'
    ) in page
    assert 'vllm:kvtierd_lookup_seconds_count{engine="1",model_name="tiny"} 1.0' in page
    assert 'vllm:kvtierd_attached{engine="1",model_name="tiny",role="worker"} 1.0' in page
