"""What the connector tells about itself through vLLM's own channels.

Both roles of the connector count into a `KvtierStats` and hand it to vLLM each step with `take()`.
vLLM merges those of all ranks and of the scheduler (`aggregate`), sends the plain data to its front
end (`to_dict`), and there it goes two ways: `KvtierPromMetrics` puts it into vLLM's Prometheus
endpoint as `vllm:kvtierd_*`, and `reduce` is what vLLM writes to its log as "KV Transfer metrics".

The data is made of dicts with string keys, numbers and lists, so that it survives pickle, msgpack
and JSON alike:

    counters  {name: {label: number}}             what was added since the last take()
    samples   {name: [seconds, ...]}              single durations since then, at most SAMPLES_MAX
    gauges    {name: {label: {source: number}}}   the newest value each source reported

A gauge has one value per source (the scheduler, or a worker's rank), because only one of several
ranks may have something to report in a step; the front end remembers the others.

Units are in the names. Nothing here is safe for several threads: a stats object belongs to the
thread that runs the engine's step, and callbacks of transfers hand their results to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.vllm._compat import KVConnectorStats

SAMPLES_MAX = 4096
"""Durations kept of one kind between two take(); further ones are only counted."""

# What became of a lookup, as the scheduler saw it.
LOOKUP_OUTCOMES = ("hit", "limited", "miss", "timeout", "unavailable", "breaker_open", "error")
_ANSWERED = ("hit", "limited", "miss")  # the others are failures

# Why a store that the policy wanted was not begun.
SKIP_REASONS = ("not_attached", "breaker_open", "blocks_limit", "no_ticket", "error")

DIRECTIONS = ("load", "store")
RESULTS = ("ok", "failed")
ROLES = ("scheduler", "worker")

# 0.1 ms to 50 s, three a decade.
_SECONDS_BUCKETS = [step * 10.0**power for power in range(-4, 2) for step in (1, 2, 5)]


@dataclass(frozen=True)
class _Metric:
    """One family in vLLM's endpoint, and the labels that it starts with at 0."""

    help: str
    labels: tuple[str, ...] = ()
    initial: tuple[tuple[str, ...], ...] = ((),)


