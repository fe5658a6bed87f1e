from __future__ import annotations

import json
from typing import Any

import pytest

from mesh.errors import InvalidRequest
from mesh.http.schema import parse_chat, parse_completion
from mesh.http.translate import chat_request, completion_request
from mesh.v1 import inference_pb2

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}


def _chat(**fields: Any) -> inference_pb2.GenerateRequest:
    return chat_request(parse_chat(json.dumps(CHAT | fields).encode()))


def _completion(**fields: Any) -> inference_pb2.GenerateRequest:
    return completion_request(parse_completion(json.dumps(COMPLETION | fields).encode()))


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok", "refusal": None},
    ]
    request = _chat(model="tiny", messages=messages)
    assert request.model == "tiny"
    assert [(m.role, m.content) for m in request.chat.messages] == [
        ("system", "be brief"), ("user", "ab"), ("assistant", "ok"),
    ]  # fmt: skip


def test_what_is_not_given_is_not_set() -> None:
    for request in (_chat(temperature=None, stop=None, max_tokens=None), _completion()):
        assert not request.sampling.ListFields()
        assert not request.HasField("latency")
        assert not request.HasField("placement")


def test_sampling() -> None:
    sampling = _chat(
        temperature=0, top_p=0.5, max_completion_tokens=9, seed=-1, stop="x", presence_penalty=1, frequency_penalty=-1,
        top_k=-1, min_p=0.25, repetition_penalty=1.5, min_tokens=2, ignore_eos=True, logprobs=True,
    ).sampling  # fmt: skip
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.0, 0.5, 9)
    assert sampling.seed == 2**64 - 1
    assert list(sampling.stop) == ["x"]
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.top_k) == (1.0, -1.0, 0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.25, 1.5, 2)
    assert sampling.ignore_eos
    assert sampling.HasField("logprobs")
    assert sampling.logprobs == 0
    assert _completion(logprobs=3, stop=["a", "b"]).sampling.logprobs == 3


def test_the_extension() -> None:
    request = _chat(
        kvmesh={
            "label": "internal",
            "placement": {"shape": "split", "node_id": "n", "site": "osaka"},
            "latency": {"ttft_s": 0.5, "deadline_s": 10},
            "idempotency_key": "k",
            "resume_offset_tokens": 4,
            "attributes": {"team": "x"},
            "continues": "kmc1.abc",
        }
    )
    assert (dict(request.attributes), request.continues) == ({"team": "x"}, "kmc1.abc")
    assert (request.label, request.idempotency_key, request.resume_offset_tokens) == ("internal", "k", 4)
    assert request.placement.shape == inference_pb2.PLAN_SHAPE_SPLIT
    assert (request.placement.node_id, request.placement.site) == ("n", "osaka")
    assert request.latency.ttft_s == 0.5
    assert not request.latency.HasField("tpot_s")


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_a_text_prompt(prompt: Any) -> None:
    assert _completion(prompt=prompt).text == "hi"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_of_token_ids(prompt: Any) -> None:
    assert list(_completion(prompt=prompt).tokens.ids) == [1, 2]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_several_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts"):
        _completion(prompt=prompt)


HARMLESS = {
    "user": "u", "store": True, "metadata": {"a": "b"}, "n": 1, "logit_bias": {}, "service_tier": "auto",
    "parallel_tool_calls": True, "brand_new_field": [1],
}  # fmt: skip


def test_harmless_fields_are_ignored() -> None:
    more = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"]}
    assert _chat(**HARMLESS, **more) == _chat()
    assert _completion(**HARMLESS, echo=False, best_of=1, suffix=None) == _completion()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("response_format", "json"),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
    ],
)
def test_chat_fields_that_would_change_the_result_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is not supported") as caught:
        _chat(**{field: value})
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("best_of", True), ("suffix", "x"), ("echo", True)])
def test_completion_fields_that_would_change_the_result_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is not supported"):
        _completion(**{field: value})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": "2"}, "n"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "body"),
        ({"model": "\udfff"}, "body"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**32}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": [1]}, "stop"),
        ({"kvmesh": {"labels": "x"}}, "kvmesh.labels"),
        ({"kvmesh": {"placement": {"shape": "spilt"}}}, "kvmesh.placement.shape"),
        ({"kvmesh": {"latency": {"ttft_s": "1"}}}, "kvmesh.latency.ttft_s"),
        ({"kvmesh": {"resume_offset_tokens": -1}}, "kvmesh.resume_offset_tokens"),
        ({"kvmesh": []}, "kvmesh"),
        ({"kvmesh": None}, "kvmesh"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _chat(**fields)
    assert caught.value.details["field"].startswith(field)


@pytest.mark.parametrize("prompt", [None, 5, [1, "a"], [-1], [2**32], [True], {}])
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _completion(prompt=prompt)
    assert caught.value.details["field"].startswith("prompt")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff", b"[" * 100_000])
def test_bodies_that_are_not_json_objects_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(raw)


def test_an_error_does_not_quote_the_prompt() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _chat(messages=[{"role": "user", "content": {"secret": "my secret"}}])
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label", "restricted"),
        ("placement", {"shape": "local"}),
        ("latency", {"ttft_s": 1.0}),
        ("idempotency_key", "k"),
        ("resume_offset_tokens", 3),
    ],
)
def test_our_fields_beside_openais_are_refused_and_not_lost(field: str, value: Any) -> None:
    for build in (_chat, _completion):
        with pytest.raises(InvalidRequest, match="under `kvmesh`") as caught:
            build(**{field: value})
        assert caught.value.details["field"] == field
        build(**{field: None})  # as clients send what is not given


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ('"kvmesh": {"label": "restricted"}, "kvmesh": {}', "kvmesh"),
        ('"kvmesh": {"label": "restricted", "label": ""}', "label"),
        ('"model": "a", "model": "b"', "model"),
        ('"my secret": 1, "my secret": 2', "body"),
    ],
)
def test_a_key_given_twice_is_refused(more: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match="twice") as caught:
        parse_chat(b'{"messages": [{"role": "user", "content": "hi"}], ' + more.encode() + b"}")
    assert caught.value.details["field"] == field
    assert "secret" not in str(caught.value)
