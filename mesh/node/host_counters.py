"""What a node counts of itself, as a frozen value for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mesh.errors import MeshError
from mesh.node.histogram import HistogramCounts, TimeHistogram
from mesh.node.port import KvReport


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatistics:
    """Totals since start, and what is there now. `*_failures` are pairs (reason word of mesh.errors, count);
    `kv_skipped_tokens` did not travel because the receiver had them. `ttft`: from a run's start here to its first
    token, of runs that prefilled here; `inter_token`: between two tokens of a run, pauses by a pace included."""

    runs_started_total: int
    runs_finished_total: int
    runs_held_total: int
    run_failures: tuple[tuple[str, int], ...]
    transfers_sent_total: int
    transfers_received_total: int
    transfer_failures: tuple[tuple[str, int], ...]
    kv_sent_bytes_total: int
    kv_received_bytes_total: int
    kv_sent_tokens_total: int
    kv_received_tokens_total: int
    kv_skipped_tokens_total: int
    holds_expired_total: int
    running: int
    holds: int
    transfers: int
    transfers_resumed_total: int = 0
    kv_own_tokens_total: int = 0  # computed here while KV of the rest came
    ttft: HistogramCounts = field(default_factory=lambda: TimeHistogram().freeze())
    inter_token: HistogramCounts = field(default_factory=lambda: TimeHistogram().freeze())


@dataclass(slots=True)
class Counters:
    """The mutable side; owned by the NodeHost."""

    runs_started: int = 0
    runs_finished: int = 0
    runs_held: int = 0
    run_failures: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    transfer_failures: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_tokens: int = 0
    received_tokens: int = 0
    skipped_tokens: int = 0
    holds_expired: int = 0
    resumed: int = 0
    own_tokens: int = 0
    ttft: TimeHistogram = field(default_factory=TimeHistogram)
    inter_token: TimeHistogram = field(default_factory=TimeHistogram)

    def run_failed(self, error: MeshError) -> None:
        self.run_failures[error.reason] += 1

    def transfer_failed(self, error: MeshError) -> None:
        self.transfer_failures[error.reason] += 1

    def sent_kv(self, report: KvReport) -> None:
        self.sent += 1
        self.sent_bytes += report.wire_bytes
        self.sent_tokens += report.tokens - report.skipped_tokens
        self.skipped_tokens += report.skipped_tokens - report.own_tokens

    def received_kv(self, report: KvReport) -> None:
        self.received += 1
        self.received_bytes += report.wire_bytes
        self.received_tokens += report.tokens - report.skipped_tokens
        self.skipped_tokens += report.skipped_tokens - report.own_tokens
        self.own_tokens += report.own_tokens

    def freeze(self, *, running: int, holds: int, transfers: int) -> HostStatistics:
        return HostStatistics(
            runs_started_total=self.runs_started,
            runs_finished_total=self.runs_finished,
            runs_held_total=self.runs_held,
            run_failures=tuple(sorted(self.run_failures.items())),
            transfers_sent_total=self.sent,
            transfers_received_total=self.received,
            transfer_failures=tuple(sorted(self.transfer_failures.items())),
            kv_sent_bytes_total=self.sent_bytes,
            kv_received_bytes_total=self.received_bytes,
            kv_sent_tokens_total=self.sent_tokens,
            kv_received_tokens_total=self.received_tokens,
            kv_skipped_tokens_total=self.skipped_tokens,
            holds_expired_total=self.holds_expired,
            running=running,
            holds=holds,
            transfers=transfers,
            transfers_resumed_total=self.resumed,
            kv_own_tokens_total=self.own_tokens,
            ttft=self.ttft.freeze(),
            inter_token=self.inter_token.freeze(),
        )
