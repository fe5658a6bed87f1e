"""Prometheus metrics of one process. Labels come from enums and from the error tree, never from a caller's words.

Each process makes one `Metrics`; nothing is global. What the node already counts (HostStatistics, EngineLoad) is
read when Prometheus asks, not counted a second time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from statistics import median

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mesh import __version__
from mesh.errors import MeshError, walk
from mesh.node.engine import EngineLoad
from mesh.node.histogram import HistogramCounts
from mesh.node.host_counters import HostStatistics

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ERROR_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0)
_MEDIAN_OF = 256
_REASONS = frozenset({"OK", *(error.reason for error in walk() if error is not MeshError)})


class Shape(Enum):
    """Plan shapes as label values; NONE: refused before there was a plan."""

    NONE = "none"
    LOCAL = "local"
    CORE = "core"
    SPLIT = "split"
    OFFLOAD = "offload"
    DISAGGREGATED = "disaggregated"


class MoveCause(Enum):
    """Why a request moved, as on the wire."""

    PLAN = "plan"
    OPERATOR = "operator"
    DRAIN = "drain"
    OVERLOAD = "overload"
    LINK = "link"
    FALLBACK = "fallback"


@dataclass(slots=True)
class RequestTotals:
    """Ended requests since the process began."""

    ok: int = 0
    failed: int = 0
    generated_tokens: int = 0


class PredictedTime(Enum):
    """What placement predicts of a request, as label values."""

    TTFT = "ttft"
    TPOT = "tpot"
    TOTAL = "total"


class Metrics:
    """The metrics of one process and their text form."""

    def __init__(self, *, node_id: str, role: str) -> None:
        self.registry = CollectorRegistry()
        self.totals = RequestTotals()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Info(node_id=node_id, role=role))
        self._requests = Counter(
            "kvmesh_requests",
            "Requests that ended, by outcome and plan shape",
            ("outcome", "shape"),
            registry=self.registry,
        )
        self._tokens = Counter("kvmesh_request_tokens", "Tokens of ended requests", ("kind",), registry=self.registry)
        self._ttft = Histogram(
            "kvmesh_request_ttft_seconds", "Time to first token as the entry saw it", ("shape",),
            buckets=_LATENCY_S, registry=self.registry,
        )  # fmt: skip
        self._moves = Counter(
            "kvmesh_request_moves", "Moves of running requests, by cause and outcome", ("cause", "outcome"),
            registry=self.registry,
        )  # fmt: skip
        self._pause = Histogram(
            "kvmesh_move_pause_seconds",
            "Pause between two tokens at a move",
            buckets=_LATENCY_S,
            registry=self.registry,
        )

        self._prediction = Histogram(
            "kvmesh_prediction_error_ratio",
            "How far a predicted time was off, as a share of the measured one",
            ("time",),
            buckets=_ERROR_RATIOS,
            registry=self.registry,
        )
        self._error_ratios: dict[PredictedTime, deque[float]] = {t: deque(maxlen=_MEDIAN_OF) for t in PredictedTime}
        middle = Gauge(
            "kvmesh_prediction_error_median_ratio",
            f"The median of the last {_MEDIAN_OF} of them; not a number before the first",
            ("time",),
            registry=self.registry,
        )
        for kind in PredictedTime:
            middle.labels(kind.value).set_function(partial(self.median_error, kind))

    def predicted(self, kind: PredictedTime, error_ratio: float) -> None:
        """Count how far a prediction was off: |measured - predicted| / measured."""
        self._prediction.labels(kind.value).observe(error_ratio)
        self._error_ratios[kind].append(error_ratio)

    def median_error(self, kind: PredictedTime) -> float:
        """Median of the last errors; NaN before the first."""
        ratios = self._error_ratios[kind]
        return median(ratios) if ratios else math.nan

    def request_ended(
        self,
        *,
        outcome: str,
        shape: Shape,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        generated_tokens: int = 0,
        ttft_s: float | None = None,
    ) -> None:
        """Count a request once, at its end. `outcome`: OK or the reason word of the error."""
        self._requests.labels(_reason(outcome), shape.value).inc()
        self.totals.ok += outcome == "OK"
        self.totals.failed += outcome != "OK"
        self.totals.generated_tokens += generated_tokens
        for kind, count in (("prompt", prompt_tokens), ("cached", cached_tokens), ("generated", generated_tokens)):
            self._tokens.labels(kind).inc(count)
        if ttft_s is not None:
            self._ttft.labels(shape.value).observe(ttft_s)

    def request_moved(self, *, cause: MoveCause, outcome: str, pause_s: float | None = None) -> None:
        """Count a move, done or failed."""
        self._moves.labels(cause.value, _reason(outcome)).inc()
        if pause_s is not None:
            self._pause.observe(pause_s)

    def watch_host(self, read: Callable[[], HostStatistics]) -> None:
        """Show a node's own counts; `read` is called at each scrape."""
        self.registry.register(_Host(read))

    def watch_load(self, read: Callable[[], EngineLoad | None]) -> None:
        """Show the engine's load as last reported; None: nothing yet."""
        self.registry.register(_Load(read))

    def watch(self, collector: Collector) -> None:
        """Show what a collector of mesh.telemetry.mesh_metrics reads."""
        self.registry.register(collector)

    def watch_waiting(self, read: Callable[[], int]) -> None:
        """Show how many requests wait at this entry for their turn."""
        gauge = Gauge("kvmesh_requests_waiting", "Requests that wait for their turn", registry=self.registry)
        gauge.set_function(read)

    def render(self) -> bytes:
        """The text that Prometheus scrapes, to be served as CONTENT_TYPE."""
        return generate_latest(self.registry)