def _of(values: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


_COUNTERS = {
    "lookups": _Metric(
        "Lookups of requests' prefixes in kvtierd, by what became of them.",
        ("outcome",),
        _of(LOOKUP_OUTCOMES),
    ),
    "asked_tokens": _Metric(
        "Prompt tokens that kvtierd was asked for, beyond the engine's own hits."
    ),
    "hit_tokens": _Metric("Prompt tokens that kvtierd had, of those it was asked for."),
    "transfers": _Metric(
        "Loads and stores that ended, one a rank, by how they ended.",
        ("direction", "result"),
        tuple((d, r) for d in DIRECTIONS for r in RESULTS),
    ),
    "transfer_bytes": _Metric(
        "KV bytes moved between the engine and kvtierd, all ranks together.",
        ("direction",),
        _of(DIRECTIONS),
    ),
    "stores_skipped": _Metric(
        "Stores that the policy wanted and that were not begun, by reason.",
        ("reason",),
        _of(SKIP_REASONS),
    ),
}
_HISTOGRAMS = {
    "lookup_seconds": _Metric("Time the scheduler waited for a lookup."),
    "load_seconds": _Metric("Time from a load's begin until it ended, a rank."),
    "store_seconds": _Metric("Time from a store's begin until it ended, a rank."),
}
_GAUGES = {
    "attached": _Metric(
        "1 while every session of this role is attached to kvtierd, else 0.",
        ("role",),
        _of(ROLES),
    ),
    "breaker_open": _Metric("1 while lookups are not sent because kvtierd did not answer."),
    "jobs_in_flight": _Metric("Loads and stores under way.", ("direction",), _of(DIRECTIONS)),
}
_WORST_IS_LEAST = frozenset({"attached"})
_LABEL_SEPARATOR = ","


def _label(*values: str) -> str:
    return _LABEL_SEPARATOR.join(values)


def _label_values(label: str) -> tuple[str, ...]:
    return tuple(label.split(_LABEL_SEPARATOR)) if label else ()


@dataclass
class KvtierStats(KVConnectorStats):
    """Counts of one role of the connector since its last `take()`; see the module for the form.

    Any object of this class can be merged into any other: ranks of one step, the scheduler's into
    the workers', steps into an interval of the log.
    """

    def __post_init__(self) -> None:
        self._told: dict[tuple[str, str, str], int] = {}  # gauges, as last taken
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "samples": {}, "gauges": {}}

    def take(self) -> KvtierStats | None:
        """Give away what was counted and start anew; None when there is nothing to tell."""
        if self.is_empty():
            return None
        taken = type(self)(data=self.data)
        for name, by_label in self.data["gauges"].items():
            for label, by_source in by_label.items():
                self._told.update(((name, label, s), value) for s, value in by_source.items())
        self.reset()
        return taken

    def is_empty(self) -> bool:
        return not any(self.data.values())

    # Counting ------------------------------------------------------------------------------------

    def observe_lookup(
        self, seconds: float, hit_tokens: int, asked_tokens: int, outcome: str
    ) -> None:
        """One lookup of a request: the time the scheduler waited (0: the daemon was not asked), how
        many tokens beyond the engine's own hit were found and could have been. `outcome` is one of
        LOOKUP_OUTCOMES."""
        self._count("lookups", 1, outcome)
        self._count("asked_tokens", asked_tokens)
        self._count("hit_tokens", hit_tokens)
        if seconds > 0:
            self._sample("lookup_seconds", seconds)

    def observe_load(self, seconds: float, bytes: int, ok: bool) -> None:
        """A load of one rank has ended: `bytes` arrived; not `ok` when any block did not."""
        self._observe_transfer("load", seconds, bytes, ok)

    def observe_store(self, seconds: float, bytes: int, ok: bool) -> None:
        """A store of one rank has ended: `bytes` were taken; not `ok` when any block was not."""
        self._observe_transfer("store", seconds, bytes, ok)

    def count_skipped(self, reason: str) -> None:
        """A store that the policy wanted was not begun. `reason` is one of SKIP_REASONS."""
        self._count("stores_skipped", 1, reason)

    def set_attached(self, role: str, is_attached: bool, rank: int = 0) -> None:
        """Whether this session (a role of ROLES, and the worker's rank) is attached to kvtierd."""
        self._set("attached", int(is_attached), role, source=str(rank))

    def set_breaker_open(self, is_open: bool) -> None:
        """Whether lookups are answered "miss" without asking, because kvtierd did not answer."""
        self._set("breaker_open", int(is_open))

    def set_inflight(self, loads: int, stores: int) -> None:
        """Jobs under way, as the scheduler counts them (one for all ranks)."""
        self._set("jobs_in_flight", loads, "load")
        self._set("jobs_in_flight", stores, "store")

    def _observe_transfer(self, direction: str, seconds: float, bytes: int, ok: bool) -> None:
        self._count("transfers", 1, direction, "ok" if ok else "failed")
        self._count("transfer_bytes", bytes, direction)
        self._sample(f"{direction}_seconds", seconds)

    def _count(self, name: str, amount: int, *label_values: str) -> None:
        values = self.data["counters"].setdefault(name, {})
        label = _label(*label_values)
        values[label] = values.get(label, 0) + amount

    def _sample(self, name: str, seconds: float) -> None:
        samples = self.data["samples"].setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def _set(self, name: str, value: int, *label_values: str, source: str = "") -> None:
        label = _label(*label_values)
        known = self.data["gauges"].get(name, {}).get(label, {})
        if known.get(source, self._told.get((name, label, source))) == value:
            return  # most steps change nothing
        self.data["gauges"].setdefault(name, {}).setdefault(label, {})[source] = value

    # Merging and reading -------------------------------------------------------------------------

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        """Add `other`, which is the later one where that matters, and return self."""
        for name, values in other.data["counters"].items():
            for label, amount in values.items():
                self._count(name, amount, *_label_values(label))
        for name, samples in other.data["samples"].items():
            kept = self.data["samples"].setdefault(name, [])
            kept.extend(samples[: SAMPLES_MAX - len(kept)])
        for name, by_label in other.data["gauges"].items():
            labels = self.data["gauges"].setdefault(name, {})
            for label, by_source in by_label.items():
                labels.setdefault(label, {}).update(by_source)
        return self

    def counter(self, name: str, *label_values: str) -> int:
        """What was added to a counter: under these labels, or in all when none is given."""
        values = self.data["counters"].get(name, {})
        if label_values:
            return int(values.get(_label(*label_values), 0))
        return int(sum(values.values()))

    def seconds(self, name: str) -> list[float]:
        """The single durations of `lookup_seconds`, `load_seconds` or `store_seconds`."""
        samples: list[float] = self.data["samples"].get(name, [])
        return samples

    def reduce(self) -> dict[str, int | float]:
        """What vLLM writes to its log for an interval, after "KV Transfer metrics:"."""
        hits, asked = self.counter("hit_tokens"), self.counter("asked_tokens")
        return {
            "Hit rate (%)": round(100.0 * hits / asked, 1) if asked else 0.0,
            "Hit tokens": hits,
            "Asked tokens": asked,
            "Lookups": self.counter("lookups"),
            "Lookups failed": self._failed_lookups(),
            "Avg lookup (ms)": _mean_ms(self.seconds("lookup_seconds")),
            "Loaded (MiB)": _mib(self.counter("transfer_bytes", "load")),
            "Avg load (ms)": _mean_ms(self.seconds("load_seconds")),
            "Loads failed": self.counter("transfers", "load", "failed"),
            "Stored (MiB)": _mib(self.counter("transfer_bytes", "store")),
            "Avg store (ms)": _mean_ms(self.seconds("store_seconds")),
            "Stores failed": self.counter("transfers", "store", "failed"),
            "Stores skipped": self.counter("stores_skipped"),
        }

    def _failed_lookups(self) -> int:
        return self.counter("lookups") - sum(
            self.counter("lookups", outcome) for outcome in _ANSWERED
        )


