"""Why there is no plan, and who was refused for what: groups by reason, and the one message that a person reads."""

from __future__ import annotations

import numpy as np

from placement.decide.filters import PASSING, Filtered, reasons
from placement.decide.scores import NodeTimes
from placement.decide.settings import DecideSettings
from placement.decide.types import AnyArray, BoolArray, PlacementRequest, Reason, Refusal, Refused, Snapshot, Wish
from placement.decide.ways import Ranked, find_ways
from placement.policy.rules import DataKind, Policy

_NAMED_NODES = 8
_NO_WISH = Wish()
_WORDS = {
    Reason.MODEL: "does not serve the model",
    Reason.LABEL: "not allowed for the label",
    Reason.NOT_READY: "not ready",
    Reason.DRAINING: "draining",
    Reason.STALE: "not heard of for too long",
    Reason.CAPACITY: "full",
    Reason.CONTEXT: "prompt and output exceed its context",
    Reason.WISH: "not what the placement wish asks for",
    Reason.UNREACHABLE_FROM_ENTRY: "not reachable from this entry",
    Reason.EXCLUDED: "failed this request before",
    Reason.ROLE: "prefill or decode only, and no node is there for the other half",
    Reason.PLUGIN: "refused by a filter of this entry",
}


def in_words(reason: Reason) -> str:
    """The reason as a person would say it."""
    return _WORDS[reason]


def all_bits(snapshot: Snapshot, request: PlacementRequest, filtered: Filtered) -> AnyArray:
    """Reason bits of every node, the wish included, shape [n_nodes]; 0 for those that play a part in some way."""
    if request.wish == _NO_WISH and snapshot.all_do_both:
        return filtered.run
    bits = filtered.run.copy()
    halves = ~snapshot.tier_edge & ~(snapshot.prefills & snapshot.decodes)
    part = _parts(snapshot, request, filtered, filtered.run == 0)
    if request.wish != _NO_WISH:
        bits[~part & (~filtered.wished | (bits == 0))] |= Reason.WISH.value
    # Only half of a request is its to do, and nobody is there for the other one.
    bits[~part & halves & (bits == 0)] |= Reason.ROLE.value
    return bits


def group_refused(snapshot: Snapshot, request: PlacementRequest, filtered: Filtered) -> tuple[Refused, ...]:
    """Refused nodes by reason, in the order of Reason; a node counts for each of its reasons."""
    bits = all_bits(snapshot, request, filtered)
    by_id = snapshot.index.by_id
    in_order = snapshot.index.is_by_id
    if not in_order:
        bits = bits[by_id]
    present, groups = int(np.bitwise_or.reduce(bits, initial=0)), []
    for reason in reasons(present):
        rows = np.flatnonzero(bits & reason.value)
        rows = rows if in_order else by_id[rows]
        names = tuple(snapshot.places[row].node_id for row in rows[:_NAMED_NODES])
        groups.append(Refused(reason=reason, count=len(rows), node_ids=names))
    return tuple(groups)


def refusal(snapshot: Snapshot, request: PlacementRequest, policy: Policy, filtered: Filtered) -> Refusal:
    """Why no way is free: the wish against policy, no room, nodes that are down, or none that ever could."""
    run = filtered.run
    would = _parts(snapshot, request, filtered, (run & ~PASSING.value) == 0)
    waiting = sorted(snapshot.places[i].node_id for i in np.flatnonzero(would & (run != 0)))
    overloaded = bool(_parts(snapshot, request, filtered, (run & ~Reason.CAPACITY.value) == 0).any())
    denied = not would.any() and request.wish != Wish() and _policy_is_in_the_way(snapshot, request, filtered)
    refused = group_refused(snapshot, request, filtered)
    rule = ", ".join(r.name for r in policy.rules_of(request.label, DataKind.PROMPT))
    allowed = f"policy allows label {request.label} at {policy.explain_rules(request.label, DataKind.PROMPT)}"
    if overloaded:
        message = f"no room now at {_list(waiting)}, back off; {allowed}"
    elif would.any():
        states = [f"{node_id} ({_why(snapshot, run, node_id)})" for node_id in waiting]
        message = f"no node can take the request now: {_list(states)} would do; {allowed}"
    elif denied:
        message = f"the placement wish ({_wish_words(request.wish)}) asks for what policy forbids: {allowed}"
    else:
        counts = ", ".join(f"{r.count} {in_words(r.reason)}" for r in refused) or "it has no nodes"
        message = f"no node of the mesh could serve the request: {counts}; {allowed}"
    return Refusal(
        permanent=not would.any(),
        denied=denied,
        rule=rule,
        missing=tuple(waiting),
        refused=refused,
        message=message,
        overloaded=overloaded,
    )