class _Info(Collector):
    def __init__(self, **facts: str) -> None:
        self._facts = {"version": __version__, **facts}

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("kvmesh_build", "This process", value=self._facts)


class _Host(Collector):
    """HostStatistics as metrics."""

    def __init__(self, read: Callable[[], HostStatistics]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        runs = CounterMetricFamily("kvmesh_runs", "Runs of this node, by outcome", labels=("outcome",))
        for outcome, count in (("OK", now.runs_finished_total), ("HELD", now.runs_held_total), *now.run_failures):
            runs.add_metric((outcome,), count)
        yield runs
        failures = CounterMetricFamily("kvmesh_kv_transfer_failures", "KV transfers that failed", labels=("reason",))
        for reason, count in now.transfer_failures:
            failures.add_metric((reason,), count)
        yield failures
        yield from _by_direction(
            "kvmesh_kv_transfers", "KV transfers", now.transfers_sent_total, now.transfers_received_total
        )
        yield from _by_direction(
            "kvmesh_kv_wire_bytes", "KV bytes on the wire", now.kv_sent_bytes_total, now.kv_received_bytes_total
        )
        yield from _by_direction(
            "kvmesh_kv_tokens", "Tokens whose KV moved", now.kv_sent_tokens_total, now.kv_received_tokens_total
        )
        yield CounterMetricFamily(
            "kvmesh_kv_skipped_tokens", "Tokens the receiver had", value=now.kv_skipped_tokens_total
        )
        yield CounterMetricFamily(
            "kvmesh_kv_own_tokens", "Tokens computed here while KV of the rest came", value=now.kv_own_tokens_total
        )
        yield CounterMetricFamily(
            "kvmesh_holds_expired", "Holds freed because nobody came", value=now.holds_expired_total
        )
        yield _histogram("kvmesh_run_ttft_seconds", "Start of a run here to its first token", now.ttft)
        yield _histogram("kvmesh_run_inter_token_seconds", "Between two tokens of a run", now.inter_token)
        yield GaugeMetricFamily("kvmesh_holds", "Holds in memory", value=now.holds)
        yield GaugeMetricFamily("kvmesh_kv_transfers_open", "KV transfers in progress", value=now.transfers)


class _Load(Collector):
    """EngineLoad as metrics."""

    def __init__(self, read: Callable[[], EngineLoad | None]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        load = self._read()
        if load is None:
            return
        for name, text, value in (
            ("engine_running", "Sequences that compute", load.running),
            ("engine_waiting", "Sequences that wait", load.waiting),
            ("engine_waiting_prefill_tokens", "Prompt tokens that wait", load.waiting_prefill_tokens),
            ("engine_kv_used_tokens", "KV tokens in use", load.kv_used_tokens),
            ("engine_kv_capacity_tokens", "KV tokens in all", load.kv_capacity_tokens),
            (
                "engine_kv_used_ratio",
                "Share of the KV tokens in use",
                load.kv_used_tokens / max(1, load.kv_capacity_tokens),
            ),
            ("engine_prefill_tokens_per_second", "Measured prefill speed", load.prefill_tokens_per_s),
            ("engine_decode_tokens_per_second", "Measured decode speed of one sequence", load.decode_tokens_per_s),
        ):
            yield GaugeMetricFamily(f"kvmesh_{name}", text, value=value)
        for name, text, total in (
            ("engine_preempted", "Sequences preempted", load.preempted_total),
            ("engine_cached_tokens", "Prompt tokens found in the prefix cache", load.cached_tokens_total),
            ("engine_prompt_tokens", "Prompt tokens", load.prompt_tokens_total),
            ("engine_steps", "Steps computed", load.steps_total),
        ):
            yield CounterMetricFamily(f"kvmesh_{name}", text, value=total)
        parts = CounterMetricFamily("kvmesh_engine_step_seconds", "Time of steps, by part", labels=("part",))
        for part, total_s in load.step_seconds_total:
            parts.add_metric((part,), total_s)
        yield parts


def _by_direction(name: str, text: str, sent: int, received: int) -> Iterator[Metric]:
    family = CounterMetricFamily(name, text, labels=("direction",))
    family.add_metric(("sent",), sent)
    family.add_metric(("received",), received)
    yield family


def _histogram(name: str, text: str, counts: HistogramCounts) -> HistogramMetricFamily:
    buckets = zip((*map(str, counts.bounds_s), "+Inf"), counts.at_most, strict=True)
    return HistogramMetricFamily(name, text, buckets=list(buckets), sum_value=counts.sum_s)


def _reason(outcome: str) -> str:
    """The word itself if the error tree knows it: a peer's newer word must not become a new time series."""
    word = outcome.upper()
    return word if word in _REASONS else "INTERNAL"
