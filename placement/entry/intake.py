"""From an untrusted request to an accepted one: everything is checked here, before anything leaves the entry.

Tokenises once; ids travel from here on. Raises InvalidRequest naming the field, or UnknownModel.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mesh.errors import InvalidRequest, NotImplementedHere, UnknownModel
from mesh.identity.place import Place, check_name
from mesh.identity.principal import Principal
from mesh.model.chat_template import MAX_MESSAGES, ChatTemplate, Message
from mesh.model.description import ModelDescription, describe
from mesh.model.tokenizer import Tokenizer, load_tokenizer
from mesh.node.sampling import SamplingParams
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb
from placement.decide.types import PlacementRequest, PlanShape, Shipment, Wish
from placement.detect.guard import Guard
from placement.detect.label import Raised, raise_label
from placement.policy.conditions import raised_by
from placement.policy.model import Policy

MAX_PROMPT_CHARS = 2_000_000
MAX_IDEMPOTENCY_KEY_CHARS = 128
MAX_CODEC_CHARS = 128
MAX_ATTRIBUTES = 16
MAX_ATTRIBUTE_CHARS = 256
DEFAULT_MAX_TOKENS = 256
EXPECTED_TOKENS = 128  # guess of an output's length where nothing is known
_INLINE_CHARS = 4_000  # longer text is tokenised off the event loop
_SLICE_CHARS = 8_000
_CUT_TOKENS = 32
# One thread: long prompts wait for one another and not for short ones, and never take more than one core.
_LONG_PROMPTS = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as an entry needs it: facts and tokenizer, no weights."""

    description: ModelDescription
    tokenizer: Tokenizer
    chat: ChatTemplate | None  # None: the model has no template, so it takes no chat

    @property
    def model_id(self) -> str:
        return self.description.model_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request that passed every check. `placement` holds the features that decisions may look at; `raised` tells
    what detectors made of its label."""

    principal: Principal
    model: ServedModel
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    claimed_label: str
    raised: Raised
    placement: PlacementRequest
    idempotency_key: str
    resume_offset_tokens: int


def served_model(model_id: str, path: Path) -> ServedModel:
    """Read facts and tokenizer of a model file. Blocks for up to a second; raises InvalidRequest."""
    description = describe(path, model_id=model_id)
    tokenizer = load_tokenizer(path)
    template = description.chat_template
    return ServedModel(
        description=description,
        tokenizer=tokenizer,
        chat=ChatTemplate(template, tokenizer) if template is not None else None,
    )


def pick_model(name: str, models: Mapping[str, ServedModel], policy: Policy) -> ServedModel:
    """The model asked for, the policy's default, or the only one. Raises UnknownModel or PolicyDenied."""
    wanted = name or policy.default_model or (next(iter(models)) if len(models) == 1 else "")
    if not wanted:
        raise InvalidRequest(f"model is required: one of {', '.join(sorted(models))}", field="model")
    if wanted not in models:
        raise UnknownModel(
            f"unknown model {wanted[:100]!r}: this mesh serves {', '.join(sorted(models))}", field="model"
        )
    policy.check_model(wanted)
    return models[wanted]


async def encode_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    """Token ids of the prompt. Raises InvalidRequest: none, empty, too long, id out of range, bad chat."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("a prompt is required: one of text, chat, tokens", field="prompt")
    if kind == "tokens":
        assert isinstance(request, pb.GenerateRequest)
        return _checked_ids(request.tokens.ids, model)
    encode: Callable[[], Sequence[int]]
    texts: Sequence[str]
    if kind == "text":
        if not request.text:
            raise InvalidRequest("the prompt is empty", field="text")
        texts, encode = (request.text,), lambda: model.tokenizer.encode(request.text)
    else:
        if model.chat is None:
            raise InvalidRequest(f"{model.model_id} has no chat template: send text or tokens", field="chat")
        template, messages = model.chat, _checked_chat(request.chat)
        texts, encode = [m.content for m in messages], lambda: template.encode(messages)
    size = sum(map(len, texts))
    if size > MAX_PROMPT_CHARS:
        raise InvalidRequest(f"the prompt has {size} characters, at most {MAX_PROMPT_CHARS}", field=kind)
    if size <= _INLINE_CHARS:
        ids = encode()
    else:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(_LONG_PROMPTS, refuse_hopeless, model, texts, kind)
        ids = await loop.run_in_executor(_LONG_PROMPTS, encode)
    if not ids:
        raise InvalidRequest("the prompt has no tokens", field=kind)
    return tuple(ids)


async def prompt_text(request: pb.GenerateRequest, model: ServedModel) -> str:
    """What detectors look at: the text, the contents of a chat's messages joined by newlines, or what ids stand for."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "chat":
        return "\n".join(message.content for message in request.chat.messages)
    ids = list(request.tokens.ids)
    if len(ids) <= _INLINE_CHARS:
        return model.tokenizer.decode(ids)
    return await asyncio.get_running_loop().run_in_executor(_LONG_PROMPTS, model.tokenizer.decode, ids)