def _mean_ms(seconds: Sequence[float]) -> float:
    return round(1000.0 * sum(seconds) / len(seconds), 3) if seconds else 0.0


def _mib(count_bytes: int) -> float:
    return round(count_bytes / (1 << 20), 2)


class KvtierPromMetrics:
    """The families `vllm:kvtierd_*` in vLLM's Prometheus endpoint.

    vLLM makes one object in the process of its HTTP server, with its own classes for counters,
    gauges and histograms (prometheus_client's, or its wrappers for Ray), and calls `observe` with
    the data of a step and the index of the engine (several with data parallelism). Every label that
    is known beforehand exists with 0 from the start, so that rates over it are right from the first
    increment.
    """

    def __init__(
        self,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        """`metric_types` maps prometheus_client's classes Counter, Gauge and Histogram to those to
        use. They are told by name: prometheus_client is vLLM's dependency, not kvtier's."""
        kinds = {known.__name__: kind for known, kind in metric_types.items()}
        self._engines = {index: tuple(values) for index, values in per_engine_labelvalues.items()}
        self._children: dict[tuple[int, str, str], Any] = {}
        self._sources: dict[tuple[int, str, str], dict[str, float]] = {}
        self._families: dict[str, Any] = {}
        self._make(_COUNTERS, kinds["Counter"], labelnames, {})
        self._make(_GAUGES, kinds["Gauge"], labelnames, {"multiprocess_mode": "mostrecent"})
        self._make(_HISTOGRAMS, kinds["Histogram"], labelnames, {"buckets": _SECONDS_BUCKETS})

    def _make(
        self,
        metrics: Mapping[str, _Metric],
        kind: type,
        labelnames: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        for key, metric in metrics.items():
            self._families[key] = kind(
                name=f"vllm:kvtierd_{key}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **options,
            )
            for index in self._engines:
                for values in metric.initial:
                    self._child(index, key, _label(*values))

    def _child(self, engine_idx: int, key: str, label: str) -> Any:
        """The series of one engine under one label; made (with 0) when it is first asked for."""
        place = (engine_idx, key, label)
        if place not in self._children:
            values = (*self._engines[engine_idx], *_label_values(label))
            self._children[place] = self._families[key].labels(*values)
        return self._children[place]

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what `KvtierStats.to_dict()` of a step holds to the series of one engine."""
        for key, values in transfer_stats_data["counters"].items():
            for label, amount in values.items():
                self._child(engine_idx, key, label).inc(amount)
        for key, samples in transfer_stats_data["samples"].items():
            child = self._child(engine_idx, key, "")
            for seconds in samples:
                child.observe(seconds)
        for key, by_label in transfer_stats_data["gauges"].items():
            for label, by_source in by_label.items():
                known = self._sources.setdefault((engine_idx, key, label), {})
                known.update(by_source)
                worst = min if key in _WORST_IS_LEAST else max
                self._child(engine_idx, key, label).set(worst(known.values()))


class LoggedStats(KvtierStats):
    """What vLLM's log adds up over an interval. Gauges alone are no reason for a line of zeros."""

    def is_empty(self) -> bool:
        return not self.data["counters"]


def build_stats(data: Mapping[str, Any] | None) -> KvtierStats:
    """For `KvtierConnector.build_kv_connector_stats`, which vLLM calls where it logs.

    A copy: several loggers read the same data, and each adds to what it made of it.
    """
    stats = LoggedStats()
    return stats if data is None else stats.aggregate(KvtierStats(data=dict(data)))


def build_prom_metrics(
    metric_types: Mapping[type, type],
    labelnames: Sequence[str],
    per_engine_labelvalues: Mapping[int, Sequence[object]],
) -> KvtierPromMetrics:
    """For `KvtierConnector.build_prom_metrics`."""
    return KvtierPromMetrics(metric_types, labelnames, per_engine_labelvalues)
