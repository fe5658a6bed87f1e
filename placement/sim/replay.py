"""What would change under another policy: recorded decisions are taken again under both, on the mesh as it is now.

Features only: receipts hold no prompt. What they do not hold is not guessed: findings beyond those listed, and kinds
that the old policy did not look for, cannot raise a label here, and `notes` says so. Load is the one that the nodes
have now. Pure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.errors import MeshError
from mesh.identity.receipt import VerifiedReceipt
from placement.decide.decide import decide
from placement.decide.types import PlacementRequest, Plan, Snapshot
from placement.entry.mesh_view import NodeFacts, build_snapshot
from placement.policy.model import Policy
from placement.sim.slo import Slo

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A decision that was taken, as its receipt tells. `kinds`: what detectors found; `unseen`: there was more than the
    receipt lists."""

    request_id: str
    tenant: str
    model: str
    claimed: str
    label: str
    kinds: frozenset[str]
    entry_node_id: str
    entry_site: str
    prompt_tokens: int
    output_tokens: int
    outcome: str
    unseen: bool = False
    not_looked_at: bool = False

    @classmethod
    def of(cls, receipt: VerifiedReceipt) -> Recorded:
        """From a verified receipt."""
        body: Mapping[str, Any] = receipt.body
        label, usage = body["label"], body.get("usage", {})
        found = label.get("findings", [])
        return cls(
            request_id=str(body["request_id"]),
            tenant=str(body["tenant"]),
            model=str(body["model"]),
            claimed=str(label["claimed"]),
            label=str(label["effective"]),
            kinds=frozenset(str(f["kind"]) for f in found),
            entry_node_id=receipt.entry.node_id,
            entry_site=receipt.entry.site,
            prompt_tokens=max(1, int(usage.get("prompt_tokens", 1))),
            output_tokens=max(1, int(usage.get("completion_tokens", 1))),
            outcome=str(body["outcome"]),
            unseen=int(label.get("findings_total", len(found))) > len(found),
            not_looked_at="not_looked_at" in label,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A decision under one policy. `refusal`: why there is none."""

    label: str
    shape: str = ""
    nodes: tuple[str, ...] = ()
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    price_s: float = 0.0
    refusal: str = ""

    def in_time(self, prompt_tokens: int, slo: Slo) -> bool:
        """Whether it is predicted to be within the SLO."""
        return not self.refusal and slo.met(prompt_tokens, self.ttft_s, self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One recorded request under both policies."""

    recorded: Recorded
    before: Taken
    after: Taken

    @property
    def newly_refused(self) -> bool:
        return bool(self.after.refusal) and not self.before.refusal

    @property
    def moved(self) -> bool:
        """Served under both, at other nodes."""
        return not self.before.refusal and not self.after.refusal and self.before.nodes != self.after.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of them."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def placed(self, *, after: bool) -> Counter[str]:
        """Requests by where they go ("core core-1"), "refused" among them."""
        taken = [change.after if after else change.before for change in self.changes]
        return Counter("refused" if t.refusal else f"{t.shape} {' -> '.join(t.nodes)}" for t in taken)

    def slo_ratio(self, slo: Slo, *, after: bool) -> float:
        """Share of all requests that are predicted to be within the SLO; refused ones are not."""
        met = [(c.after if after else c.before).in_time(c.recorded.prompt_tokens, slo) for c in self.changes]
        return sum(met) / max(1, len(met))

    def price_s(self, *, after: bool) -> float:
        """Price of the engine time of all that is served, in the unit of the policies' price tables."""
        return sum((c.after if after else c.before).price_s for c in self.changes)


def compare(
    recorded: Iterable[Recorded], nodes: Sequence[NodeFacts], old: Policy, new: Policy, *, slo: Slo
) -> Comparison:
    """Take every recorded decision again under both policies: each entry over the core and its own site's nodes."""
    known = _MeshNow(nodes)
    changes, unseen, unlooked = [], 0, 0
    for one in recorded:
        before = known.take(one, old, slo)
        changes.append(Change(recorded=one, before=before, after=known.take(one, new, slo)))
        unseen += one.unseen
        unlooked += one.not_looked_at
    notes = []
    if unseen:
        notes.append(f"{unseen} receipts list only some of their findings: their labels may be too low here")
    if unlooked:
        notes.append(f"{unlooked} prompts were not looked at: they get each policy's label for that")
    wider = sorted((set(new.detection.raise_to) | _patterns(new)) - set(old.detection.raise_to) - _patterns(old))
    if wider and changes:
        notes.append(f"the old policy did not look for {', '.join(wider[:8])}: what it would raise is not known")
    return Comparison(changes=tuple(changes), notes=tuple(notes))


def label_under(policy: Policy, recorded: Recorded) -> str:
    """The label of a recorded request under a policy: what was claimed, or the policy's default, joined with what the
    findings raise it to. Raises InvalidRequest for a claim that the policy does not know."""
    label = policy.check_label(recorded.claimed or policy.default_label)
    raise_to = {**policy.detection.raise_to}
    raise_to |= {f"pattern.{name}": to for name, (_, to) in policy.detection.patterns.items()}
    for kind in recorded.kinds & raise_to.keys():
        label = policy.join(label, raise_to[kind])
    if recorded.not_looked_at and policy.detection.wanted:
        label = policy.join(label, policy.detection.on_failure)
    return label


class _MeshNow:
    """Snapshots of the mesh, one for each entry."""

    def __init__(self, nodes: Sequence[NodeFacts]) -> None:
        self._nodes = nodes
        self._snapshots: dict[str, Snapshot] = {}

    def take(self, recorded: Recorded, policy: Policy, slo: Slo) -> Taken:
        try:
            label = label_under(policy, recorded)
            policy.check_model(recorded.model)
        except MeshError as error:
            return Taken(label="", refusal=error.message)
        request = PlacementRequest(
            tenant=recorded.tenant,
            model=recorded.model,
            label=label,
            prompt_tokens=recorded.prompt_tokens,
            max_tokens=recorded.output_tokens,
            expected_tokens=recorded.output_tokens,
            ttft_s=slo.ttft_for(recorded.prompt_tokens),
            tpot_s=slo.tpot_s,
        )
        plan = decide(
            self._snapshot(recorded),
            request,
            policy,
            entry_site=recorded.entry_site,
            now_s=0.0,
            rng=random.Random(_SEED),
        )
        return _taken(label, plan, policy) if isinstance(plan, Plan) else Taken(label=label, refusal=plan.message)

    def _snapshot(self, recorded: Recorded) -> Snapshot:
        entry = recorded.entry_node_id
        if entry not in self._snapshots:
            seen = [n for n in self._nodes if n.place.tier.value == "core" or n.place.site == recorded.entry_site]
            self._snapshots[entry] = build_snapshot(seen or self._nodes, entry_node_id=entry, version=1, made_s=0.0)
        return self._snapshots[entry]


def _taken(label: str, plan: Plan, policy: Policy) -> Taken:
    choice, prices = plan.choice, policy.prices
    nodes = tuple(dict.fromkeys((choice.prefill.node_id, choice.decode.node_id)))
    by_tier = {
        "core": (prices.core_prefill_per_s, prices.core_decode_per_s),
        "edge": (prices.edge_prefill_per_s, prices.edge_decode_per_s),
    }
    price_s = by_tier[choice.prefill.tier.value][0] * choice.ttft_s
    price_s += by_tier[choice.decode.tier.value][1] * max(0.0, choice.total_s - choice.ttft_s)
    return Taken(
        label=label,
        shape=choice.shape.name.lower(),
        nodes=nodes,
        ttft_s=choice.ttft_s,
        tpot_s=choice.tpot_s,
        price_s=price_s,
    )


def _patterns(policy: Policy) -> set[str]:
    return {f"pattern.{name}" for name in policy.detection.patterns}
