"""A first token that comes too late everywhere: refused at once, with when to try again."""

from __future__ import annotations

import random
from dataclasses import replace

from mesh.node.engine import EngineLoad
from placement.decide.decide import decide
from placement.decide.types import PlacementRequest, Plan, Refusal
from placement.entry.mesh_view import NodeFacts, build_snapshot
from tests.placement.sim.test_replay import NODES, policy

ANYWHERE = policy("version: 1\nrules: {public: {anywhere: true}}\n")
ASK = PlacementRequest(
    tenant="t", model="m", label="public", prompt_tokens=1000, max_tokens=50, expected_tokens=50, ttft_s=1.0
)


def outcome(request: PlacementRequest, *nodes: NodeFacts) -> Plan | Refusal:
    snapshot = build_snapshot(nodes, entry_node_id="", version=1)
    return decide(snapshot, request, ANYWHERE, entry_site="", now_s=0.0, rng=random.Random(1))


def busy(node: NodeFacts, tokens: int) -> NodeFacts:
    load: EngineLoad = replace(node.load, running=4, waiting=1, waiting_prefill_tokens=tokens)
    return replace(node, load=load)


def test_without_the_deadline_a_late_first_token_is_only_a_cost() -> None:
    assert isinstance(outcome(ASK, busy(NODES[0], 100_000)), Plan)


def test_it_is_refused_where_no_node_has_its_first_token_in_time() -> None:
    """core-1 prefills 5,000 tokens/s: 20 s of queue, of which twice as much may be an error."""
    ask = replace(ASK, ttft_deadline_s=2.0)
    found = outcome(ask, busy(NODES[0], 100_000))
    assert isinstance(found, Refusal)
    assert found.late
    assert found.overloaded
    assert not found.permanent
    assert 0.5 <= found.retry_s <= 30.0
    assert "first token" in found.message
    assert isinstance(outcome(ask, busy(NODES[0], 100_000), NODES[1]), Plan)  # edge-a is idle: 2 s, if off by its error
    assert isinstance(outcome(ask, NODES[0]), Plan)


def test_what_no_idle_node_could_do_is_not_to_be_tried_again() -> None:
    found = outcome(replace(ASK, prompt_tokens=8000, ttft_deadline_s=0.01), *NODES)
    assert isinstance(found, Refusal)
    assert found.permanent
    assert found.retry_s == 0.0


def test_a_request_that_runs_already_is_not_refused_for_it() -> None:
    ask = replace(ASK, ttft_deadline_s=0.001, brings_kv=True)
    assert isinstance(outcome(ask, NODES[0]), Plan)
