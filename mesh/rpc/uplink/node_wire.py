"""Node values to protobuf and back, as far as the uplink needs them. Raises InvalidRequest on what is not valid."""

from __future__ import annotations

import math

from mesh.errors import InvalidRequest, RevisionMismatch
from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import SignedRecord
from mesh.node.engine import EngineLoad, FinishReason, RunId
from mesh.node.port import (
    KvDirection,
    KvOrder,
    KvReport,
    KvSource,
    Peer,
    PortEvent,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    RunOrder,
    WorkContext,
)
from mesh.node.sampling import SamplingParams
from mesh.v1 import common_pb2, node_pb2, uplink_pb2

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK = {wire: value for value, wire in _FINISH.items()}
_DIRECTION = {
    KvDirection.PUSH: node_pb2.KV_DIRECTION_PUSH,
    KvDirection.PULL: node_pb2.KV_DIRECTION_PULL,
}
_DIRECTION_BACK = {wire: value for value, wire in _DIRECTION.items()}


def context_to_wire(c: WorkContext) -> node_pb2.WorkContext:
    return node_pb2.WorkContext(
        request_id=c.request_id, tenant=c.tenant, label=c.label, model=c.model, salt=c.salt,
        policy_version=c.policy_version, deadline_s=c.deadline_s, entry_site=c.entry_site,
    )  # fmt: skip


def context_from_wire(c: node_pb2.WorkContext) -> WorkContext:
    return WorkContext(
        request_id=c.request_id, tenant=c.tenant, label=c.label, model=c.model, salt=c.salt,
        policy_version=c.policy_version, deadline_s=c.deadline_s if c.HasField("deadline_s") else None,
        entry_site=c.entry_site,
    )  # fmt: skip


def sampling_to_wire(s: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p,
        repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty, seed=s.seed, max_tokens=s.max_tokens, min_tokens=s.min_tokens,
        ignore_eos=s.ignore_eos, stop=s.stop, logprobs=s.logprobs,
    )  # fmt: skip


def sampling_from_wire(s: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=s.max_tokens, seed=s.seed, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p,
        repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty, min_tokens=s.min_tokens, ignore_eos=s.ignore_eos, stop=tuple(s.stop),
        logprobs=s.logprobs if s.HasField("logprobs") else None,
    )  # fmt: skip


def order_to_wire(o: RunOrder) -> node_pb2.RunOrder:
    return node_pb2.RunOrder(
        context=context_to_wire(o.context), run_id=o.run_id, tokens=common_pb2.TokenIds(ids=o.token_ids),
        prompt_tokens=o.prompt_tokens, sampling=sampling_to_wire(o.sampling), priority=o.priority,
        kv_from=o.kv_from or "", prefill_only=o.prefill_only,
    )  # fmt: skip


def order_from_wire(o: node_pb2.RunOrder) -> RunOrder:
    return RunOrder(
        context=context_from_wire(o.context), run_id=RunId(o.run_id), token_ids=tuple(o.tokens.ids),
        prompt_tokens=o.prompt_tokens, sampling=sampling_from_wire(o.sampling), priority=o.priority,
        kv_from=RunId(o.kv_from) if o.kv_from else None, prefill_only=o.prefill_only,
    )  # fmt: skip


def record_to_wire(r: SignedRecord) -> common_pb2.SignedRecord:
    return common_pb2.SignedRecord(body=r.body, signature=r.signature, certificate=r.certificate)


def record_from_wire(r: common_pb2.SignedRecord) -> SignedRecord:
    return SignedRecord(body=r.body, signature=r.signature, certificate=r.certificate)


def event_to_wire(event: PortEvent) -> node_pb2.RunEvent:
    match event:
        case PortPrefilled():
            return node_pb2.RunEvent(
                prefilled=node_pb2.Prefilled(tokens=event.tokens, cached_tokens=event.cached_tokens)
            )
        case PortTokens():
            return node_pb2.RunEvent(tokens=node_pb2.NewTokens(ids=event.ids))
        case PortFinished():
            finished = node_pb2.RunFinished(
                reason=_FINISH[event.reason], stop_string=event.stop_string or "", leg=record_to_wire(event.leg)
            )
            return node_pb2.RunEvent(finished=finished)
        case PortHeld():
            held = node_pb2.RunHeld(kv_tokens=event.kv_tokens, leg=record_to_wire(event.leg))
            return node_pb2.RunEvent(held=held)


