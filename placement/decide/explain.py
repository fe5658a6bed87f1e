"""What the filters say of every node, for people who ask why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mesh.identity.place import Place
from placement.decide.filters import filter_nodes, reasons, word
from placement.decide.refuse import all_bits, in_words
from placement.decide.settings import DEFAULTS, DecideSettings
from placement.decide.types import PlacementRequest, Reason, Snapshot
from placement.policy.rules import DataKind, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """One node; `refused` holds "reason: words" for each reason, empty if the request may run there."""

    place: Place
    refused: tuple[str, ...]


def explain_nodes(
    snapshot: Snapshot,
    request: PlacementRequest,
    policy: Policy,
    *,
    entry_site: str,
    now_s: float = float("nan"),
    settings: DecideSettings = DEFAULTS,
) -> tuple[NodeVerdict, ...]:
    """Verdicts in the order of node ids. `now_s` as for decide; NaN: the snapshot is of now.

    Raises InvalidRequest if the policy does not know the label."""
    now_s = snapshot.made_s if np.isnan(now_s) else now_s
    filtered = filter_nodes(snapshot, request, policy, entry_site=entry_site, now_s=now_s, settings=settings)
    bits = all_bits(snapshot, request, filtered)
    rules = policy.explain_rules(request.label, DataKind.PROMPT)

    def words(reason: Reason) -> str:
        detail = f"; label {request.label} is allowed at {rules}" if reason is Reason.LABEL else ""
        return f"{word(reason)}: {in_words(reason)}{detail}"

    verdicts = [
        NodeVerdict(place=place, refused=tuple(words(reason) for reason in reasons(int(mask))))
        for place, mask in zip(snapshot.places, bits, strict=True)
    ]
    return tuple(sorted(verdicts, key=lambda verdict: verdict.place.node_id))
