"""Properties of every decision, over random meshes, policies and requests."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.identity.place import Tier
from placement.decide.decide import decide
from placement.decide.explain import explain_nodes
from placement.decide.types import PlacementRequest, Plan, PlanShape, Shipment, Snapshot, Wish
from placement.policy.model import DataKind, Policy, parse_policy
from tests.placement.decide.meshes import CODECS, Node, request, snapshot

SITES = ("a", "b", "c")
LABELS = ("public", "internal", "restricted")


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    found = []
    for i in range(draw(st.integers(0, 7))):
        found.append(
            Node(
                node_id=f"n{i}",
                tier=draw(st.sampled_from(["core", "edge"])),
                site=draw(st.sampled_from(SITES)),
                models=draw(st.sampled_from([("smol",), ("smol", "big"), ("big",)])),
                ready=draw(st.integers(0, 4)) > 0,
                draining=draw(st.integers(0, 6)) == 0,
                reachable=draw(st.integers(0, 6)) > 0,
                age_s=draw(st.sampled_from([0.0, 1.0, 10.0, 100.0])),
                running=draw(st.integers(0, 9)),
                waiting=draw(st.sampled_from([0, 0, 3, 70])),
                waiting_prefill_tokens=draw(st.integers(0, 5000)),
                kv_free_tokens=draw(st.sampled_from([0, 500, 100_000])),
                max_context_tokens=draw(st.sampled_from([512, 8192])),
                prefill_tokens_per_s=draw(st.sampled_from([0.0, 100.0, 5000.0])),
                decode_tokens_per_s=draw(st.sampled_from([0.0, 20.0, 100.0])),
                rtt_s=draw(st.sampled_from([float("nan"), 0.001, 0.2])),
                goodput_bytes_per_s=draw(st.sampled_from([float("nan"), 1e6, 1e9])),
                cached_tokens=draw(st.sampled_from([0, 64])),
                prefill_token_s=draw(st.sampled_from([0.0, 0.002])),
                prefill_growth_s=draw(st.sampled_from([0.0, 1e-6])),
                codecs=draw(st.sampled_from([("f16",), ("f16", "small"), ("q8_0", "small", "tiny"), ()])),
            )
        )
    return found


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    def rule() -> object:
        return draw(
            st.sampled_from(
                [
                    {"anywhere": True},
                    {"tiers": ["core"]},
                    {"tiers": ["edge"]},
                    {"sites": ["own"]},
                    {"sites": ["a", "b"]},
                ]
            )
        )

    rules = {label: rule() for label in LABELS if draw(st.booleans())}
    kv_rules = {label: rule() for label in LABELS if draw(st.integers(0, 2)) == 0}
    document = {
        "version": 1,
        "labels": {"order": list(LABELS), "default": "internal"},
        "rules": rules,
        "kv_rules": kv_rules,
        "fallback": draw(st.sampled_from(["allowed", "allowed", "none"])),
        "kv_max_loss_ratio": draw(st.sampled_from([0.0, 0.01, 0.05])),
        "price": {"core_decode_per_s": draw(st.sampled_from([0.0, 5.0]))},
    }
    return parse_policy(json.dumps(document), version=2)


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    return request(
        draw(st.sampled_from([1, 2, 300, 3000])),
        label=draw(st.sampled_from(LABELS)),
        wish=Wish(
            shape=draw(st.none() | st.sampled_from(PlanShape)),
            site=draw(st.sampled_from(["", "", "a", "z"])),
            tier=draw(st.none() | st.none() | st.sampled_from(Tier)),
            codec=draw(st.sampled_from(["", "", "", "small", "tiny", "none"])),
            shipment=draw(st.none() | st.none() | st.sampled_from(Shipment)),
        ),
        exclude=draw(st.lists(st.sampled_from(["n0", "n1"]), max_size=1)),
        ttft_s=draw(st.none() | st.just(0.5)),
    )


MESHES = st.tuples(nodes(), st.sampled_from(["", "n0", "n1"]))


def mesh(drawn: tuple[list[Node], str], order: list[int] | None = None) -> Snapshot:
    found, entry = drawn
    return snapshot([found[i] for i in order] if order is not None else found, entry=entry)


@settings(max_examples=150, deadline=None)
@given(MESHES, policies(), requests(), st.integers(0, 2**32), st.sampled_from(["", *SITES]))
def test_every_way_of_a_plan_obeys_policy_filters_and_wish(
    drawn: tuple[list[Node], str], policy: Policy, req: PlacementRequest, seed: int, site: str
) -> None:
    snap = mesh(drawn)
    found = decide(snap, req, policy, entry_site=site, now_s=0.0, rng=random.Random(seed))
    verdicts = {v.place.node_id: v.refused for v in explain_nodes(snap, req, policy, entry_site=site)}
    if not isinstance(found, Plan):
        assert all(verdicts.values()), "a node was refused without a reason"
        assert found.permanent == (not found.missing)
        assert not (found.denied and not found.permanent)
        assert found.rule
        assert all(node_id in found.message for node_id in found.missing[:8])
        return
    facts = {n.node_id: n for n in drawn[0]}
    assert found.candidates[0] is found.choice
    assert len(found.fallbacks) <= (4 if policy.fallback else 0)
    assert set(found.fallbacks) <= set(found.candidates)
    assert len(set(found.candidates)) == len(found.candidates)
    for way in found.candidates:
        for place in {way.prefill, way.decode}:
            assert policy.allows(req.label, place, entry_site=site, kind=DataKind.PROMPT)
            node = facts[place.node_id]
            assert node.ready
            assert not node.draining
            assert node.reachable or drawn[1] == place.node_id
            assert "smol" in node.models
            assert place.node_id not in req.exclude
            assert verdicts[place.node_id] == ()
        if way.prefill != way.decode:
            assert way.shape in (PlanShape.SPLIT, PlanShape.OFFLOAD)
            assert policy.allows(req.label, way.decode, entry_site=site, kind=DataKind.KV)
            assert {way.prefill.tier, way.decode.tier} == {Tier.CORE, Tier.EDGE}
        if way.shape is PlanShape.SPLIT:
            assert all(way.codec in facts[place.node_id].codecs for place in (way.prefill, way.decode))
            assert CODECS[way.codec][1] <= policy.kv_max_loss_ratio
            assert req.wish.codec in ("", way.codec)
            assert 0 <= way.own_tokens < req.prompt_tokens
            assert way.own_tokens % 16 == 0
            assert req.wish.shipment in (None, Shipment.BOTH if way.own_tokens else Shipment.SHIP)
        else:
            assert (way.codec, way.own_tokens) == ("", 0)
        assert req.wish.shape in (None, way.shape)
        assert req.wish.site in ("", way.decode.site)
        assert req.wish.tier in (None, way.decode.tier)
        assert 0 < way.ttft_s <= way.total_s <= way.cost_s < float("inf")
    rest = [c.cost_s for c in found.candidates[1:]]
    assert rest == sorted(rest)
    assert found.choice.cost_s <= min([found.choice.cost_s, *rest]) * 1.02


@settings(max_examples=80, deadline=None)
@given(MESHES, policies(), requests(), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_same_inputs_and_seed_same_decision_in_any_order_of_nodes(
    drawn: tuple[list[Node], str], policy: Policy, req: PlacementRequest, seed: int, shuffle: random.Random
) -> None:
    order = list(range(len(drawn[0])))
    shuffle.shuffle(order)
    first, again = (
        decide(snap, req, policy, entry_site="a", now_s=0.0, rng=random.Random(seed))
        for snap in (mesh(drawn), mesh(drawn, order))
    )
    assert first == again


@settings(max_examples=50, deadline=None)
@given(MESHES, requests(), st.integers(0, 2**32))
def test_a_label_without_a_rule_never_leaves_its_site(
    drawn: tuple[list[Node], str], req: PlacementRequest, seed: int
) -> None:
    strict = parse_policy("version: 1\nrules: {public: {anywhere: true}}", version=1)
    req = request(req.prompt_tokens, label="internal", wish=req.wish)
    found = decide(mesh(drawn), req, strict, entry_site="a", now_s=0.0, rng=random.Random(seed))
    if isinstance(found, Plan):
        assert {place.site for c in found.candidates for place in (c.prefill, c.decode)} == {"a"}
