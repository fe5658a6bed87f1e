"""Questions about verified receipts: which requests, and where what they are made of has been. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mesh.audit.verify import LoggedLeg, LogReport
from mesh.identity.receipt import VerifiedReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which receipts; None or empty: all. `labels` are effective ones; times are when the request ended."""

    tenant: str = ""
    labels: frozenset[str] = frozenset()
    site: str = ""  # of the entry
    node: str = ""  # that saw the prompt or held its KV
    outcome: str = ""
    request_id: str = ""
    since_unix_s: float | None = None
    until_unix_s: float | None = None

    def matches(self, receipt: VerifiedReceipt) -> bool:
        """Whether it is asked for."""
        body = receipt.body
        ended_s = float(body["ended_unix_s"])
        return (
            self.tenant in ("", body["tenant"])
            and (not self.labels or body["label"]["effective"] in self.labels)
            and self.site in ("", receipt.entry.site)
            and (not self.node or self.node in touched(receipt))
            and self.outcome in ("", body["outcome"])
            and self.request_id in ("", body["request_id"])
            and (self.since_unix_s is None or ended_s >= self.since_unix_s)
            and (self.until_unix_s is None or ended_s < self.until_unix_s)
        )

    def matches_leg(self, leg: LoggedLeg) -> bool:
        """Whether a node's own record of a leg is asked for. Its label is the one that it was ordered under."""
        body = leg.body
        return (
            self.tenant in ("", body["tenant"])
            and (not self.labels or body["label"] in self.labels)
            and self.site in ("", body.get("entry_site"))
            and self.node in ("", leg.place.node_id)
            and self.outcome in ("", body["outcome"])
            and self.request_id in ("", body["request_id"])
            and (self.since_unix_s is None or leg.unix_s >= self.since_unix_s)
            and (self.until_unix_s is None or leg.unix_s < self.until_unix_s)
        )


def touched(receipt: VerifiedReceipt) -> Mapping[str, str]:
    """Node id -> site of all that had the prompt or KV of it: the entry, what it says of others, who signed legs."""
    body: dict[str, Any] = receipt.body
    nodes = {receipt.entry.node_id: receipt.entry.site, **body["saw_prompt"], **body["held_kv"]}
    for _, place in receipt.legs:  # the certificate's word wins over the entry's
        nodes[place.node_id] = place.site
    return nodes


def select(reports: Iterable[LogReport], wanted: Filter) -> Iterator[tuple[LogReport, int, VerifiedReceipt]]:
    """Receipts with their log and entry."""
    for report in reports:
        for seq, receipt in report.receipts:
            if wanted.matches(receipt):
                yield report, seq, receipt


def select_legs(reports: Iterable[LogReport], wanted: Filter) -> Iterator[tuple[LogReport, LoggedLeg]]:
    """Legs as the nodes that ran them kept them, with their log."""
    for report in reports:
        for leg in report.legs:
            if wanted.matches_leg(leg):
                yield report, leg


@dataclass(frozen=True, slots=True, kw_only=True)
class StayedAt:
    """Answer to "did all of these stay at the site?". `left`: (log's node, entry, request id, node ids elsewhere).
    `unvouched`: why the answer may be incomplete; it is proven only if that is empty."""

    n_requests: int
    left: tuple[tuple[str, int, str, tuple[str, ...]], ...]
    unvouched: tuple[str, ...]

    @property
    def proven(self) -> bool:
        """None left, and the logs vouch for the whole time."""
        return not self.left and not self.unvouched


def stayed_at(reports: list[LogReport], wanted: Filter, site: str) -> StayedAt:
    """Check every matching receipt, every leg that a node elsewhere kept of a request without one, and whether the logs
    vouch for the time asked about: intact, begun before it ends, and with a head that another node keeps from after its
    end (or, with no end given, of the last receipt)."""
    left, n = [], 0
    for report, seq, receipt in select(reports, wanted):
        n += 1
        elsewhere = tuple(sorted(node for node, where in touched(receipt).items() if where != site))
        if elsewhere:
            left.append((report.node, seq, str(receipt.body["request_id"]), elsewhere))
    known = {str(receipt.body["request_id"]) for report in reports for _, receipt in report.receipts}
    for report, leg in select_legs(reports, wanted):
        if leg.body["request_id"] not in known and leg.place.site != site:
            left.append((report.node, leg.seq, leg.body["request_id"], (leg.place.node_id,)))
    unvouched = []
    for report in reports:
        unvouched += [f"{report.node}: {problem}" for problem in report.problems]
        last = max((seq for seq, receipt in report.receipts if wanted.matches(receipt)), default=-1)
        until_s = wanted.until_unix_s
        if last > report.witnessed_seq:
            unvouched.append(
                f"{report.node}: entry {last} is asked about, other nodes vouch up to entry {report.witnessed_seq}"
            )
        elif until_s is not None and report.witnessed_unix_s < min(until_s, report.times[-1] if report.times else 0.0):
            unvouched.append(f"{report.node}: no other node vouches for its log up to the end of the time asked about")
    return StayedAt(n_requests=n, left=tuple(left), unvouched=tuple(unvouched))
