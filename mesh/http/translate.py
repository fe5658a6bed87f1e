"""OpenAI request bodies to mesh.v1.GenerateRequest. Pure. Texts are valid Unicode: the JSON parser sees to that."""

from __future__ import annotations

from collections.abc import Sequence

from mesh.errors import InvalidRequest
from mesh.http.schema import ChatBody, CompletionBody, Extension, Sampling
from mesh.v1 import inference_pb2

_SHAPES = {
    "local": inference_pb2.PLAN_SHAPE_LOCAL,
    "core": inference_pb2.PLAN_SHAPE_CORE,
    "split": inference_pb2.PLAN_SHAPE_SPLIT,
    "offload": inference_pb2.PLAN_SHAPE_OFFLOAD,
    "disaggregated": inference_pb2.PLAN_SHAPE_DISAGGREGATED,
}


def samples_of(request: inference_pb2.GenerateRequest, n: int) -> list[inference_pb2.GenerateRequest]:
    """One request for each of `n` samples. They are requests of their own from here on: each has its plan and its
    receipt, and nodes that can share the prompt's KV do. Raises InvalidRequest if `n` > 1 was given a key to resume
    by, which names one stream."""
    if n == 1:
        return [request]
    if request.idempotency_key:
        raise InvalidRequest("idempotency_key names one stream: leave it out, or n", field="idempotency_key")
    samples = []
    for index in range(n):
        sample = inference_pb2.GenerateRequest()
        sample.CopyFrom(request)
        sample.sampling.sample_index = index
        samples.append(sample)
    return samples


def chat_request(body: ChatBody) -> inference_pb2.GenerateRequest:
    """The request of a chat body. Raises InvalidRequest on fields that contradict each other."""
    request = _request(body)
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        request.chat.messages.add(role=role, content=message.text)
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one", field="max_tokens")
        request.sampling.max_tokens = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    return request


def completion_request(body: CompletionBody) -> inference_pb2.GenerateRequest:
    """The request of a completion body. Raises InvalidRequest for several prompts."""
    request = _request(body)
    prompt = _one_prompt(body.prompt)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.ids.extend(prompt)
    if body.logprobs is not None:
        request.sampling.logprobs = body.logprobs
    return request


def _one_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids  # also the empty list, which the entry refuses as it does an empty text
    if len(prompt) != 1:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts: send one request for each", field="prompt")
    only = prompt[0]
    assert not isinstance(only, int)
    return only


def _request(body: Sampling) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(model=body.model)
    sampling = request.sampling
    for field in (
        "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty",
        "min_tokens", "ignore_eos",
    ):  # fmt: skip
        if (value := getattr(body, field)) is not None:
            setattr(sampling, field, value)
    if body.top_k is not None:
        sampling.top_k = max(body.top_k, 0)  # -1 is what other servers' clients send for "off"
    if body.seed is not None:
        sampling.seed = body.seed % 2**64  # OpenAI's seed is signed
    if body.stop is not None:
        sampling.stop.extend(s for s in ([body.stop] if isinstance(body.stop, str) else body.stop))
    _extend(request, body.kvmesh)
    return request


def _extend(request: inference_pb2.GenerateRequest, extension: Extension) -> None:
    request.label = extension.label
    request.idempotency_key = extension.idempotency_key
    request.resume_offset_tokens = extension.resume_offset_tokens
    request.attributes.update(extension.attributes)
    request.continues = extension.continues
    if (latency := extension.latency) is not None:
        for field in ("ttft_s", "tpot_s", "deadline_s"):
            if (value := getattr(latency, field)) is not None:
                setattr(request.latency, field, value)
    if (wish := extension.placement) is not None:
        if wish.shape is not None:
            request.placement.shape = _SHAPES[wish.shape]
        request.placement.node_id = wish.node_id
        request.placement.site = wish.site
