"""The decision: (snapshot, request, policy, now, rng) -> Plan or Refusal. Filter, score, pick.

Pure: the same inputs and seed give the same decision, and the order of nodes does not matter. Near-equal
candidates are drawn from, so that a burst decided on one snapshot does not fall on one node. Fallbacks pass the
same filters, policy and wish as the choice.
"""

from __future__ import annotations

import math
import random

from mesh.errors import UnknownNode
from placement.decide.filters import filter_nodes
from placement.decide.plugins import ScoreView
from placement.decide.refuse import group_refused, late_refusal, refusal, shipment_refusal
from placement.decide.scores import node_times
from placement.decide.settings import DEFAULTS, DecideSettings
from placement.decide.ship_words import in_words, weigh
from placement.decide.types import Candidate, PlacementRequest, Plan, PlanShape, Refusal, Snapshot
from placement.decide.ways import Ties, find_ways, rank
from placement.policy.rules import DataKind, Policy

_PAIRS = (PlanShape.SPLIT, PlanShape.OFFLOAD, PlanShape.DISAGGREGATED)


def decide(
    snapshot: Snapshot,
    request: PlacementRequest,
    policy: Policy,
    *,
    entry_site: str,
    now_s: float,
    rng: random.Random,
    settings: DecideSettings = DEFAULTS,
) -> Plan | Refusal:
    """Where to run a request. `now_s` is on the clock of `snapshot.made_s`; `entry_site` is what policy calls own.

    Raises InvalidRequest (label unknown to the policy), UnknownNode (the wish names a node that is not there)."""
    if request.wish.node_id and snapshot.row_of(request.wish.node_id) < 0:
        raise UnknownNode(f"no node {request.wish.node_id[:64]!r} in the mesh", field="placement.node_id")
    filtered = filter_nodes(snapshot, request, policy, entry_site=entry_site, now_s=now_s, settings=settings)
    free = filtered.run == 0
    ways = find_ways(snapshot, request, run=free, wished=filtered.wished, kv_allowed=filtered.kv_allowed)
    times = node_times(snapshot, request, policy.prices, filtered, settings)
    loss = policy.kv_max_loss_ratio
    ties = Ties(keys=snapshot.index.tie_keys, factor=rng.getrandbits(64) | 1)
    view = ScoreView(snapshot=snapshot, request=request, times=times, settings=settings)
    ranked_ways = rank(ways, view, ties, max_loss_ratio=loss)
    candidates = ranked_ways.candidates
    if not candidates:
        if math.isfinite(min(ranked_ways.least_total_s, ranked_ways.least_ttft_s)):
            return late_refusal(snapshot, request, policy, filtered, ranked_ways, settings)
        if all(map(len, ways.split)) and (request.wish.codec or request.wish.shipment is not None):
            return shipment_refusal(snapshot, times, request, policy, filtered)
        return refusal(snapshot, request, policy, filtered)
    choice = _pick(candidates, rng, settings)
    ranked = (choice, *(c for c in candidates if c is not choice))
    shipping = weigh(view, ranked, ways.split, max_loss_ratio=loss)
    return Plan(
        choice=choice,
        fallbacks=_fallbacks(ranked, settings) if policy.fallback else (),
        candidates=ranked,
        refused=group_refused(snapshot, request, filtered),
        rule=_rule(choice, request, policy, entry_site),
        policy_version=policy.version,
        codec=settings.codec,
        shipping=shipping,
        why=in_words(choice, shipping),
    )


def _pick(candidates: list[Candidate], rng: random.Random, settings: DecideSettings) -> Candidate:
    """One of those that are as good as the best; single nodes before pairs, which have more that can fail."""
    limit = candidates[0].cost_s * (1.0 + settings.near_best_ratio)
    near = [c for c in candidates if c.cost_s <= limit]
    near = [c for c in near if c.shape not in _PAIRS] or near
    return settings.pick.pick(near, rng)


def _fallbacks(ranked: tuple[Candidate, ...], settings: DecideSettings) -> tuple[Candidate, ...]:
    """The best others, one for each set of nodes; at least one shares no node with the choice, if any does."""
    nodes = [_nodes(candidate) for candidate in ranked]
    used, chosen = {nodes[0]}, []
    for at, candidate in zip(nodes[1:], ranked[1:], strict=True):
        if at not in used:
            used.add(at)
            chosen.append(candidate)
    kept = chosen[: settings.fallbacks]
    apart = next((c for c in chosen if not _nodes(c) & nodes[0]), None)
    if apart is not None and apart not in kept:
        kept[-1] = apart
    return tuple(kept)


def _nodes(candidate: Candidate) -> frozenset[str]:
    return frozenset((candidate.prefill.node_id, candidate.decode.node_id))


def _rule(choice: Candidate, request: PlacementRequest, policy: Policy, entry_site: str) -> str:
    """Names of the rules that allowed it, prefill side first."""
    names = [
        policy.allows(request.label, place, entry_site=entry_site, kind=DataKind.PROMPT)
        for place in (choice.prefill, choice.decode)
    ]
    return " + ".join(dict.fromkeys(name for name in names if name is not None))
