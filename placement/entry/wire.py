"""Placement values to protobuf, for the first and last messages of a response stream. Pure."""

from __future__ import annotations

from mesh.node.engine import FinishReason
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb
from placement.decide.types import Candidate, Plan, PlanShape
from placement.entry import runner_types as rt
from placement.entry.intake import Accepted
from placement.entry.receipt import MAX_FINDINGS

_FINISH = {
    FinishReason.STOP: common.FINISH_REASON_STOP,
    FinishReason.LENGTH: common.FINISH_REASON_LENGTH,
}
_SHAPES = {
    PlanShape.LOCAL: pb.PLAN_SHAPE_LOCAL,
    PlanShape.CORE: pb.PLAN_SHAPE_CORE,
    PlanShape.SPLIT: pb.PLAN_SHAPE_SPLIT,
    PlanShape.OFFLOAD: pb.PLAN_SHAPE_OFFLOAD,
    PlanShape.DISAGGREGATED: pb.PLAN_SHAPE_DISAGGREGATED,
}
_MOST_CANDIDATES = 8


def decision_to_wire(request_id: str, accepted: Accepted, plan: Plan, *, continuation: str = "") -> pb.Decision:
    """The first message of a stream."""
    return pb.Decision(
        request_id=request_id,
        plan=plan_to_wire(plan),
        label=accepted.placement.label,
        policy_version=plan.policy_version,
        prompt_tokens=len(accepted.token_ids),
        model=accepted.model.model_id,
        findings=[
            pb.LabelFinding(kind=f.kind, start=f.start, end=f.end) for f in accepted.raised.findings[:MAX_FINDINGS]
        ],
        not_looked_at=accepted.raised.failure,
        continued_label=accepted.raised.continued,
        conditions=accepted.raised.conditions,
        continuation=continuation,
    )


def plan_to_wire(plan: Plan) -> pb.Plan:
    """The plan with its reasons; fallbacks as plans of their legs only."""
    wire = _way(plan.choice)
    wire.rule = plan.rule
    wire.fallbacks.extend(_way(c) for c in plan.fallbacks)
    wire.candidates.extend(
        pb.Candidate(
            shape=_SHAPES[c.shape],
            prefill_node_id=c.prefill.node_id,
            decode_node_id=c.decode.node_id,
            cost_s=c.cost_s,
            ttft_s=c.ttft_s,
            total_s=c.total_s,
            codec=c.codec,
            own_tokens=c.own_tokens,
            tpot_s=c.tpot_s,
            error_ratio=c.error_ratio,
        )
        for c in plan.candidates[:_MOST_CANDIDATES]
    )
    wire.shipping.extend(
        pb.ShipOption(codec=o.codec, own_tokens=o.own_tokens, ttft_s=o.ttft_s, refused=o.refused) for o in plan.shipping
    )
    wire.why = plan.why
    wire.refused.extend(
        pb.RefusedCount(
            reason=(r.reason.name or str(r.reason.value)).lower(),
            count=r.count,
            node_ids=r.node_ids,
        )
        for r in plan.refused
    )
    return wire


def _way(candidate: Candidate) -> pb.Plan:
    return pb.Plan(
        shape=_SHAPES[candidate.shape],
        legs=_legs(candidate),
        predicted_ttft_s=candidate.ttft_s,
        predicted_total_s=candidate.total_s,
        predicted_tpot_s=candidate.tpot_s,
        error_ratio=candidate.error_ratio,
    )


def _legs(candidate: Candidate) -> list[pb.PlanLeg]:
    first, then = candidate.prefill, candidate.decode
    kinds = {
        PlanShape.LOCAL: (("run", then),),
        PlanShape.CORE: (("run", then),),
        PlanShape.SPLIT: (("prefill", first), ("move_kv", then), ("decode", then)),
        PlanShape.OFFLOAD: (("run", first), ("move_kv", then), ("decode", then)),
        PlanShape.DISAGGREGATED: (("prefill", first), ("move_kv", then), ("decode", then)),
    }[candidate.shape]
    legs = [pb.PlanLeg(kind=kind, node_id=place.node_id, site=place.site) for kind, place in kinds]
    for leg in legs:
        if leg.kind == "move_kv":
            leg.codec, leg.own_tokens = candidate.codec, candidate.own_tokens
    return legs


def migration_to_wire(effect: rt.EmitMigration) -> pb.Migration:
    """A move as the client sees it."""
    return pb.Migration(
        from_node_id=effect.from_node_id,
        to_node_id=effect.to_node_id,
        offset_tokens=effect.offset_tokens,
        kv_wire_bytes=effect.kv_wire_bytes,
        kv_tokens=effect.kv_tokens,
        codec=effect.codec,
        cause=effect.cause.value,
        pause_s=effect.pause_s,
        transfer_s=effect.transfer_s,
        recomputed=effect.recomputed,
        own_tokens=effect.own_tokens,
    )


def finish_to_wire(effect: rt.Finish, receipt: common.Receipt) -> pb.Finish:
    """The last message of a stream."""
    return pb.Finish(
        reason=_FINISH[effect.reason],
        usage=common.Usage(
            prompt_tokens=effect.usage.prompt_tokens,
            completion_tokens=effect.usage.completion_tokens,
            cached_tokens=effect.usage.cached_tokens,
        ),
        receipt=receipt,
        ttft_s=effect.ttft_s,
        total_s=effect.total_s,
        stop_string=effect.stop_string or "",
    )


def logprobs_to_wire(token_id: int, entry: tuple[float, tuple[tuple[int, float], ...]]) -> common.PositionLogprobs:
    """Log-probabilities of one position."""
    chosen, top = entry
    return common.PositionLogprobs(
        chosen=common.TokenLogprob(id=token_id, logprob=chosen),
        top=[common.TokenLogprob(id=i, logprob=p) for i, p in top],
    )
