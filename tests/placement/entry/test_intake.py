"""Every bad request is refused at the rim, with the field that is wrong; good ones are completed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.errors import InvalidRequest, MeshError, NotImplementedHere, PolicyDenied, UnknownModel
from mesh.identity.place import Tier
from mesh.v1 import inference_pb2 as pb
from placement.decide.types import PlanShape
from placement.detect.guard import Guard
from placement.entry import intake
from placement.entry.intake import Accepted, ServedModel, Terms, accept, prompt_text, refuse_hopeless
from placement.policy.model import parse_policy
from tests.fakes.fake_engine import VOCAB
from tests.fakes.mesh import POLICY, place_of, principal, request_of, toy_model

SEED = 2**64 - 1


GUARD = Guard()


async def take(request: pb.GenerateRequest, *, policy: str = POLICY, models: tuple[str, ...] = ("toy",)) -> Accepted:
    compiled = parse_policy(policy, version=1)
    served = {name: toy_model(context_tokens=64, model_id=name) for name in models}
    terms = Terms(models=served, policy=compiled, guard=GUARD, own=place_of("core-1"), seed=SEED)
    return await accept(request, principal(), terms)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"top_k": 2**31}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 60}, "max_tokens"),
        ({"max_tokens": 2**32 - 1}, "max_tokens"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"label": "secret"}, "label"),
        ({"label": "x" * 10_000}, "label"),
        ({"idempotency_key": "k" * 129}, "idempotency_key"),
        ({"resume_offset_tokens": 1}, "resume_offset_tokens"),
        ({"shape": 99}, "placement.shape"),
        ({"node_id": "no such/name"}, "placement.node_id"),
        ({"site": "x" * 100}, "placement.site"),
        ({"ttft_s": math.nan}, "latency.ttft_s"),
        ({"ttft_s": 0.0}, "latency.ttft_s"),
        ({"tpot_s": -1.0}, "latency.tpot_s"),
        ({"deadline_s": math.inf}, "latency.deadline_s"),
    ],
)
async def test_bad_fields(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await take(request_of("hello", **fields))
    assert caught.value.details["field"] == field


def prompts() -> list[tuple[pb.GenerateRequest, str]]:
    none, empty_text, no_ids, no_chat = (pb.GenerateRequest() for _ in range(4))
    empty_text.text = ""
    no_ids.tokens.SetInParent()
    no_chat.chat.SetInParent()
    out_of_range, long_ids = pb.GenerateRequest(), pb.GenerateRequest()
    out_of_range.tokens.ids.extend([5, VOCAB - 1, VOCAB])
    long_ids.tokens.ids.extend([5] * 64)
    return [
        (none, "prompt"),
        (empty_text, "text"),
        (no_ids, "tokens"),
        (no_chat, "chat"),
        (out_of_range, "tokens"),
        (long_ids, "prompt"),
        (pb.GenerateRequest(text="x" * 64), "prompt"),
        (pb.GenerateRequest(text="\0"), "text"),  # text of which the tokenizer makes nothing
        (pb.GenerateRequest(text="x" * (intake.MAX_PROMPT_CHARS + 1)), "text"),
    ]


@pytest.mark.parametrize(("request_", "field"), prompts())
async def test_bad_prompts(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await take(request_)
    assert caught.value.details["field"] == field
    assert "xxx" not in caught.value.message


async def test_a_chat_needs_a_model_with_a_template_and_not_too_many_messages() -> None:
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content="hi")
    with pytest.raises(InvalidRequest, match="no chat template"):
        await take(request)
    request.chat.messages.extend([pb.ChatMessage(role="user", content="hi")] * intake.MAX_MESSAGES)
    with pytest.raises(InvalidRequest, match="at most"):
        intake._checked_chat(request.chat)
    with pytest.raises(InvalidRequest):
        intake._checked_chat(pb.Chat(messages=[pb.ChatMessage(role="wizard", content="hi")]))


async def test_more_than_one_sample_is_not_implemented() -> None:
    with pytest.raises(NotImplementedHere) as caught:
        await take(request_of("hello", n=2))
    assert caught.value.details["field"] == "n"
    assert (await take(request_of("hello", n=1))).sampling.sample_index == 0
    assert (await take(request_of("hello", sample_index=2))).sampling.sample_index == 2


@pytest.mark.parametrize(
    ("model", "models", "policy", "error"),
    [
        ("other", ("toy",), POLICY, UnknownModel),
        ("", ("a", "b"), POLICY, InvalidRequest),
        ("toy", ("toy", "b"), "version: 1\nmodels: {allowed: [b]}", PolicyDenied),
        ("", ("toy",), "version: 1\nmodels: {allowed: [b]}", PolicyDenied),
        ("", ("toy",), "version: 1\nmodels: {default: gone}", UnknownModel),
    ],
)
async def test_bad_models(model: str, models: tuple[str, ...], policy: str, error: type[MeshError]) -> None:
    with pytest.raises(error):
        await take(request_of("hello", model=model), policy=policy, models=models)


async def test_the_model_may_be_left_out() -> None:
    assert (await take(request_of("hello"))).model.model_id == "toy"
    chosen = await take(request_of("hello"), policy="version: 1\nmodels: {default: b}", models=("a", "b"))
    assert chosen.model.model_id == "b"


async def test_defaults_are_filled_in() -> None:
    accepted = await take(pb.GenerateRequest(text="hello"))
    assert accepted.placement.label == "internal"
    assert accepted.claimed_label == ""
    assert accepted.sampling.max_tokens == 64 - 5  # what the context leaves, since it is below the default
    assert accepted.sampling.temperature == 1.0
    assert accepted.sampling.seed == SEED  # all 64 bits of it
    assert accepted.placement.expected_tokens == accepted.sampling.max_tokens
    assert accepted.placement.deadline_s is None


async def test_what_was_given_is_kept() -> None:
    accepted = await take(
        request_of(
            "hello", seed=2**63 + 1, label="public", shape=pb.PLAN_SHAPE_CORE, node_id="core-1", site="dc1", ttft_s=0.5,
            tpot_s=0.25, deadline_s=8.0, stop=["a", "b"], logprobs=0, top_k=3, min_tokens=2, idempotency_key="k",
            resume_offset_tokens=4,
        )
    )  # fmt: skip
    assert accepted.sampling.seed == 2**63 + 1
    assert (accepted.sampling.stop, accepted.sampling.logprobs, accepted.sampling.top_k) == (("a", "b"), 0, 3)
    wish = accepted.placement.wish
    assert (wish.shape, wish.node_id, wish.site, wish.tier) == (PlanShape.CORE, "core-1", "dc1", None)
    latency = (accepted.placement.ttft_s, accepted.placement.tpot_s, accepted.placement.deadline_s)
    assert latency == (0.5, 0.25, 8.0)
    assert (accepted.idempotency_key, accepted.resume_offset_tokens) == ("k", 4)
    assert accepted.placement.prompt_tokens == len(accepted.token_ids) == 5
    assert Tier.CORE is not accepted.placement.wish.tier


async def test_a_long_text_is_read_off_the_event_loop_and_a_fault_there_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_INLINE_CHARS", 2)
    assert len((await take(request_of("hello"))).token_ids) == 5
    with pytest.raises(InvalidRequest):
        await take(request_of("x" * 64))


def test_served_model_knows_its_id() -> None:
    model: ServedModel = toy_model(model_id="m")
    assert model.model_id == "m"


class _Counting:
    """One token a character; counts what it was given."""

    def __init__(self) -> None:
        self.seen_chars = 0

    def encode(self, text: str) -> list[int]:
        self.seen_chars += len(text)
        return [5] * len(text)


def test_a_hopeless_prompt_is_refused_before_it_is_tokenised_whole() -> None:
    tokenizer = _Counting()
    model = SimpleNamespace(tokenizer=tokenizer, description=SimpleNamespace(context_tokens=20_000), model_id="m")
    with pytest.raises(InvalidRequest, match="more than the 20000 tokens"):
        refuse_hopeless(model, ["x" * 1_900_000], "text")  # type: ignore[arg-type]
    assert tokenizer.seen_chars < 40_000
    refuse_hopeless(model, ["x" * 10_000, "y" * 9_000], "chat")  # type: ignore[arg-type]


LOOKS = "version: 1\ndetectors: {raise_to: {payment_card: confidential}}\n"
CARD = "pay 4111 1111 1111 1111"


@pytest.mark.parametrize("as_tokens", [False, True])
async def test_findings_raise_the_label_however_the_prompt_came(as_tokens: bool) -> None:
    request = pb.GenerateRequest(label="public")
    if as_tokens:
        request.tokens.ids.extend(3 + ord(c) for c in CARD)
    else:
        request.text = CARD
    accepted = await take(request, policy=LOOKS)
    assert (accepted.claimed_label, accepted.placement.label) == ("public", "confidential")
    (finding,) = accepted.raised.findings
    assert (finding.kind, CARD[finding.start : finding.end]) == ("payment_card", "4111 1111 1111 1111")


async def test_what_is_looked_at_of_a_chat_is_every_message() -> None:
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content="my card")
    request.chat.messages.add(role="assistant", content="yes?")
    assert await prompt_text(request, toy_model()) == "my card\nyes?"
