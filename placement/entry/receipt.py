"""The receipt of a request: what happened to it, signed by the entry, each leg signed by the node that ran it.

First form: verifiable offline with mesh.identity.receipt. Pure but for the signature.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from mesh.identity.place import Place
from mesh.identity.receipt import record_to_wire
from mesh.identity.signing import SignedRecord
from mesh.v1 import common_pb2 as common
from placement.decide.types import Candidate, Plan
from placement.detect.label import Raised
from placement.predict.measured import Measured

RECEIPT_FORMAT = 1
MAX_FINDINGS = 32
"""A receipt lists at most this many findings, and the count of all."""


class Signer(Protocol):
    """What signs: a node's identity."""

    @property
    def place(self) -> Place: ...

    def sign(self, body: dict[str, Any]) -> SignedRecord: ...


class ReceiptKeeper(Protocol):
    """Where an entry keeps its receipts for the audit: mesh.audit.log."""

    async def append_receipt(self, receipt: common.Receipt) -> object:
        """Returns once it is kept. Raises MeshError if it is not."""
        ...

    async def check(self) -> None:
        """Raises MeshError while receipts cannot be kept, so that no request is taken that could leave none."""
        ...


@dataclass(slots=True)
class ReceiptDraft:
    """Collected while a request runs; owned by the driver of that request."""

    request_id: str
    tenant: str
    model: str
    claimed_label: str
    raised: Raised
    plan: Plan
    started_unix_s: float
    saw_prompt: dict[str, str] = field(default_factory=dict)  # node id -> site
    held_kv: dict[str, str] = field(default_factory=dict)
    tokens_by_node: Counter[str] = field(default_factory=Counter)
    legs: list[SignedRecord] = field(default_factory=list)
    migrations: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: int = 0
    relays: set[str] = field(default_factory=set)  # nodes that carried what they could not read
    copies: dict[str, str] = field(default_factory=dict)  # entries that kept a copy of prompt and answer -> site
    taken_over: dict[str, Any] = field(default_factory=dict)  # request, entry and tokens that it goes on from
    measured: Measured | None = None  # if it ran as planned

    def touched(self, place: Place) -> None:
        """A node was sent the prompt's tokens, to compute KV of them or to receive it."""
        self.saw_prompt[place.node_id] = place.site
        self.held_kv[place.node_id] = place.site

    def sign(self, signer: Signer, *, outcome: str, ended_unix_s: float, usage: dict[str, int]) -> common.Receipt:
        """The finished receipt."""
        body = {
            "format": RECEIPT_FORMAT,
            "request_id": self.request_id,
            "tenant": self.tenant,
            "model": self.model,
            "label": label_body(self.claimed_label, self.raised),
            "policy_version": self.plan.policy_version,
            "rule": self.plan.rule,
            "entry": signer.place.uri,
            "plan": _way(self.plan.choice),
            "why": self.plan.why,
            "predicted": _predicted(self.plan.choice),
            "measured": _measured(self.measured),
            "candidates": [_way(c) for c in self.plan.candidates[:3]],
            "refused": {r.reason.name or str(r.reason.value): r.count for r in self.plan.refused},
            "saw_prompt": self.saw_prompt | self.copies,
            "held_kv": self.held_kv,
            "relays": sorted(self.relays),
            **({"taken_over": self.taken_over} if self.taken_over else {}),
            "tokens_by_node": dict(self.tokens_by_node),
            "migrations": self.migrations,
            "fallbacks": self.fallbacks,
            "legs": [hashlib.sha256(leg.body).hexdigest() for leg in self.legs],
            "started_unix_s": self.started_unix_s,
            "ended_unix_s": ended_unix_s,
            "usage": usage,
            "outcome": outcome,
        }
        return common.Receipt(record=record_to_wire(signer.sign(body)), legs=[record_to_wire(leg) for leg in self.legs])


def label_body(claimed: str, raised: Raised) -> dict[str, Any]:
    """How the label came about: findings by kind and position, never by value."""
    findings = [{"kind": f.kind, "start": f.start, "end": f.end} for f in raised.findings[:MAX_FINDINGS]]
    body: dict[str, Any] = {"claimed": claimed, "effective": raised.label}
    if findings:
        body |= {"findings": findings, "findings_total": len(raised.findings)}
    if raised.continued:
        body["continued"] = raised.continued
    if raised.conditions:
        body["conditions"] = list(raised.conditions)
    if raised.failure:
        body["not_looked_at"] = raised.failure
    return body


def _predicted(choice: Candidate) -> dict[str, float]:
    return {
        "ttft_s": round(choice.ttft_s, 4),
        "tpot_s": round(choice.tpot_s, 5),
        "total_s": round(choice.total_s, 4),
        "error_ratio": round(choice.error_ratio, 3),
    }


def _measured(measured: Measured | None) -> dict[str, float]:
    """Empty where it did not run as planned."""
    if measured is None:
        return {}
    times = {"ttft_s": round(measured.ttft_s, 4), "total_s": round(measured.total_s, 4)}
    return times if measured.tpot_s is None else times | {"tpot_s": round(measured.tpot_s, 5)}


def _way(candidate: Candidate) -> dict[str, Any]:
    shipped = {"codec": candidate.codec, "own_tokens": candidate.own_tokens} if candidate.codec else {}
    return {
        **shipped,
        "shape": candidate.shape.name.lower(),
        "prefill": candidate.prefill.node_id,
        "decode": candidate.decode.node_id,
        "cost_s": round(candidate.cost_s, 4),
    }
