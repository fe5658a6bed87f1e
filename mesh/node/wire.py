"""Runs, places and load as protobuf, and back. Pure; KV transfers are in mesh.node.wire_kv.

From the wire: raises InvalidRequest (naming the field) for what cannot be, and RevisionMismatch for a kind that
only a newer build knows. Floats travel as 32 bits.
"""

from __future__ import annotations

import math

from mesh.errors import InvalidRequest, RevisionMismatch
from mesh.identity.place import Place, Role, Tier
from mesh.identity.receipt import record_from_wire, record_to_wire
from mesh.node import wire_bounds as bounds
from mesh.node.engine import EngineLoad, FinishReason, RunId
from mesh.node.latency_model import LatencyCurve
from mesh.node.port import (
    PortEvent,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    RunOrder,
    WorkContext,
)
from mesh.node.sampling import MAX_LOGPROBS, SamplingParams
from mesh.node.serving_role import ServingRole
from mesh.telemetry.traces import checked_traceparent
from mesh.v1 import common_pb2, node_pb2

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
MAX_CONTEXT_TOKENS = 1 << 40
"""More than any node can hold."""
_REASONS_BACK = {wire: reason for reason, wire in _REASONS.items()}
_SAMPLING_SET = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens", "min_tokens", "ignore_eos",
)  # fmt: skip


def place_to_wire(place: Place) -> common_pb2.Place:
    """Dataclass to protobuf."""
    return common_pb2.Place(
        mesh=place.mesh,
        role=place.role.value,
        tier=place.tier.value,
        site=place.site,
        region=place.region,
        jurisdiction=place.jurisdiction,
        node_id=place.node_id,
    )


def place_from_wire(message: common_pb2.Place) -> Place:
    """Protobuf to dataclass. A place that travels is what somebody says of a node; only a certificate proves it."""
    try:
        role, tier = Role(message.role), Tier(message.tier)
    except ValueError as exc:
        raise InvalidRequest(f"unknown role or tier: {exc}", field="place") from exc
    return Place(
        mesh=message.mesh,
        role=role,
        tier=tier,
        site=message.site,
        region=message.region,
        jurisdiction=message.jurisdiction,
        node_id=message.node_id,
    )


def context_to_wire(context: WorkContext) -> node_pb2.WorkContext:
    """Dataclass to protobuf."""
    return node_pb2.WorkContext(
        request_id=context.request_id,
        tenant=context.tenant,
        label=context.label,
        model=context.model,
        salt=context.salt,
        policy_version=context.policy_version,
        deadline_s=context.deadline_s,
        entry_site=context.entry_site,
        traceparent=context.traceparent,
    )


def context_from_wire(message: node_pb2.WorkContext) -> WorkContext:
    """Protobuf to dataclass."""
    if len(message.salt) != bounds.SALT_BYTES:
        raise InvalidRequest(f"salt must have {bounds.SALT_BYTES} bytes, got {len(message.salt)}", field="salt")
    deadline_s: float | None = None
    if message.HasField("deadline_s"):
        deadline_s = message.deadline_s
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise InvalidRequest(f"deadline_s must be finite and above 0, got {deadline_s}", field="deadline_s")
    return WorkContext(
        request_id=bounds.name("request_id", message.request_id),
        tenant=bounds.name("tenant", message.tenant),
        label=bounds.name("label", message.label),
        model=bounds.name("model", message.model),
        salt=message.salt,
        policy_version=message.policy_version,
        deadline_s=deadline_s,
        entry_site=bounds.name("entry_site", message.entry_site, empty=True),
        traceparent=checked_traceparent(message.traceparent),
    )


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Dataclass to protobuf, all fields set."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        logprobs=sampling.logprobs,
        sample_index=sampling.sample_index,
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    """Protobuf to dataclass. Between nodes no field is left to a default: builds may differ in theirs."""
    missing = [field for field in _SAMPLING_SET if not message.HasField(field)]
    if missing:
        raise InvalidRequest(f"sampling.{missing[0]} is not set", field=f"sampling.{missing[0]}")
    if message.HasField("n") and message.n != 1:
        raise InvalidRequest(f"sampling.n must be 1, got {message.n}", field="sampling.n")
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        sample_index=message.sample_index,
    )