def event_from_wire(event: node_pb2.RunEvent) -> PortEvent:
    match event.WhichOneof("event"):
        case "prefilled":
            return PortPrefilled(tokens=event.prefilled.tokens, cached_tokens=event.prefilled.cached_tokens)
        case "tokens":
            return PortTokens(tuple(event.tokens.ids))
        case "finished":
            reason = _FINISH_BACK.get(event.finished.reason)
            if reason is None:
                raise RevisionMismatch(f"unknown finish reason {event.finished.reason}")
            return PortFinished(
                reason=reason,
                stop_string=event.finished.stop_string or None,
                leg=record_from_wire(event.finished.leg),
            )
        case "held":
            return PortHeld(kv_tokens=event.held.kv_tokens, leg=record_from_wire(event.held.leg))
        case _:
            raise RevisionMismatch("an event of a kind that this build does not know")


def place_to_wire(p: Place) -> common_pb2.Place:
    return common_pb2.Place(
        mesh=p.mesh, role=p.role.value, tier=p.tier.value, site=p.site, region=p.region,
        jurisdiction=p.jurisdiction, node_id=p.node_id,
    )  # fmt: skip


def place_from_wire(p: common_pb2.Place) -> Place:
    try:
        role, tier = Role(p.role), Tier(p.tier)
    except ValueError as exc:
        raise InvalidRequest(f"unknown role or tier: {exc}", field="place") from exc
    return Place(
        mesh=p.mesh, role=role, tier=tier, site=p.site, region=p.region, jurisdiction=p.jurisdiction,
        node_id=p.node_id,
    )  # fmt: skip


def kv_order_to_wire(o: KvOrder) -> tuple[node_pb2.KvOpen, str, common_pb2.Place]:
    opening = node_pb2.KvOpen(
        transfer_id=o.transfer_id, direction=_DIRECTION[o.direction], context=context_to_wire(o.context),
        source_run_id=o.source.run_id, prefill=order_to_wire(o.source.prefill) if o.source.prefill else None,
        pause=o.source.pause, target_run_id=o.target, tokens=common_pb2.TokenIds(ids=o.token_ids),
        max_tokens=o.max_tokens, codec=o.codec,
    )  # fmt: skip
    return opening, o.peer.address, place_to_wire(o.peer.place)


def kv_order_from_wire(o: node_pb2.KvOpen, address: str, place: common_pb2.Place) -> KvOrder:
    direction = _DIRECTION_BACK.get(o.direction)
    if direction is None:
        raise InvalidRequest(f"unknown direction {o.direction}", field="direction")
    return KvOrder(
        context=context_from_wire(o.context),
        transfer_id=o.transfer_id,
        direction=direction,
        peer=Peer(address=address, place=place_from_wire(place)),
        source=KvSource(
            run_id=RunId(o.source_run_id),
            prefill=order_from_wire(o.prefill) if o.HasField("prefill") else None,
            pause=o.pause,
        ),
        target=RunId(o.target_run_id),
        token_ids=tuple(o.tokens.ids),
        max_tokens=o.max_tokens,
        codec=o.codec,
    )


def report_to_wire(r: KvReport) -> uplink_pb2.KvReport:
    return uplink_pb2.KvReport(
        transfer_id=r.transfer_id, tokens=r.tokens, skipped_tokens=r.skipped_tokens, wire_bytes=r.wire_bytes,
        codec=r.codec, duration_s=r.duration_s, first_chunk_s=r.first_chunk_s,
        leg=record_to_wire(r.leg) if r.leg else None,
    )  # fmt: skip


def report_from_wire(r: uplink_pb2.KvReport) -> KvReport:
    return KvReport(
        transfer_id=r.transfer_id, tokens=r.tokens, skipped_tokens=r.skipped_tokens, wire_bytes=r.wire_bytes,
        codec=r.codec, duration_s=r.duration_s, first_chunk_s=r.first_chunk_s,
        leg=record_from_wire(r.leg) if r.HasField("leg") else None,
    )  # fmt: skip


def load_to_wire(load: EngineLoad, *, draining: bool) -> node_pb2.NodeLoad:
    return node_pb2.NodeLoad(
        running=load.running, waiting=load.waiting, waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_used_tokens=load.kv_used_tokens, kv_capacity_tokens=load.kv_capacity_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s, decode_tokens_per_s=load.decode_tokens_per_s,
        draining=draining,
    )  # fmt: skip


def load_from_wire(load: node_pb2.NodeLoad) -> EngineLoad:
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        if not 0 <= getattr(load, name) < math.inf:
            raise InvalidRequest(f"{name} must be finite and not negative", field=name)
    return EngineLoad(
        running=load.running, waiting=load.waiting, waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_used_tokens=load.kv_used_tokens, kv_capacity_tokens=load.kv_capacity_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s, decode_tokens_per_s=load.decode_tokens_per_s,
    )  # fmt: skip
