"""kvmesh's own decision at a modelled entry: the real `decide`, with the real memory of prefixes, over a View."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from placement.decide.decide import decide
from placement.decide.settings import DEFAULTS, DecideSettings
from placement.decide.types import PlacementRequest, Plan, Refusal
from placement.entry.intake import EXPECTED_TOKENS
from placement.entry.learned import PrefixMemory
from placement.policy.model import Policy
from placement.predict.in_flight import Placed
from placement.predict.measured import Measured
from placement.sim.slo import Slo
from placement.sim.traces import TraceRequest
from placement.sim.view import MODEL, View


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpec:
    """What kvmesh is run with."""

    policy: Policy
    slo: Slo
    settings: DecideSettings = DEFAULTS
    refuse_late: bool = True
    most_output_tokens: int = 2048  # what callers give as max_tokens


class OwnRouter:
    """At one entry; nothing of it is shared with others."""

    def __init__(self, spec: OwnSpec, view: View, *, entry_site: str, block_tokens: int, rng: random.Random) -> None:
        self._spec = spec
        self._view = view
        self._entry_site = entry_site
        self._rng = rng
        self._prefixes = PrefixMemory(block_tokens=block_tokens)

    def placement(self, request: TraceRequest) -> PlacementRequest:
        """The features that decide looks at. The real output length is not among them."""
        spec = self._spec
        return PlacementRequest(
            tenant="sim",
            model=MODEL,
            label=request.label,
            prompt_tokens=request.prompt_tokens,
            max_tokens=spec.most_output_tokens,
            expected_tokens=EXPECTED_TOKENS,
            ttft_s=spec.slo.ttft_for(request.prompt_tokens),
            tpot_s=spec.slo.tpot_s,
            ttft_deadline_s=spec.slo.ttft_for(request.prompt_tokens) if spec.refuse_late else None,
        )

    def plan(self, request: TraceRequest, now_s: float) -> Plan | Refusal:
        plan = decide(
            self._view.snapshot(now_s),
            self._with_hits(request, now_s),
            self._spec.policy,
            entry_site=self._entry_site,
            now_s=now_s,
            rng=self._rng,
            settings=self._spec.settings,
        )
        if isinstance(plan, Plan):
            self._place(request, plan, now_s)
        return plan

    def _with_hits(self, request: TraceRequest, now_s: float) -> PlacementRequest:
        """As placement.entry.decisions does."""
        placement = self.placement(request)
        hits = self._prefixes.tokens(_names(request), now_s)
        if not hits:
            return placement
        most = max(hits, key=lambda node_id: hits[node_id])
        known = hits[most] * 2 >= request.prompt_tokens and list(hits.values()).count(hits[most]) == 1
        return replace(placement, cached=hits, session_node_id=most if known else "")

    def _place(self, request: TraceRequest, plan: Plan, now_s: float) -> None:
        choice, key, kv = plan.choice, str(request.index), request.prompt_tokens
        apart = choice.prefill != choice.decode
        tokens = max(request.prompt_tokens - choice.cached_tokens, 0)
        first = Placed(runs=int(not apart), prefill_tokens=tokens, kv_tokens=kv)
        self._view.notes.placed(choice.prefill.node_id, key, first, now_s)
        if apart:
            then = Placed(runs=1, prefill_tokens=0, kv_tokens=kv)
            self._view.notes.placed(choice.decode.node_id, key, then, now_s)

    def started(self, request: TraceRequest, node_id: str, now_s: float) -> None:
        pass

    def prefilled(self, request: TraceRequest, node_id: str, cached_tokens: int, now_s: float) -> None:
        pass

    def ended(self, request: TraceRequest, node_id: str, now_s: float) -> None:
        """As the front door learns: of nodes where a leg ended."""
        self._prefixes.saw(node_id, _names(request), now_s)

    def finished(self, request: TraceRequest, plan: Plan, measured: Measured | None, now_s: float) -> None:
        choice, notes = plan.choice, self._view.notes
        for node_id in {choice.prefill.node_id, choice.decode.node_id}:
            notes.left(node_id, str(request.index))
        if measured is not None and choice.prefill == choice.decode:
            ttft_ratio, tpot_ratio = measured.ratios(choice)
            notes.answered(choice.decode.node_id, ttft_ratio=ttft_ratio, tpot_ratio=tpot_ratio, now_s=now_s)


def _names(request: TraceRequest) -> list[bytes]:
    """Blocks by salted names, as PrefixMemory knows them."""
    return [block.to_bytes(8, "big") for block in request.blocks]