def order_to_wire(order: RunOrder) -> node_pb2.RunOrder:
    """Dataclass to protobuf."""
    return node_pb2.RunOrder(
        context=context_to_wire(order.context),
        run_id=order.run_id,
        tokens=common_pb2.TokenIds(ids=order.token_ids),
        prompt_tokens=order.prompt_tokens,
        sampling=sampling_to_wire(order.sampling),
        priority=order.priority,
        kv_from=order.kv_from or "",
        prefill_only=order.prefill_only,
    )


def order_from_wire(message: node_pb2.RunOrder) -> RunOrder:
    """Protobuf to dataclass."""
    kv_from = bounds.name("kv_from", message.kv_from, empty=True)
    return RunOrder(
        context=context_from_wire(message.context),
        run_id=RunId(bounds.name("run_id", message.run_id)),
        token_ids=bounds.token_ids("tokens", message.tokens.ids),
        prompt_tokens=message.prompt_tokens,
        sampling=sampling_from_wire(message.sampling),
        priority=message.priority,
        kv_from=RunId(kv_from) if kv_from else None,
        prefill_only=message.prefill_only,
    )


def event_to_wire(event: PortEvent) -> node_pb2.RunEvent:
    """Dataclass to protobuf."""
    match event:
        case PortPrefilled():
            prefilled = node_pb2.Prefilled(tokens=event.tokens, cached_tokens=event.cached_tokens)
            return node_pb2.RunEvent(prefilled=prefilled)
        case PortTokens():
            tokens = node_pb2.NewTokens(ids=event.ids)
            for token_id, (chosen, top) in zip(event.ids, event.logprobs, strict=bool(event.logprobs)):
                position = tokens.logprobs.add()
                position.chosen.id, position.chosen.logprob = token_id, chosen
                for other_id, logprob in top:
                    position.top.add(id=other_id, logprob=logprob)
            return node_pb2.RunEvent(tokens=tokens)
        case PortFinished():
            finished = node_pb2.RunFinished(
                reason=_REASONS[event.reason], stop_string=event.stop_string or "", leg=record_to_wire(event.leg)
            )
            return node_pb2.RunEvent(finished=finished)
        case PortHeld():
            held = node_pb2.RunHeld(kv_tokens=event.kv_tokens, leg=record_to_wire(event.leg))
            return node_pb2.RunEvent(held=held)


def event_from_wire(message: node_pb2.RunEvent) -> PortEvent:
    """Protobuf to dataclass."""
    match message.WhichOneof("event"):
        case "prefilled":
            return PortPrefilled(tokens=message.prefilled.tokens, cached_tokens=message.prefilled.cached_tokens)
        case "tokens":
            return _tokens_from_wire(message.tokens)
        case "finished":
            finished = message.finished
            reason = _REASONS_BACK.get(finished.reason)
            if reason is None:
                raise RevisionMismatch(f"this build knows no finish reason {finished.reason}")
            leg = record_from_wire(finished.leg)
            return PortFinished(reason=reason, stop_string=finished.stop_string or None, leg=leg)
        case "held":
            return PortHeld(kv_tokens=message.held.kv_tokens, leg=record_from_wire(message.held.leg))
        case _:
            raise RevisionMismatch("a run's event is of a kind that this build does not know")


