"""Ship, recompute or both: the arithmetic, what policy and nodes allow, and what is said about it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.decide.decide import decide
from placement.decide.filters import filter_nodes
from placement.decide.scores import NodeTimes, node_times
from placement.decide.settings import DEFAULTS
from placement.decide.ship import _Pair, _pair, shipping
from placement.decide.ship_one import ship_one
from placement.decide.types import PlacementRequest, Plan, PlanShape, Refusal, Shipment, Snapshot, Wish
from placement.policy.model import parse_policy
from placement.policy.rules import Policy, Prices
from tests.placement.decide.meshes import CODECS, Node, core, edge, request, snapshot

ALL = tuple(CODECS)
ANYWHERE = "version: 1\nrules: {internal: {anywhere: true}}\nprice: {core_decode_per_s: 100}\n"
NO_TIES = replace(DEFAULTS, near_best_ratio=0.0)


def policy(extra: str = "") -> Policy:
    return parse_policy(ANYWHERE + extra, version=1)


def link(
    mbit: float, rtt_s: float = 0.04, *, cached: int = 0, edge_speed: float = 300.0, codecs: tuple[str, ...] = ALL
):  # type: ignore[no-untyped-def]
    """A core behind a link, seen from an edge entry."""
    far = core(rtt_s=rtt_s, goodput_bytes_per_s=mbit * 1e6 / 8, cached_tokens=cached, codecs=codecs)
    return snapshot([far, edge("a", prefill_tokens_per_s=edge_speed, codecs=codecs)], entry="edge-a")


def decided(snap: Snapshot, req: PlacementRequest | None = None, rules: Policy | None = None) -> Plan:
    found = decide(
        snap, req or request(2048), rules or policy(), entry_site="a", now_s=0.0, rng=random.Random(1), settings=NO_TIES
    )
    assert isinstance(found, Plan)
    return found


def test_over_a_thin_link_the_smallest_allowed_codec_is_taken() -> None:
    choice = decided(link(5)).choice
    assert (choice.shape, choice.codec) == (PlanShape.SPLIT, "small")


def test_over_a_fat_link_nothing_is_lost() -> None:
    choice = decided(link(10_000, 0.002)).choice
    assert (choice.shape, choice.codec) == (PlanShape.SPLIT, "f16")


def test_what_policy_does_not_accept_is_not_taken() -> None:
    assert decided(link(5), rules=policy("kv_max_loss_ratio: 0.05")).choice.codec == "tiny"
    lossless = decided(link(5), rules=policy("kv_max_loss_ratio: 0"))
    assert lossless.choice.codec in ("", "f16")
    assert {o.codec for o in lossless.shipping if not o.refused} == {"", "f16"}


def test_a_codec_that_one_end_lacks_is_not_taken() -> None:
    far = core(rtt_s=0.04, goodput_bytes_per_s=5e6 / 8, codecs=ALL)
    near = edge("a", prefill_tokens_per_s=300.0, codecs=("f16", "q8_0"))
    plan = decided(snapshot([far, near], entry="edge-a"))
    assert plan.choice.codec in ("", "f16", "q8_0")
    assert any(o.refused == "edge-a does not have it" for o in plan.shipping if o.codec == "small")


def test_where_shipping_loses_it_is_said() -> None:
    plan = decided(link(20, codecs=("f16",)), request(512))
    assert plan.choice.shape in (PlanShape.LOCAL, PlanShape.SPLIT)
    only_f16 = replace(policy(), kv_max_loss_ratio=0.0)
    slow = decided(link(5, codecs=("f16",), edge_speed=3000.0), request(512), only_f16)
    assert slow.choice.shape is PlanShape.LOCAL
    assert slow.why.startswith("prefill here takes 0.1")
    assert "f16 over this link" in slow.why


def test_with_kv_that_is_there_the_receiver_computes_the_head_meanwhile() -> None:
    plan = decided(link(100, cached=2047, codecs=("f16",)))
    choice = plan.choice
    assert choice.own_tokens % 16 == 0
    assert 256 < choice.own_tokens < 2000
    ship = next(o for o in plan.shipping if o.codec == "f16" and not o.own_tokens)
    local = next(o for o in plan.shipping if not o.codec)
    assert choice.ttft_s < 0.8 * min(ship.ttft_s, local.ttft_s)
    assert f"the first {choice.own_tokens} tokens computed there meanwhile" in plan.why


def test_both_ends_end_together() -> None:
    snap = link(100, cached=2047, codecs=("f16",))
    pair = _pair_of(snap, 2048)
    point = pair.meeting_point()
    tail, own = pair.tail_s(point)[0], pair.own_s(point)[0]
    assert tail == pytest.approx(own, abs=0.12)  # a block of the receiver's prefill


def test_the_wish_names_codec_and_way() -> None:
    both = decided(link(100, cached=2047), request(2048, wish=Wish(shape=PlanShape.SPLIT, codec="f16")))
    assert both.choice.codec == "f16"
    ship = Wish(shape=PlanShape.SPLIT, codec="q8_0", shipment=Shipment.SHIP)
    plan = decided(link(100, cached=2047), request(2048, wish=ship))
    assert (plan.choice.codec, plan.choice.own_tokens) == ("q8_0", 0)
    assert any(o.refused == "not what the placement wish asks for" for o in plan.shipping if o.codec == "f16")


@pytest.mark.parametrize("codec", ["tiny", "none"])
def test_a_wish_does_not_go_beyond_quality_or_what_there_is(codec: str) -> None:
    wish = Wish(shape=PlanShape.SPLIT, codec=codec)
    found = decide(
        link(5), request(2048, wish=wish), policy(), entry_site="a", now_s=0.0, rng=random.Random(1)
    )  # fmt: skip
    assert isinstance(found, Refusal)
    assert found.permanent
    assert codec in found.message
    assert found.denied == (codec == "tiny")


def _times(snap: Snapshot, req: PlacementRequest) -> NodeTimes:
    filtered = filter_nodes(snap, req, policy(), entry_site="", now_s=0.0, settings=DEFAULTS)
    return node_times(snap, req, Prices(), filtered, DEFAULTS)


def _pair_of(snap: Snapshot, prompt_tokens: int) -> _Pair:
    req = request(prompt_tokens)
    times = _times(snap, req)
    return _pair(snap, times, req, np.array([0]), np.array([1]), DEFAULTS)


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.sampled_from([100, 1024, 4096]),
    mbit=st.sampled_from([1.0, 5.0, 20.0, 100.0, 1000.0]),
    rtt_s=st.sampled_from([0.002, 0.04, 0.15]),
    cached=st.sampled_from([0, 512, 4095]),
    own_cached=st.sampled_from([0, 64]),
    curve=st.sampled_from([(0.003, 0.0), (0.002, 1e-6), (0.0004, 1e-7)]),
    waiting=st.sampled_from([0, 900]),
)
def test_no_other_meeting_point_is_much_better(
    prompt: int, mbit: float, rtt_s: float, cached: int, own_cached: int, curve: tuple[float, float], waiting: int
) -> None:
    """The closed form against trying every block."""
    cached, own_cached = min(cached, prompt - 1), min(own_cached, prompt - 1)
    nodes = [
        core(rtt_s=rtt_s, goodput_bytes_per_s=mbit * 1e6 / 8, cached_tokens=cached, codecs=ALL),
        edge(
            "a",
            prefill_token_s=curve[0],
            prefill_growth_s=curve[1],
            cached_tokens=own_cached,
            waiting_prefill_tokens=waiting,
            codecs=ALL,
        ),
    ]
    snap, req = snapshot(nodes, entry="edge-a"), request(prompt)
    times = _times(snap, req)
    found = shipping(snap, times, req, np.array([0]), np.array([1]), DEFAULTS)
    for i, one in enumerate(ship_one(snap, times, req, 0, 1, DEFAULTS)):  # the same in plain numbers
        assert (one.ship_s, one.both_s) == pytest.approx((found.ship_s[i, 0, 0], found.both_s[i, 0, 0]))
        assert one.own_tokens == found.own_tokens[i, 0, 0]
    pair = _pair_of(snap, prompt)
    tried = [
        np.maximum(pair.tail_s(np.full((4, 1, 1), float(p))), pair.own_s(np.full((4, 1, 1), float(p))))
        for p in range(own_cached - own_cached % 16, max(prompt - 16, own_cached), 16)
    ]
    best = np.min(tried, axis=0)[:, 0, 0]
    ours = np.minimum(found.ship_s, found.both_s)[:, 0, 0]
    assert (ours <= best * 1.1 + 0.05).all()
    assert (found.ship_s >= times.wait_s[1]).all()


def test_cost_of_a_decision_over_many_sites() -> None:
    """4,000 sites: what a decision computes is arrays, whatever their number."""
    nodes: list[Node] = [core(f"core-{i}") for i in range(4)]
    nodes += [edge(f"s{i}", codecs=ALL) for i in range(4000)]
    found = decide(snapshot(nodes), request(2048), policy(), entry_site="", now_s=0.0, rng=random.Random(1))
    assert isinstance(found, Plan)
    assert len(found.candidates) <= 4 * DEFAULTS.candidates_per_shape
