"""Prefill and decode apart: which pairs there are, when one pays, and what policy and roles forbid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.decide.explain import explain_nodes
from placement.decide.types import PlanShape, Reason, Snapshot, Wish
from placement.policy.model import parse_policy
from tests.placement.decide.meshes import Node, core, edge, request, snapshot
from tests.placement.decide.test_decide import ANYWHERE, plan, refused

APART = PlanShape.DISAGGREGATED


def prefill(node_id: str = "pre-1", **facts: object) -> Node:
    return core(node_id, role="prefill", **facts)


def decode(node_id: str = "dec-1", **facts: object) -> Node:
    return core(node_id, role="decode", **facts)


def mesh(*nodes: Node) -> Snapshot:
    return snapshot(nodes)


def test_nodes_with_half_a_role_work_in_pairs() -> None:
    chosen = plan(mesh(prefill(), decode()), request(1000))
    assert (chosen.choice.shape, chosen.choice.prefill.node_id, chosen.choice.decode.node_id) == (
        APART,
        "pre-1",
        "dec-1",
    )
    assert [c.shape for c in chosen.candidates] == [APART]
    assert chosen.refused == ()


def test_nodes_that_do_both_are_no_pair() -> None:
    assert {c.shape for c in plan(mesh(core("core-1"), core("core-2")), request(4000)).candidates} == {PlanShape.CORE}
    one_role = plan(mesh(core("core-1"), decode()), request(4000))
    assert {(c.shape, c.prefill.node_id, c.decode.node_id) for c in one_role.candidates} == {
        (PlanShape.CORE, "core-1", "core-1"),
        (APART, "core-1", "dec-1"),
    }


def test_a_pair_is_taken_where_it_pays_and_only_there() -> None:
    def shape(tokens: int, **busy: object) -> PlanShape:
        return plan(mesh(core("core-1", **busy), prefill(), decode()), request(tokens)).choice.shape

    assert shape(4000) is PlanShape.CORE  # nobody is there to be disturbed, and KV would have to move
    assert shape(4000, running=8, decode_tokens_per_s=50.0) is APART
    assert shape(20) is PlanShape.CORE


def test_a_link_that_is_slower_than_decoding_beside_others_does_not_pay() -> None:
    far = {"site": "dc2", "goodput_bytes_per_s": 1e5}
    busy = core("core-1", running=2)
    assert plan(mesh(busy, decode(**far)), request(4000)).choice.shape is PlanShape.CORE


def test_interference_is_no_cost_where_every_node_does_both() -> None:
    alone = plan(mesh(core("core-1", running=4)), request(4000)).choice
    beside = plan(mesh(core("core-1", running=4), decode(ready=False)), request(4000)).choice
    assert alone.cost_s < beside.cost_s
    assert alone.total_s == beside.total_s  # it is the others who pay


def test_decode_nodes_alone_are_refused_clearly() -> None:
    found = refused(mesh(decode("dec-1"), decode("dec-2")), request(1000))
    assert found.permanent
    assert [(r.reason, r.node_ids) for r in found.refused] == [(Reason.ROLE, ("dec-1", "dec-2"))]
    assert "2 prefill or decode only, and no node is there for the other half" in found.message
    verdicts = explain_nodes(mesh(decode("dec-1")), request(1000), ANYWHERE, entry_site="paris")
    assert verdicts[0].refused[0].startswith("role: ")


def test_decode_nodes_take_what_needs_next_to_no_prefill() -> None:
    assert plan(mesh(decode()), request(16)).choice.shape is PlanShape.CORE
    assert refused(mesh(decode()), request(17)).permanent


def test_a_prefill_node_that_is_down_is_what_is_missing() -> None:
    found = refused(mesh(prefill(ready=False), decode()), request(1000))
    assert not found.permanent
    assert "pre-1 (not ready)" in found.message


def test_a_node_that_does_both_is_used_with_a_decode_node_or_alone() -> None:
    chosen = plan(mesh(core("core-1"), decode()), request(1000))
    assert chosen.choice.prefill.node_id == "core-1"
    assert {c.shape for c in chosen.candidates} == {PlanShape.CORE, APART}


def test_a_split_and_an_offload_keep_to_roles() -> None:
    nodes = (prefill(), decode(), edge("paris", prefill_tokens_per_s=50.0))
    split, offload = (
        plan(snapshot(nodes, entry="edge-paris"), request(3000, wish=Wish(shape=shape)))
        for shape in (PlanShape.SPLIT, PlanShape.OFFLOAD)
    )
    assert {c.prefill.node_id for c in split.candidates} == {"pre-1"}
    assert {c.decode.node_id for c in offload.candidates} == {"dec-1"}


def test_policy_holds_at_both_ends() -> None:
    fr = parse_policy("version: 1\nrules: {internal: {nodes: [pre-1, dec-1]}}", version=1)
    found = plan(mesh(prefill(), prefill("pre-2"), decode(), decode("dec-2")), request(1000), fr)
    assert {(c.prefill.node_id, c.decode.node_id) for c in found.candidates} == {("pre-1", "dec-1")}
    kv = parse_policy(
        "version: 1\nrules: {internal: {anywhere: true}}\nkv_rules: {internal: {nodes: [dec-2]}}", version=1
    )
    found = plan(mesh(prefill(), decode(), decode("dec-2")), request(1000), kv)
    assert {c.decode.node_id for c in found.candidates} == {"dec-2"}
    assert refused(mesh(prefill(), decode()), request(1000), kv).refused[0].reason is Reason.ROLE


@pytest.mark.parametrize(
    ("wish", "pair"), [({"node_id": "dec-2"}, "dec-2"), ({"shape": APART, "node_id": "dec-1"}, "dec-1")]
)
def test_a_wish_chooses_where_it_decodes(wish: dict[str, object], pair: str) -> None:
    nodes = (core("core-1"), prefill(), decode(), decode("dec-2", running=8))
    found = plan(mesh(*nodes), request(1000, wish=Wish(**wish)))  # type: ignore[arg-type]
    assert (found.choice.shape, found.choice.decode.node_id) == (APART, pair)


def test_a_wish_for_a_pair_that_is_not_there() -> None:
    found = refused(mesh(core("core-1"), core("core-2")), request(1000, wish=Wish(shape=APART)))
    assert "shape disaggregated" in found.message or found.refused[0].reason is Reason.WISH


def test_a_move_goes_to_a_node_that_decodes() -> None:
    moved = replace(request(1000), brings_kv=True, exclude=frozenset({"dec-2"}))
    assert plan(mesh(prefill(), decode(), decode("dec-2")), moved).candidates[0].decode.node_id == "dec-1"
    wished = replace(moved, wish=Wish(shape=PlanShape.CORE, node_id="pre-1"))
    assert refused(mesh(prefill(), decode()), wished).permanent


def test_fallbacks_of_a_pair_are_other_pairs_and_nodes_that_do_both() -> None:
    nodes = (prefill(), prefill("pre-2"), decode(), decode("dec-2"), core("core-1", running=4))
    found = plan(mesh(*nodes), request(4000))
    assert found.choice.shape is APART
    used = {found.choice.prefill.node_id, found.choice.decode.node_id}
    assert any(not used & {c.prefill.node_id, c.decode.node_id} for c in found.fallbacks)