def late_refusal(
    snapshot: Snapshot,
    request: PlacementRequest,
    policy: Policy,
    filtered: Filtered,
    ranked: Ranked,
    settings: DecideSettings,
) -> Refusal:
    """Nodes are free for it, and none would be done before its deadline. With queues as short as they could be, one
    might: then it is told when to try again."""
    limits = [
        ("done", request.deadline_s, ranked.least_total_s, ranked.least_idle_s),
        ("at its first token", request.ttft_deadline_s, ranked.least_ttft_s, ranked.idle_ttft_s),
    ]
    over = [(now_s - limit_s, limit_s, now_s, idle_s, what) for what, limit_s, now_s, idle_s in limits if limit_s]
    over_s, deadline_s, least_s, _, what = max(over)
    queues = all(idle_s <= limit_s for _, limit_s, _, idle_s, _ in over)
    least, most = settings.retry_s
    retry_s = min(max(over_s, least), most) if queues else 0.0
    advice = f"try again in {retry_s:.1f} s" if queues else "no node could, even without a queue"
    return Refusal(
        permanent=not queues,
        denied=False,
        rule=", ".join(r.name for r in policy.rules_of(request.label, DataKind.PROMPT)),
        missing=(),
        refused=group_refused(snapshot, request, filtered),
        message=(
            f"it would be {what} in {least_s:.2f} s at best, its deadline is {deadline_s:.2f} s: {advice}; "
            f"policy allows label {request.label} at {policy.explain_rules(request.label, DataKind.PROMPT)}"
        ),
        overloaded=queues,
        late=True,
        retry_s=retry_s,
    )


def shipment_refusal(
    snapshot: Snapshot, times: NodeTimes, request: PlacementRequest, policy: Policy, filtered: Filtered
) -> Refusal:
    """Nodes are free for a split, but none may or can ship KV in the way that was wished for."""
    codec, known = request.wish.codec, times.codecs.names
    lossy = codec in known and not times.codecs.loss_ratio[known.index(codec)] <= policy.kv_max_loss_ratio
    if codec and codec not in known:
        why = f"no node has the codec {codec[:64]!r}"
    elif lossy:
        loss_ratio = times.codecs.loss_ratio[known.index(codec)]
        why = f"{codec} loses {loss_ratio:.2%}, policy accepts {policy.kv_max_loss_ratio:.2%}"
    else:
        why = "no pair of nodes could do it so, or it would not help"
    return Refusal(
        permanent=True,
        denied=lossy,
        rule="kv_max_loss_ratio" if lossy else ", ".join(r.name for r in policy.rules_of(request.label, DataKind.KV)),
        missing=(),
        refused=group_refused(snapshot, request, filtered),
        message=f"the placement wish ({_wish_words(request.wish)}) cannot be met: {why}",
    )


def _parts(snapshot: Snapshot, request: PlacementRequest, filtered: Filtered, run: BoolArray) -> BoolArray:
    ways = find_ways(snapshot, request, run=run, wished=filtered.wished, kv_allowed=filtered.kv_allowed)
    return ways.nodes(snapshot.n_nodes)


def _policy_is_in_the_way(snapshot: Snapshot, request: PlacementRequest, filtered: Filtered) -> bool:
    lawless = (filtered.run & ~(PASSING | Reason.LABEL).value) == 0
    everywhere = np.ones(snapshot.n_nodes, dtype=np.bool_)
    ways = find_ways(snapshot, request, run=lawless, wished=filtered.wished, kv_allowed=everywhere)
    return bool(ways.nodes(snapshot.n_nodes).any())


def _why(snapshot: Snapshot, run: AnyArray, node_id: str) -> str:
    return ", ".join(in_words(reason) for reason in reasons(int(run[snapshot.row_of(node_id)])))


def _wish_words(wish: Wish) -> str:
    tier = wish.tier.value if wish.tier is not None else ""
    shape = wish.shape.name.lower() if wish.shape is not None else ""
    shipment = wish.shipment.name.lower() if wish.shipment is not None else ""
    kv = (("codec", wish.codec[:64]), ("shipment", shipment))
    parts = (("shape", shape), ("tier", tier), ("site", wish.site), ("node", wish.node_id), *kv)
    return ", ".join(f"{name} {value}" for name, value in parts if value)


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED_NODES
    return ", ".join(names[:_NAMED_NODES]) + (f" and {more} more" if more > 0 else "")
