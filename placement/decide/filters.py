"""Filters: why a node cannot take a request, as bit masks of Reason over all nodes at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mesh.identity.place import Tier
from placement.decide.settings import DecideSettings
from placement.decide.types import BoolArray, FloatArray, IntArray, PlacementRequest, PlanShape, Reason, Snapshot
from placement.policy.places import PlaceColumns
from placement.policy.rules import DataKind, Policy

PASSING = Reason.NOT_READY | Reason.DRAINING | Reason.STALE | Reason.CAPACITY
PASSING |= Reason.UNREACHABLE_FROM_ENTRY | Reason.EXCLUDED
"""Reasons that may be gone in a while, with the same policy, request and set of nodes."""

_DECODES_AT = {
    PlanShape.LOCAL: Tier.EDGE,
    PlanShape.SPLIT: Tier.EDGE,
    PlanShape.CORE: Tier.CORE,
    PlanShape.OFFLOAD: Tier.CORE,
    PlanShape.DISAGGREGATED: Tier.CORE,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filtered:
    """Verdicts over all nodes, each array of shape [n_nodes].

    `run`: Reason bits for running the request there, the caller's wish aside. `wished`: where the wish lets it
    decode. `kv_allowed`: where policy lets KV of its label be moved to. `age_s`: age of the load now.
    """

    run: IntArray
    wished: BoolArray
    kv_allowed: BoolArray
    age_s: FloatArray


def filter_nodes(
    snapshot: Snapshot,
    request: PlacementRequest,
    policy: Policy,
    *,
    entry_site: str,
    now_s: float,
    settings: DecideSettings,
) -> Filtered:
    """All filters. Raises InvalidRequest if the policy does not know the label."""
    n, places = snapshot.n_nodes, snapshot.index
    own = np.arange(n) == snapshot.entry_row
    age_s = snapshot.age_s if np.isnan(snapshot.made_s) else snapshot.age_s + max(0.0, now_s - snapshot.made_s)
    age_s = np.where(own, 0.0, age_s)
    context_tokens = request.prompt_tokens + request.max_tokens
    too_long = (context_tokens > snapshot.max_context_tokens) | (
        (snapshot.kv_capacity_tokens > 0) & (context_tokens > snapshot.kv_capacity_tokens)
    )
    pool_full = kv_pool_full(snapshot, request)
    queue_full = (snapshot.waiting >= settings.full_queue) | (pool_full & (snapshot.waiting >= settings.short_queue))
    excluded = np.zeros(n, dtype=np.bool_)
    excluded[[row for row in map(snapshot.row_of, request.exclude) if row >= 0]] = True

    run = np.zeros(n, dtype=np.int64)
    for reason, refused in (
        (Reason.MODEL, ~_serves(snapshot, request.model)),
        (Reason.LABEL, ~policy.mask(request.label, places, entry_site=entry_site, kind=DataKind.PROMPT)),
        (Reason.NOT_READY, ~snapshot.ready),
        (Reason.DRAINING, snapshot.draining),
        (Reason.STALE, age_s > settings.stale_after_s),
        (Reason.CAPACITY, queue_full),
        (Reason.CONTEXT, too_long),
        (Reason.UNREACHABLE_FROM_ENTRY, ~(snapshot.reachable | own)),
        (Reason.EXCLUDED, excluded),
    ):
        run[refused] |= reason.value
    return Filtered(
        run=run,
        wished=_wished(snapshot, request, places),
        kv_allowed=policy.mask(request.label, places, entry_site=entry_site, kind=DataKind.KV),
        age_s=age_s,
    )


def kv_pool_full(snapshot: Snapshot, request: PlacementRequest) -> BoolArray:
    """Where the prompt does not fit the free KV now, shape [n_nodes]. A node that does not tell its capacity, or
    has nothing to do, is not full."""
    needed = request.prompt_tokens + 1 - snapshot.cached_tokens
    busy = snapshot.running + snapshot.waiting > 0
    full: BoolArray = (snapshot.kv_capacity_tokens > 0) & busy & (snapshot.kv_free_tokens < needed)
    return full


def _serves(snapshot: Snapshot, model: str) -> BoolArray:
    if model not in snapshot.model_ids:
        return np.zeros(snapshot.n_nodes, dtype=np.bool_)
    column: BoolArray = snapshot.models[:, snapshot.model_ids.index(model)]
    return column


def _wished(snapshot: Snapshot, request: PlacementRequest, places: PlaceColumns) -> BoolArray:
    wish, wished = request.wish, np.ones(snapshot.n_nodes, dtype=np.bool_)
    tiers = {wish.tier, _DECODES_AT[wish.shape] if wish.shape is not None else None} - {None}
    if len(tiers) == 2:  # the wish contradicts itself
        wished[:] = False
    elif tiers:
        wished &= snapshot.tier_edge == (tiers == {Tier.EDGE})
    if wish.node_id:
        wished &= np.arange(snapshot.n_nodes) == snapshot.row_of(wish.node_id)
    if wish.site:
        wished &= places.site == wish.site
    return wished


def reasons(bits: int) -> tuple[Reason, ...]:
    """The single reasons in a mask, in the order of Reason."""
    return tuple(reason for reason in Reason if reason.value & bits)


def word(reason: Reason) -> str:
    """The reason's word on the wire and for people, e.g. "not_ready"."""
    return (reason.name or "").lower()
