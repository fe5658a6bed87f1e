"""Recorded decisions under another policy, and the command's report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import InvalidRequest
from mesh.identity.place import Place, Role, Tier
from mesh.identity.receipt import VerifiedReceipt
from mesh.node.engine import EngineLoad
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState
from placement.policy.model import Policy, parse_policy
from placement.sim.command import labelled, report_of, simulate_both
from placement.sim.replay import Recorded, compare, label_under
from placement.sim.slo import SLO
from tests.placement.sim.helpers import trace

OLD = """\
version: 1
rules: {public: {anywhere: true}, internal: {anywhere: true}}
detectors: {raise_to: {credentials: restricted}}
price: {core_prefill_per_s: 1.0, core_decode_per_s: 1.0}
"""
NEW = """\
version: 1
rules: {public: {anywhere: true}, internal: {sites: [own]}}
detectors: {raise_to: {credentials: restricted}}
"""


def policy(text: str) -> Policy:
    return parse_policy(text, version=1)


def node(node_id: str, tier: Tier, site: str, speed: float = 5000.0) -> NodeFacts:
    place = Place(
        mesh="mesh", role=Role(tier.value), tier=tier, site=site, region="eu", jurisdiction="DE", node_id=node_id
    )
    model = ModelFacts(
        model_id="m", weights_dtype="f16", max_context_tokens=8192, layout_hash="0", weights_lineage="l",
        digest="0" * 64, kv_bytes_per_token=20_000,
    )  # fmt: skip
    load = EngineLoad(
        running=0, waiting=0, waiting_prefill_tokens=0, kv_used_tokens=0, kv_capacity_tokens=32_768,
        prefill_tokens_per_s=speed, decode_tokens_per_s=speed / 100,
    )  # fmt: skip
    return NodeFacts(
        place=place, address="", state=NodeState.READY, models=(model,), load=load, rtt_s=0.02, goodput_bytes_per_s=1e7
    )


NODES = (node("core-1", Tier.CORE, "dc1"), node("edge-a", Tier.EDGE, "a", speed=500.0))
ONE = Recorded(
    request_id="r1", tenant="t", model="m", claimed="internal", label="internal", kinds=frozenset(),
    entry_node_id="edge-a", entry_site="a", prompt_tokens=1000, output_tokens=50, outcome="finished",
)  # fmt: skip
FROM_PLACEMENT = replace(ONE, request_id="r2", entry_node_id="placement-1", entry_site="dc9")


def test_what_moves_what_is_refused_and_what_it_costs() -> None:
    public = replace(ONE, request_id="r3", claimed="public", label="public")
    found = compare([ONE, FROM_PLACEMENT, public], NODES, policy(OLD), policy(NEW), slo=SLO)
    report = report_of(found, SLO)
    assert report.n_requests == 3
    assert report.placed[0] == {"core core-1": 3}
    assert report.placed[1] == {"local edge-a": 1, "refused": 1, "core core-1": 1}
    assert report.moved == 1
    assert [(r, label) for r, label, _ in report.refused] == [("r2", "internal")]
    assert "internal" in report.refused[0][2]
    assert report.price_s[0] > 0.0 == report.price_s[1]
    assert report.slo_ratio[0] == 1.0
    assert report.slo_ratio[1] == pytest.approx(1 / 3)  # edge-a needs over 1.2 s; r2 is refused
    assert report.as_dict()["newly_refused"][0]["request_id"] == "r2"


def test_labels_come_from_claim_default_and_findings() -> None:
    secret = replace(ONE, claimed="", kinds=frozenset({"credential.private_key", "something.else"}))
    kinds = policy(OLD).detection.raise_to
    found = replace(ONE, claimed="", kinds=frozenset({next(iter(kinds)), "something.else"}))
    assert label_under(policy(OLD), found) == "restricted"
    assert label_under(policy(OLD), replace(ONE, claimed="")) == "internal"
    assert label_under(policy(OLD), replace(secret, kinds=frozenset(), not_looked_at=True)) == "restricted"
    with pytest.raises(InvalidRequest):
        label_under(policy("version: 1\nlabels: {order: [open, closed], default: open}\n"), ONE)


def test_a_label_that_the_new_policy_does_not_know_is_a_refusal_that_says_so() -> None:
    other = policy("version: 1\nlabels: {order: [open, closed], default: open}\nrules: {open: {anywhere: true}}\n")
    report = report_of(compare([ONE], NODES, policy(OLD), other, slo=SLO), SLO)
    assert len(report.refused) == 1
    assert "internal" in report.refused[0][2]


def test_what_receipts_cannot_tell_is_said() -> None:
    wider = policy(OLD.replace("credentials: restricted", "credentials: restricted, identifiers: confidential"))
    found = compare([replace(ONE, unseen=True)], NODES, policy(OLD), wider, slo=SLO)
    assert any("did not look for" in note for note in found.notes)
    assert any("some of their findings" in note for note in found.notes)


def test_recorded_reads_a_receipt() -> None:
    body = {
        "request_id": "r", "tenant": "t", "model": "m", "outcome": "finished",
        "label": {"claimed": "", "effective": "restricted", "findings": [{"kind": "k", "start": 0, "end": 3}],
                  "findings_total": 2},
        "usage": {"prompt_tokens": 12, "completion_tokens": 0, "cached_tokens": 3},
    }  # fmt: skip
    read = Recorded.of(VerifiedReceipt(body=body, entry=NODES[1].place, legs=()))
    assert (read.entry_site, read.prompt_tokens, read.output_tokens, read.unseen) == ("a", 12, 1, True)
    assert read.kinds == {"k"}


def test_a_trace_under_two_policies() -> None:
    requests = labelled(trace(120), ["public", "internal"])
    assert {r.label for r in requests} == {"public", "internal"}
    nowhere = policy("version: 1\nrules: {public: {anywhere: true}, internal: {sites: [elsewhere]}}\n")
    report = simulate_both(requests, "regional", policy(OLD), nowhere, SLO)
    n_internal = sum(r.label == "internal" for r in requests)
    assert len(report.refused) == n_internal
    assert report.placed[1]["refused"] == n_internal
    assert report.slo_ratio[1] <= 1 - n_internal / len(requests)
