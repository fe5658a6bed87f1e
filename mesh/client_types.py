"""What the Python client takes and gives: prompts, options and the events of a generation.

Events are frozen values made from mesh.v1 messages, so that a program needs no protobuf. What administrators read
(snapshots, policies, tenants, explanations) stays a mesh.v1 message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from mesh.errors import Internal, InvalidRequest
from mesh.node.engine import FinishReason
from mesh.v1 import common_pb2, inference_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages as mappings with `role` and `content`."""


class Options(TypedDict, total=False):
    """Options of a request; see mesh.v1.GenerateRequest for meaning, range and default of each."""

    model: str
    label: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    ignore_eos: bool
    stop: Sequence[str]
    logprobs: int
    shape: str  # "local", "core", "split", "offload", "disaggregated"
    node_id: str
    site: str
    codec: str  # of a split's KV
    shipment: str  # of a split: "ship", or "both" (the head is computed where the tail is sent)
    ttft_s: float
    tpot_s: float
    deadline_s: float
    idempotency_key: str
    resume_offset_tokens: int
    attributes: Mapping[str, str]  # for the conditions of the tenant's policy
    continues: str  # `continuation` of the decision of the turn before


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One leg of the plan: `kind` is "run", "prefill", "move_kv" or "decode"."""

    kind: str
    node_id: str
    site: str
    codec: str = ""  # of a move_kv
    own_tokens: int = 0  # of a move_kv: computed at its target meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipOption:
    """A way to get a prompt's KV to where it is decoded: shipped in `codec` (empty: none is), with the first
    `own_tokens` computed there; `refused` says why it was not considered."""

    codec: str
    own_tokens: int
    ttft_s: float
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """First event: where it runs, and by which rule."""

    request_id: str
    model: str
    shape: str
    legs: tuple[Leg, ...]
    label: str
    rule: str
    policy_version: int
    prompt_tokens: int
    predicted_ttft_s: float
    predicted_total_s: float
    why: str = ""  # what was weighed between shipping KV and computing it, in a sentence
    shipping: tuple[ShipOption, ...] = ()
    continuation: str = ""  # option `continues` of the conversation's next turn, so that its label goes on

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Nodes of the plan, in order, each once."""
        return tuple(dict.fromkeys(leg.node_id for leg in self.legs))


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log-probabilities at one position, as (token id, natural logarithm); `top` best first."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Newly generated tokens. `text` is what became final, so it may lag behind `ids`."""

    offset_tokens: int
    ids: tuple[int, ...]
    text: str
    node_id: str
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The request moved; the token stream goes on without a gap."""

    from_node_id: str
    to_node_id: str
    offset_tokens: int
    kv_wire_bytes: int
    kv_tokens: int
    codec: str
    cause: str
    pause_s: float
    transfer_s: float
    recomputed: bool
    own_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Last event. `receipt` is the signed message as it came: give it to mesh.identity.receipt.verify_receipt."""

    reason: FinishReason
    usage: Usage
    receipt: common_pb2.Receipt
    ttft_s: float
    total_s: float
    stop_string: str


Event = Decision | Tokens | Migration | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    ids: tuple[int, ...]
    decision: Decision
    migrations: tuple[Migration, ...]
    finish: Finish


_SAMPLING: Final = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "ignore_eos", "logprobs",
)  # fmt: skip
_TOP_LEVEL: Final = ("model", "label", "idempotency_key", "resume_offset_tokens", "continues")
_SHAPES: Final = {
    "local": inference_pb2.PLAN_SHAPE_LOCAL,
    "core": inference_pb2.PLAN_SHAPE_CORE,
    "split": inference_pb2.PLAN_SHAPE_SPLIT,
    "offload": inference_pb2.PLAN_SHAPE_OFFLOAD,
    "disaggregated": inference_pb2.PLAN_SHAPE_DISAGGREGATED,
}
_SHIPMENTS: Final = {
    "ship": inference_pb2.KV_SHIPMENT_SHIP,
    "both": inference_pb2.KV_SHIPMENT_BOTH,
}
_WORDS: Final[Mapping[int, str]] = {int(number): word for word, number in _SHAPES.items()}
_REASONS: Final[Mapping[int, FinishReason]] = {
    int(common_pb2.FINISH_REASON_STOP): FinishReason.STOP,
    int(common_pb2.FINISH_REASON_LENGTH): FinishReason.LENGTH,
}