def refuse_hopeless(model: ServedModel, texts: Sequence[str], field: str) -> None:
    """Raise InvalidRequest for texts that cannot fit the context, before they are tokenised as a whole: a slice at
    a time, so that the work is bounded by the context. A cut makes a few tokens more, which are given back."""
    room = most = model.description.context_tokens
    for text in texts:
        for start in range(0, len(text), _SLICE_CHARS):
            part = text[start : start + _SLICE_CHARS]
            room -= max(0, len(model.tokenizer.encode(part)) - _CUT_TOKENS)
            if room < 0:
                raise InvalidRequest(
                    f"the prompt has more than the {most} tokens that {model.model_id} takes", field=field
                )


def _checked_ids(ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("the prompt is empty", field="tokens")
    vocab = model.description.vocab_size
    if max(ids) >= vocab:
        at = next(i for i, token in enumerate(ids) if token >= vocab)
        raise InvalidRequest(f"token id at index {at} is not below the vocabulary size {vocab}", field="tokens")
    return tuple(ids)


def _checked_chat(chat: pb.Chat) -> list[Message]:
    if not chat.messages:
        raise InvalidRequest("chat has no messages", field="chat")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"chat has {len(chat.messages)} messages, at most {MAX_MESSAGES}", field="chat")
    return [Message(role=m.role, content=m.content) for m in chat.messages]


def sampling_from(params: common.SamplingParams, *, room_tokens: int, seed: int) -> SamplingParams:
    """Defaults filled in. `room_tokens` is what the context leaves; `seed` is used where the caller set none."""
    if params.HasField("n") and params.n == 0:
        raise InvalidRequest("n must be at least 1", field="n")
    if params.HasField("n") and params.n > 1:
        raise NotImplementedHere(
            f"n = {params.n}: send one request for each sample, with its sample_index (HTTP's n does)", field="n"
        )

    def given(field: Any, default: float) -> Any:  # not through float, which has no room for a seed of 64 bits
        return getattr(params, field) if params.HasField(field) else default

    max_tokens = int(given("max_tokens", min(DEFAULT_MAX_TOKENS, room_tokens)))
    if max_tokens > room_tokens:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}, the context leaves room for {room_tokens}", field="max_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=int(given("seed", seed)),
        temperature=given("temperature", 1.0),
        top_k=int(given("top_k", 0)),
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        min_tokens=int(given("min_tokens", 0)),
        ignore_eos=bool(given("ignore_eos", False)),
        stop=tuple(params.stop),
        sample_index=int(given("sample_index", 0)),
        logprobs=int(params.logprobs) if params.HasField("logprobs") else None,
    )


def _wish(wish: pb.PlacementWish) -> Wish:
    shape = None
    if wish.shape != pb.PLAN_SHAPE_UNSPECIFIED:
        try:
            shape = PlanShape(wish.shape)
        except ValueError:
            raise InvalidRequest(f"unknown plan shape {wish.shape}", field="placement.shape") from None
    for field, name in (("placement.node_id", wish.node_id), ("placement.site", wish.site)):
        if name:
            check_name(field, name)
    shipment = None
    if wish.shipment != pb.KV_SHIPMENT_UNSPECIFIED:
        try:
            shipment = Shipment(wish.shipment)
        except ValueError:
            raise InvalidRequest(f"unknown KV shipment {wish.shipment}", field="placement.shipment") from None
    if len(wish.codec) > MAX_CODEC_CHARS or not (wish.codec.isascii() and wish.codec.isprintable()):
        raise InvalidRequest("the codec's name is malformed", field="placement.codec")
    return Wish(shape=shape, node_id=wish.node_id, site=wish.site, codec=wish.codec, shipment=shipment)


