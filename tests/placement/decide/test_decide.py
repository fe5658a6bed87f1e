"""Decisions: each shape where it pays, policy always, fallbacks under the same filters, refusals that tell why."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from mesh.errors import InvalidRequest, UnknownNode
from mesh.identity.place import Tier
from placement.decide.decide import decide
from placement.decide.explain import explain_nodes
from placement.decide.settings import DEFAULTS
from placement.decide.types import PlacementRequest, Plan, PlanShape, Reason, Refusal, Snapshot, Wish
from placement.policy.book import BUILTIN
from placement.policy.model import Policy, parse_policy
from tests.placement.decide.meshes import core, edge, request, snapshot

ANYWHERE = parse_policy("version: 1\nrules: {internal: {anywhere: true}}", version=3)
DEAR_CORE = parse_policy(
    "version: 1\nrules: {internal: {tiers: [core, edge]}}\nprice: {core_decode_per_s: 20}", version=4
)


def run(
    snap: Snapshot, req: PlacementRequest, policy: Policy = ANYWHERE, site: str = "paris", seed: int = 1
) -> Plan | Refusal:
    return decide(snap, req, policy, entry_site=site, now_s=0.0, rng=random.Random(seed))


def plan(snap: Snapshot, req: PlacementRequest, policy: Policy = ANYWHERE, site: str = "paris", seed: int = 1) -> Plan:
    found = run(snap, req, policy, site, seed)
    assert isinstance(found, Plan)
    return found


def refused(snap: Snapshot, req: PlacementRequest, policy: Policy = ANYWHERE, site: str = "paris") -> Refusal:
    found = run(snap, req, policy, site)
    assert isinstance(found, Refusal)
    return found


PARIS = edge("paris")
MESH = snapshot([core(), PARIS], entry="edge-paris")


def test_a_long_prompt_goes_to_the_core_and_a_short_one_stays() -> None:
    assert plan(MESH, request(4000)).choice.shape is PlanShape.CORE
    assert plan(MESH, request(5)).choice.shape is PlanShape.LOCAL


def test_the_price_of_core_decode_makes_a_split_pay() -> None:
    chosen = plan(MESH, request(4000), DEAR_CORE)
    assert chosen.choice.shape is PlanShape.SPLIT
    assert (chosen.choice.prefill.node_id, chosen.choice.decode.node_id) == ("core-1", "edge-paris")
    assert chosen.policy_version == 4
    assert chosen.rule == "rules.internal"
    assert {c.shape for c in chosen.fallbacks} == {PlanShape.LOCAL, PlanShape.CORE}


def test_a_slow_link_makes_local_prefill_pay() -> None:
    thin = snapshot([core(goodput_bytes_per_s=1e5), PARIS], entry="edge-paris")
    assert plan(thin, request(2000), DEAR_CORE).choice.shape is PlanShape.LOCAL


def test_offload_pays_where_the_prefix_is_at_the_edge_and_the_core_decodes_faster() -> None:
    mesh = snapshot(
        [core(prefill_tokens_per_s=300.0, decode_tokens_per_s=200.0), edge("paris", cached_tokens=3990)],
        entry="edge-paris",
    )
    chosen = plan(mesh, request(4000, expected_tokens=500, max_tokens=500))
    assert chosen.choice.shape is PlanShape.OFFLOAD
    assert (chosen.choice.prefill.site, chosen.choice.decode.site) == ("paris", "dc")


def test_a_prediction_is_the_sum_that_the_module_states() -> None:
    local = plan(MESH, request(5, expected_tokens=11)).choice
    assert local.ttft_s == pytest.approx(5 / 500 + 1 / 50)
    assert local.total_s == pytest.approx(5 / 500 + 11 / 50)
    split = next(c for c in plan(MESH, request(4000), DEAR_CORE).candidates if c.shape is PlanShape.SPLIT)
    token_s = 23_040 / 1e8
    assert split.ttft_s == pytest.approx(
        max(3999 / 5000 + 256 * token_s, 256 / 5000 + 3999 * token_s) + 4.5 * 0.02 + 1 / 50
    )


def test_an_edge_pairs_only_with_itself_and_the_placement_service_with_any_site() -> None:
    nodes = [core(), PARIS, edge("osaka")]
    wish = request(4000, wish=Wish(shape=PlanShape.SPLIT))
    own = plan(snapshot(nodes, entry="edge-paris"), wish)
    assert {c.decode.site for c in own.candidates} == {"paris"}
    service = plan(snapshot(nodes), wish, site="dc")
    assert {c.decode.site for c in service.candidates} == {"paris", "osaka"}


def test_a_split_needs_the_prompt_allowed_at_both_and_kv_at_the_target() -> None:
    no_kv = parse_policy(
        "version: 1\nrules: {internal: {anywhere: true}}\nkv_rules: {internal: {tiers: [core]}}", version=1
    )
    no_core = parse_policy("version: 1\nrules: {internal: {tiers: [edge]}}", version=1)
    for policy in (no_kv, no_core):
        assert PlanShape.SPLIT not in {c.shape for c in plan(MESH, request(4000), policy).candidates}
    assert PlanShape.SPLIT in {c.shape for c in plan(MESH, request(4000), DEAR_CORE).candidates}


def test_a_prompt_of_one_token_is_never_paired() -> None:
    assert {c.shape for c in plan(MESH, request(1), DEAR_CORE).candidates} == {PlanShape.LOCAL, PlanShape.CORE}


def test_restricted_stays_at_home_whatever_it_costs() -> None:
    chosen = plan(MESH, request(8000, label="restricted", max_tokens=100), BUILTIN)
    assert chosen.choice.decode.site == "paris"
    assert chosen.fallbacks == ()
    assert chosen.rule == "rules.restricted"
    assert [(r.reason, r.node_ids) for r in chosen.refused] == [(Reason.LABEL, ("core-1",))]


def test_fallbacks_obey_policy_and_none_means_none() -> None:
    nodes = [core("core-1"), core("core-2"), PARIS, edge("osaka"), edge("oslo"), edge("rome")]
    chosen = plan(snapshot(nodes), request(3000), ANYWHERE)
    assert len(chosen.fallbacks) == DEFAULTS.fallbacks
    nodes_at_home = plan(snapshot(nodes, entry="edge-paris"), request(3000), BUILTIN)
    assert {c.decode.site for c in nodes_at_home.fallbacks} <= {"dc", "paris"}
    none = parse_policy("version: 1\nrules: {internal: {anywhere: true}}\nfallback: none", version=1)
    assert plan(snapshot(nodes), request(3000), none).fallbacks == ()


def test_one_fallback_shares_no_node_with_the_choice() -> None:
    slow = [edge(f"site{i}", prefill_tokens_per_s=400.0 - i) for i in range(5)]
    mesh = snapshot([core(), core("core-9", rtt_s=50.0), *slow])
    chosen = plan(mesh, request(4000), DEAR_CORE, site="dc")
    used = {chosen.choice.prefill.node_id, chosen.choice.decode.node_id}
    assert any(not used & {c.prefill.node_id, c.decode.node_id} for c in chosen.fallbacks)


def test_equals_are_drawn_evenly_and_the_draw_is_seeded() -> None:
    mesh = snapshot([core(f"core-{i}") for i in range(4)])
    drawn = Counter(plan(mesh, request(), seed=seed).choice.decode.node_id for seed in range(400))
    assert len(drawn) == 4
    assert min(drawn.values()) > 60
    assert plan(mesh, request(), seed=7) == plan(mesh, request(), seed=7)


def test_many_equals_do_not_always_lose_the_same_ones() -> None:
    mesh = snapshot([core(f"core-{i:03}") for i in range(100)])
    drawn = {plan(mesh, request(), seed=seed).choice.decode.node_id for seed in range(300)}
    assert len(drawn) > 80


def test_load_that_is_stale_counts_as_busy_but_never_the_entrys_own() -> None:
    fresh, old = core("core-1", rtt_s=0.5), core("core-2", age_s=DEFAULTS.busy_after_s + 1)
    assert plan(snapshot([fresh, old]), request()).choice.decode.node_id == "core-1"
    own = snapshot([edge("paris", age_s=1e9)], entry="edge-paris")
    assert plan(own, request()).choice.decode.site == "paris"


def test_the_snapshots_own_age_counts_too() -> None:
    mesh = snapshot([core()], made_s=100.0)
    assert isinstance(decide(mesh, request(), ANYWHERE, entry_site="", now_s=120.0, rng=random.Random(0)), Plan)
    gone = decide(mesh, request(), ANYWHERE, entry_site="", now_s=200.0, rng=random.Random(0))
    assert isinstance(gone, Refusal)
    assert gone.missing == ("core-1",)


def test_queues_and_running_requests_push_away() -> None:
    for busy in (core("core-1", waiting_prefill_tokens=5000), core("core-1", running=8), core("core-1", waiting=3)):
        assert plan(snapshot([busy, core("core-2")]), request()).choice.decode.node_id == "core-2"


def test_a_prefix_hit_pulls() -> None:
    mesh = snapshot([core("core-1", cached_tokens=3000), core("core-2")])
    assert plan(mesh, request(4000)).choice.decode.node_id == "core-1"


def test_what_is_not_measured_looks_worse_than_what_is() -> None:
    nan = float("nan")
    for unmeasured in (
        core("core-1", prefill_tokens_per_s=0.0), core("core-1", decode_tokens_per_s=0.0), core("core-1", rtt_s=nan),
    ):  # fmt: skip
        assert plan(snapshot([unmeasured, core("core-2")]), request()).choice.decode.node_id == "core-2"


def test_latency_wishes_steer() -> None:
    near = edge("paris", prefill_tokens_per_s=4000.0, decode_tokens_per_s=10.0)
    far = core(rtt_s=1.0, decode_tokens_per_s=100.0)
    mesh = snapshot([far, near])
    assert plan(mesh, request(500)).choice.decode.node_id == "core-1"
    assert plan(mesh, request(500, expected_tokens=20, ttft_s=0.3)).choice.decode.site == "paris"
    assert plan(mesh, request(500, expected_tokens=20, tpot_s=0.02, deadline_s=2.0)).choice.decode.node_id == "core-1"


@pytest.mark.parametrize(
    ("wish", "shapes", "sites"),
    [
        (Wish(shape=PlanShape.LOCAL), {PlanShape.LOCAL}, {"paris", "osaka"}),
        (Wish(shape=PlanShape.SPLIT, site="osaka"), {PlanShape.SPLIT}, {"osaka"}),
        (Wish(shape=PlanShape.OFFLOAD), {PlanShape.OFFLOAD}, {"dc"}),
        (Wish(node_id="core-1"), {PlanShape.CORE}, {"dc"}),  # to start at a slow edge costs several times as much
        (Wish(tier=Tier.EDGE), {PlanShape.LOCAL, PlanShape.SPLIT}, {"paris", "osaka"}),
    ],
)
def test_wishes_hold_for_all_candidates(wish: Wish, shapes: set[PlanShape], sites: set[str]) -> None:
    slow_edges = [edge(site, decode_tokens_per_s=10.0) for site in ("paris", "osaka")]
    chosen = plan(snapshot([core(), *slow_edges]), request(4000, wish=wish), site="dc")
    assert {c.shape for c in chosen.candidates} == shapes
    assert {c.decode.site for c in chosen.candidates} == sites


def test_a_wish_that_policy_forbids_is_denied_with_the_rule() -> None:
    found = refused(MESH, request(label="restricted", wish=Wish(node_id="core-1")), BUILTIN)
    assert (found.denied, found.permanent, found.rule) == (True, True, "rules.restricted")
    assert "rules.restricted" in found.message
    assert "core-1" in found.message


def test_a_wish_that_nothing_fulfils_is_not_the_policys_fault() -> None:
    found = refused(MESH, request(wish=Wish(site="rome")))
    assert (found.denied, found.permanent) == (False, True)
    contradiction = refused(MESH, request(wish=Wish(shape=PlanShape.CORE, tier=Tier.EDGE)))
    assert (contradiction.denied, contradiction.permanent) == (False, True)
    lonely = refused(snapshot([PARIS], entry="edge-paris"), request(wish=Wish(shape=PlanShape.SPLIT)))
    assert (lonely.denied, lonely.permanent) == (False, True)
    assert [r.reason for r in lonely.refused] == [Reason.WISH]
    with pytest.raises(UnknownNode, match="core-7"):
        run(MESH, request(wish=Wish(node_id="core-7")))


CORE_ONLY = parse_policy("version: 1\nrules: {internal: {tiers: [core]}}", version=1)


def test_a_node_that_is_down_is_named_with_the_rule() -> None:
    found = refused(snapshot([core(ready=False), PARIS], entry="edge-paris"), request(), CORE_ONLY)
    assert (found.permanent, found.denied, found.overloaded) == (False, False, False)
    assert (found.missing, found.rule) == (("core-1",), "rules.internal")
    assert "core-1 (not ready)" in found.message
    assert "rules.internal (tier core)" in found.message


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"ready": False}, Reason.NOT_READY),
        ({"draining": True}, Reason.DRAINING),
        ({"age_s": 1e6}, Reason.STALE),
        ({"waiting": 64}, Reason.CAPACITY),
        ({"waiting": 8, "running": 4, "kv_free_tokens": 10}, Reason.CAPACITY),
        ({"reachable": False}, Reason.UNREACHABLE_FROM_ENTRY),
    ],
)
def test_passing_reasons(facts: dict[str, object], reason: Reason) -> None:
    found = refused(snapshot([core(**facts)]), request())
    assert (found.permanent, found.overloaded) == (False, reason is Reason.CAPACITY)
    assert found.missing == ("core-1",)
    assert [r.reason for r in found.refused] == [reason]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"models": ("other",)}, Reason.MODEL),
        ({"max_context_tokens": 1199}, Reason.CONTEXT),
        ({"kv_capacity_tokens": 1199}, Reason.CONTEXT),
    ],
)
def test_lasting_reasons(facts: dict[str, object], reason: Reason) -> None:
    found = refused(snapshot([core(**facts)]), request(1000, max_tokens=200))
    assert (found.permanent, found.denied, found.missing) == (True, False, ())
    assert [r.reason for r in found.refused] == [reason]


def test_a_tried_node_is_excluded_and_an_empty_mesh_refuses() -> None:
    assert refused(snapshot([core()]), request(exclude=["core-1"])).refused[0].reason is Reason.EXCLUDED
    assert plan(MESH, request(4000, exclude=["core-1"])).choice.decode.site == "paris"
    empty = refused(snapshot([]), request())
    assert empty.permanent
    assert empty.refused == ()


def test_a_full_pool_with_a_short_queue_is_busy_not_refused() -> None:
    full = core("core-1", running=4, waiting=1, kv_free_tokens=10)
    assert plan(snapshot([full]), request()).choice.decode.node_id == "core-1"


def test_a_label_that_the_policy_does_not_know_is_bad_input() -> None:
    with pytest.raises(InvalidRequest, match="unknown label"):
        run(MESH, request(label="secret"))


def test_explain_gives_every_node_a_verdict() -> None:
    nodes = [PARIS, core(draining=True), edge("osaka", models=("other",))]
    verdicts = explain_nodes(snapshot(nodes), request(label="restricted"), BUILTIN, entry_site="paris")
    said = {v.place.node_id: v.refused for v in verdicts}
    assert list(said) == ["core-1", "edge-osaka", "edge-paris"]
    assert said["edge-paris"] == ()
    assert [text.split(":")[0] for text in said["core-1"]] == ["label", "draining"]
    assert "rules.restricted" in said["core-1"][0]
    assert [text.split(":")[0] for text in said["edge-osaka"]] == ["model", "label"]


def test_a_thousand_sites_are_decided_on_arrays() -> None:
    nodes = [core(f"core-{i}") for i in range(20)] + [edge(f"s{i}") for i in range(1000)]
    chosen = plan(snapshot(nodes), request(4000), DEAR_CORE)
    assert len(chosen.candidates) <= 4 * DEFAULTS.candidates_per_shape
    assert np.isfinite(chosen.choice.cost_s)