def generate_request(prompt: Prompt, options: Options) -> inference_pb2.GenerateRequest:
    """The wire request. Raises InvalidRequest on an unknown option, or a value that its field cannot hold."""
    unknown = set(options) - Options.__optional_keys__
    if unknown:
        raise InvalidRequest(f"unknown options: {', '.join(sorted(unknown))}", field=min(unknown))
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    groups = ((request, _TOP_LEVEL), (request.sampling, _SAMPLING))
    wishes = ((request.placement, ("node_id", "site", "codec")), (request.latency, ("ttft_s", "tpot_s", "deadline_s")))
    for message, fields in (*groups, *wishes):
        for field in fields:
            if (value := options.get(field)) is not None:
                _set(message, field, value)
    stop = options.get("stop", ())
    _extend(request.sampling.stop, [stop] if isinstance(stop, str) else stop, "stop")
    for name, value in options.get("attributes", {}).items():
        try:
            request.attributes[name] = value
        except (TypeError, ValueError) as exc:
            raise InvalidRequest("attributes are names with texts", field="attributes") from exc
    if shape := options.get("shape"):
        if shape not in _SHAPES:
            raise InvalidRequest(f"shape must be one of {', '.join(_SHAPES)}, got {shape!r}", field="shape")
        request.placement.shape = _SHAPES[shape]
    if shipment := options.get("shipment"):
        if shipment not in _SHIPMENTS:
            raise InvalidRequest(f"shipment must be one of {', '.join(_SHIPMENTS)}, got {shipment!r}", field="shipment")
        request.placement.shipment = _SHIPMENTS[shipment]
    return request


def tokenize_request(prompt: Prompt, model: str) -> inference_pb2.TokenizeRequest:
    """The wire request for a text or a chat. Raises InvalidRequest for token ids."""
    request = inference_pb2.TokenizeRequest(model=model)
    _set_prompt(request, prompt)
    return request


def shape_word(shape: int) -> str:
    """ "split" for PLAN_SHAPE_SPLIT; "" for none."""
    return _WORDS.get(shape, "" if shape == 0 else f"shape-{shape}")


def decision_of(message: inference_pb2.Decision) -> Decision:
    """From the wire."""
    plan = message.plan
    return Decision(
        request_id=message.request_id,
        model=message.model,
        shape=shape_word(plan.shape),
        legs=tuple(
            Leg(kind=leg.kind, node_id=leg.node_id, site=leg.site, codec=leg.codec, own_tokens=leg.own_tokens)
            for leg in plan.legs
        ),
        label=message.label,
        rule=plan.rule,
        policy_version=message.policy_version,
        prompt_tokens=message.prompt_tokens,
        predicted_ttft_s=plan.predicted_ttft_s,
        predicted_total_s=plan.predicted_total_s,
        why=plan.why,
        shipping=tuple(
            ShipOption(codec=o.codec, own_tokens=o.own_tokens, ttft_s=o.ttft_s, refused=o.refused)
            for o in plan.shipping
        ),
        continuation=message.continuation,
    )


def tokens_of(message: inference_pb2.TokenDelta) -> Tokens:
    """From the wire."""
    logprobs = tuple(
        PositionLogprobs(chosen=(p.chosen.id, p.chosen.logprob), top=tuple((t.id, t.logprob) for t in p.top))
        for p in message.logprobs
    )
    return Tokens(
        offset_tokens=message.offset_tokens,
        ids=tuple(message.ids),
        text=message.text,
        node_id=message.node_id,
        logprobs=logprobs,
    )


def migration_of(message: inference_pb2.Migration) -> Migration:
    """From the wire."""
    return Migration(
        from_node_id=message.from_node_id,
        to_node_id=message.to_node_id,
        offset_tokens=message.offset_tokens,
        kv_wire_bytes=message.kv_wire_bytes,
        kv_tokens=message.kv_tokens,
        codec=message.codec,
        cause=message.cause,
        pause_s=message.pause_s,
        transfer_s=message.transfer_s,
        recomputed=message.recomputed,
        own_tokens=message.own_tokens,
    )


def finish_of(message: inference_pb2.Finish) -> Finish:
    """From the wire. Raises Internal on a reason that is not known here."""
    reason = _REASONS.get(message.reason)
    if reason is None:
        raise Internal(f"the entry sent the unknown finish reason {message.reason}")
    usage = message.usage
    return Finish(
        reason=reason,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        receipt=message.receipt,
        ttft_s=message.ttft_s,
        total_s=message.total_s,
        stop_string=message.stop_string,
    )


def _set_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if all(isinstance(item, int) for item in prompt):
        if isinstance(request, inference_pb2.TokenizeRequest):
            raise InvalidRequest("the prompt is token ids already", field="prompt")
        _extend(request.tokens.ids, prompt, "prompt")
        return
    for item in prompt:
        if not isinstance(item, Mapping) or set(item) != {"role", "content"}:
            raise InvalidRequest("a chat message is a mapping with role and content, and nothing else", field="prompt")
        message = request.chat.messages.add()
        _set(message, "role", item["role"])
        _set(message, "content", item["content"])


def _set(message: object, field: str, value: object) -> None:
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as exc:
        # The library's text would quote the value, which may be a prompt.
        raise InvalidRequest(f"{field} cannot hold a {type(value).__name__} like this", field=field) from exc


def _extend(target: object, values: object, field: str) -> None:
    try:
        target.extend(values)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as exc:
        raise InvalidRequest(f"{field} holds a value that it cannot hold", field=field) from exc