def _positive(latency: pb.LatencyWish, field: Literal["ttft_s", "tpot_s", "deadline_s"]) -> float | None:
    if not latency.HasField(field):
        return None
    value = float(getattr(latency, field))
    if not math.isfinite(value) or value <= 0:
        raise InvalidRequest(f"{field} must be a positive number of seconds", field=f"latency.{field}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an entry brings to a request. `continued`: label of the conversation that it continues; empty: of none."""

    models: Mapping[str, ServedModel]
    policy: Policy
    guard: Guard
    own: Place
    seed: int
    continued: str = ""


def _sooner(asked_s: float | None, target_s: float | None) -> float | None:
    return min((s for s in (asked_s, target_s) if s is not None), default=None)


def _check_attributes(attributes: Mapping[str, str]) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidRequest(f"{len(attributes)} attributes, at most {MAX_ATTRIBUTES}", field="attributes")
    for name, value in attributes.items():
        if not 0 < len(name) <= MAX_ATTRIBUTE_CHARS or len(value) > MAX_ATTRIBUTE_CHARS:
            raise InvalidRequest(
                f"an attribute's name has 1 to {MAX_ATTRIBUTE_CHARS} characters, its value at most as many",
                field="attributes",
            )


def _features(request: pb.GenerateRequest, principal: Principal, own: Place, raised: Raised) -> dict[str, Any]:
    """What conditions see of a request; never its text."""
    return {
        "tenant": principal.tenant,
        "key_id": principal.key_id,
        "label": raised.label,
        "claimed_label": request.label,
        "kind": request.WhichOneof("prompt") or "",
        "findings": sorted({f.kind for f in raised.findings}),
        "attributes": dict(request.attributes),
        "entry": {
            "node": own.node_id,
            "site": own.site,
            "region": own.region,
            "jurisdiction": own.jurisdiction,
            "tier": own.tier.value,
        },
    }


def _raise_by_conditions(policy: Policy, raised: Raised, features: Mapping[str, Any]) -> Raised:
    """All see the label as it was before any of them. Raises PolicyDenied."""
    label, held = raised.label, raised_by(policy.conditions, features)
    for _, raise_to in held:
        label = policy.join(label, raise_to)
    return replace(raised, label=label, conditions=tuple(name for name, _ in held))


async def accept(request: pb.GenerateRequest, principal: Principal, terms: Terms) -> Accepted:
    """Check and complete one request under its tenant's policy."""
    policy = terms.policy
    model = pick_model(request.model, terms.models, policy)
    if len(request.idempotency_key) > MAX_IDEMPOTENCY_KEY_CHARS:
        raise InvalidRequest(
            f"idempotency_key has more than {MAX_IDEMPOTENCY_KEY_CHARS} characters", field="idempotency_key"
        )
    if request.resume_offset_tokens and not request.idempotency_key:
        raise InvalidRequest("resume_offset_tokens needs an idempotency_key", field="resume_offset_tokens")
    _check_attributes(request.attributes)
    label = policy.check_label(request.label or policy.default_label)
    if terms.continued:
        # A label that the policy does not know any more was known when it was given: the top is above it.
        known = terms.continued if terms.continued in policy.labels.above else policy.labels.top
        label = policy.join(label, known)
    ids = await encode_prompt(request, model)
    room = model.description.context_tokens - len(ids)
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, {model.model_id} takes {model.description.context_tokens} "
            "for prompt and output together",
            field="prompt",
        )
    raised = Raised(label)
    if policy.detection.wanted:
        raised = await raise_label(terms.guard, policy, label, await prompt_text(request, model))
    raised = replace(raised, continued=terms.continued)
    sampling = sampling_from(request.sampling, room_tokens=room, seed=terms.seed)
    if policy.conditions:
        features = _features(request, principal, terms.own, raised)
        counts = {"model": model.model_id, "prompt_tokens": len(ids), "max_tokens": sampling.max_tokens}
        raised = _raise_by_conditions(policy, raised, features | counts)
    return Accepted(
        principal=principal,
        model=model,
        token_ids=ids,
        sampling=sampling,
        claimed_label=request.label,
        raised=raised,
        placement=PlacementRequest(
            tenant=principal.tenant,
            model=model.model_id,
            label=raised.label,
            prompt_tokens=len(ids),
            max_tokens=sampling.max_tokens,
            expected_tokens=min(EXPECTED_TOKENS, sampling.max_tokens),
            ttft_s=_positive(request.latency, "ttft_s") or policy.targets.ttft_s,
            tpot_s=_positive(request.latency, "tpot_s") or policy.targets.tpot_s,
            deadline_s=_sooner(_positive(request.latency, "deadline_s"), policy.targets.deadline_s),
            ttft_deadline_s=policy.targets.ttft_deadline_s,
            wish=_wish(request.placement),
        ),
        idempotency_key=request.idempotency_key,
        resume_offset_tokens=request.resume_offset_tokens,
    )