def _tokens_from_wire(message: node_pb2.NewTokens) -> PortTokens:
    ids = bounds.token_ids("tokens.ids", message.ids)
    if not ids:
        raise InvalidRequest("an event of new tokens has none", field="tokens.ids")
    if message.logprobs and len(message.logprobs) != len(ids):
        raise InvalidRequest("logprobs must be one per token", field="tokens.logprobs")
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = []
    for token_id, position in zip(ids, message.logprobs, strict=False):
        values = [position.chosen, *position.top]
        if position.chosen.id != token_id or len(position.top) > MAX_LOGPROBS:
            raise InvalidRequest("logprobs are not of the token, or too many", field="tokens.logprobs")
        if any(math.isnan(value.logprob) or value.logprob > 0 for value in values):
            raise InvalidRequest("a log-probability is not a number up to 0", field="tokens.logprobs")
        logprobs.append((position.chosen.logprob, tuple((t.id, t.logprob) for t in position.top)))
    return PortTokens(ids, tuple(logprobs))


def load_to_wire(load: EngineLoad, *, draining: bool, role: ServingRole = ServingRole.BOTH) -> node_pb2.NodeLoad:
    """What other nodes are told of an engine's load; the engine's own totals stay here."""
    return node_pb2.NodeLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_used_tokens=load.kv_used_tokens,
        kv_capacity_tokens=load.kv_capacity_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_tokens_per_s=load.decode_tokens_per_s,
        draining=draining,
        role=role.value,
        prefill_token_s=load.prefill_token_s,
        prefill_growth_s=load.prefill_growth_s,
        fit=fit_to_wire(load),
    )


def load_from_wire(message: node_pb2.NodeLoad) -> EngineLoad:
    """Protobuf to dataclass; `draining` and `role` are the message's own."""
    return EngineLoad(
        running=message.running,
        waiting=message.waiting,
        waiting_prefill_tokens=message.waiting_prefill_tokens,
        kv_used_tokens=message.kv_used_tokens,
        kv_capacity_tokens=message.kv_capacity_tokens,
        prefill_tokens_per_s=bounds.not_negative("prefill_tokens_per_s", message.prefill_tokens_per_s),
        decode_tokens_per_s=bounds.not_negative("decode_tokens_per_s", message.decode_tokens_per_s),
        prefill_token_s=bounds.not_negative("prefill_token_s", message.prefill_token_s),
        prefill_growth_s=bounds.not_negative("prefill_growth_s", message.prefill_growth_s),
        curve=curve_from_wire(message.fit),
        context_tokens=min(message.fit.context_tokens, MAX_CONTEXT_TOKENS),
        step_tokens=message.fit.step_tokens,
        most_running=message.fit.most_running,
    )


def fit_to_wire(load: EngineLoad) -> common_pb2.LatencyFit:
    """The fit of an engine's steps, and what is in them."""
    return common_pb2.LatencyFit(
        prefill_base_s=load.curve.prefill_base_s,
        prefill_token_s=load.curve.prefill_token_s,
        prefill_growth_s=load.curve.prefill_growth_s,
        decode_base_s=load.curve.decode_base_s,
        decode_row_s=load.curve.decode_row_s,
        decode_context_s=load.curve.decode_context_s,
        error_ratio=load.curve.error_ratio,
        context_tokens=load.context_tokens,
        step_tokens=load.step_tokens,
        most_running=load.most_running,
    )


def curve_from_wire(message: common_pb2.LatencyFit) -> LatencyCurve:
    """Inverse of the first part. Raises InvalidRequest for figures that cannot be; an absent fit knows nothing."""

    def seconds(name: str) -> float:
        return bounds.not_negative(f"fit.{name}", getattr(message, name))

    return LatencyCurve(
        prefill_base_s=seconds("prefill_base_s"),
        prefill_token_s=seconds("prefill_token_s"),
        prefill_growth_s=seconds("prefill_growth_s"),
        decode_base_s=seconds("decode_base_s"),
        decode_row_s=seconds("decode_row_s"),
        decode_context_s=seconds("decode_context_s"),
        error_ratio=seconds("error_ratio") or 1.0,
    )
