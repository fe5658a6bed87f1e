"""Filters: why a node cannot take a request, as bit masks of Reason over all nodes at once.

What does not depend on the request is worked out once per snapshot (placement.decide.compiled), what depends on policy,
label and model only once per policy and set of nodes. Filters that an operator adds (placement.decide.plugins) can
only refuse more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mesh.identity.place import Tier
from placement.decide.compiled import Compiled, compiled
from placement.decide.settings import DecideSettings
from placement.decide.types import (
    AnyArray,
    BoolArray,
    FloatArray,
    PlacementRequest,
    PlanShape,
    Reason,
    Snapshot,
    Wish,
)
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
_NO_WISH = Wish()
_IN_ORDER = tuple((reason.value, reason) for reason in Reason)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filtered:
    """Verdicts over all nodes, each array of shape [n_nodes].

    `run`: Reason bits for running the request there, the caller's wish aside, int16. `wished`: where the wish lets it
    decode. `kv_allowed`: where policy lets KV of its label be moved to. `age_s`: age of the load now. `full`: where the
    prompt does not fit the free KV now.
    """

    run: AnyArray
    wished: BoolArray
    kv_allowed: BoolArray
    age_s: FloatArray
    full: BoolArray


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
    places, columns = snapshot.index, compiled(snapshot, settings)
    age_s = ages(snapshot, now_s)
    full = kv_pool_full(snapshot, request, columns)
    run = columns.state_bits | _standing_bits(snapshot, request, policy, entry_site)
    _refuse(run, Reason.STALE, age_s > settings.stale_after_s)
    queue_full = snapshot.waiting >= settings.full_queue
    if full.any():
        queue_full |= full & (snapshot.waiting >= settings.short_queue)
    _refuse(run, Reason.CAPACITY, queue_full)
    _refuse(run, Reason.CONTEXT, _too_long(snapshot, request))
    for row in map(snapshot.row_of, request.exclude):
        if row >= 0:
            run[row] |= Reason.EXCLUDED.value
    filtered = Filtered(
        run=run,
        wished=_wished(snapshot, request, places),
        kv_allowed=policy.mask(request.label, places, entry_site=entry_site, kind=DataKind.KV),
        age_s=age_s,
        full=full,
    )
    for plugin in settings.filters:
        _refuse(run, Reason.PLUGIN, plugin.refuses(snapshot, request, filtered))
    return filtered


def _refuse(run: AnyArray, reason: Reason, refused: BoolArray) -> None:
    if refused.any():
        run |= refused * np.int16(reason.value)


def ages(snapshot: Snapshot, now_s: float) -> FloatArray:
    """Age of each node's load now, [n_nodes]; the entry's own engine is never old. Where the clock is behind the
    snapshot by more than a moment (it jumped), nobody knows: all is as old as the jump."""
    passed_s = 0.0 if np.isnan(snapshot.made_s) or np.isnan(now_s) else now_s - snapshot.made_s
    age_s: FloatArray = snapshot.age_s + abs(passed_s)
    if snapshot.entry_row >= 0:
        age_s[snapshot.entry_row] = 0.0
    return age_s


def _standing_bits(snapshot: Snapshot, request: PlacementRequest, policy: Policy, entry_site: str) -> AnyArray:
    """Reasons of the label and the model, which stay while policy and nodes do; not to be written to."""
    allowed = policy.mask(request.label, snapshot.index, entry_site=entry_site, kind=DataKind.PROMPT)

    def make() -> AnyArray:
        served = _serves(snapshot, request.model)
        bits = np.where(allowed, 0, Reason.LABEL.value) | np.where(served, 0, Reason.MODEL.value)
        return bits.astype(np.int16)

    return snapshot.index.kept((allowed, snapshot.models), (request.label, entry_site, request.model), make)


def _too_long(snapshot: Snapshot, request: PlacementRequest) -> BoolArray:
    context_tokens = request.prompt_tokens + request.max_tokens
    too_long: BoolArray = context_tokens > snapshot.max_context_tokens
    return too_long | ((context_tokens > snapshot.kv_capacity_tokens) & (snapshot.kv_capacity_tokens > 0))


def kv_pool_full(snapshot: Snapshot, request: PlacementRequest, columns: Compiled) -> BoolArray:
    """Where the prompt does not fit the free KV now, shape [n_nodes]. A node that does not tell its capacity, or
    has nothing to do, is not full."""
    full: BoolArray = columns.kv_room_tokens < request.prompt_tokens + 1
    if full.any():
        for row, cached in hits(snapshot, request).items():
            full[row] = columns.kv_room_tokens[row] < request.prompt_tokens + 1 - cached
    return full


def hits(snapshot: Snapshot, request: PlacementRequest) -> dict[int, int]:
    """Rows of nodes that are thought to have a prefix of the prompt, with its tokens: at most all but one."""
    most = max(request.prompt_tokens - 1, 0)
    found = {int(row): min(int(snapshot.cached_tokens[row]), most) for row in snapshot.cached_tokens.nonzero()[0]}
    for node_id, tokens in request.cached.items():
        row = snapshot.row_of(node_id)
        if row >= 0:
            found[row] = min(max(tokens, found.get(row, 0)), most)
    return found


def _serves(snapshot: Snapshot, model: str) -> BoolArray:
    if model not in snapshot.model_ids:
        return np.zeros(snapshot.n_nodes, dtype=np.bool_)
    column: BoolArray = snapshot.models[:, snapshot.model_ids.index(model)]
    return column


def _wished(snapshot: Snapshot, request: PlacementRequest, places: PlaceColumns) -> BoolArray:
    wish, wished = request.wish, np.ones(snapshot.n_nodes, dtype=np.bool_)
    if wish == _NO_WISH:
        return wished
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
    return tuple(reason for value, reason in _IN_ORDER if value & bits)


def word(reason: Reason) -> str:
    """The reason's word on the wire and for people, e.g. "not_ready"."""
    return (reason.name or "").lower()
