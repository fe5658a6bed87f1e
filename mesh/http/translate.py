"""OpenAI request bodies to mesh.v1.GenerateRequest. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mesh.errors import InvalidRequest
from mesh.http.schema import ChatBody, CompletionBody, Extension, Sampling
from mesh.v1 import inference_pb2


def chat_request(body: ChatBody) -> inference_pb2.GenerateRequest:
    """The request of a chat body. Raises InvalidRequest on fields that contradict each other."""
    request = _request(body)
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        request.chat.messages.add(role=role, content=_unicode(message.text, "messages"))
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
        request.text = _unicode(prompt, "prompt")
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
    request = inference_pb2.GenerateRequest(model=_unicode(body.model, "model"))
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
        sampling.stop.extend(_unicode(s, "stop") for s in ([body.stop] if isinstance(body.stop, str) else body.stop))
    _extend(request, body.kvmesh)
    return request


def _extend(request: inference_pb2.GenerateRequest, extension: Extension) -> None:
    request.label = _unicode(extension.label, "kvmesh.label")
    request.idempotency_key = _unicode(extension.idempotency_key, "kvmesh.idempotency_key")
    request.resume_offset_tokens = extension.resume_offset_tokens
    if (latency := extension.latency) is not None:
        for field in ("ttft_s", "tpot_s", "deadline_s"):
            if (value := getattr(latency, field)) is not None:
                setattr(request.latency, field, value)
    if (wish := extension.placement) is not None:
        if wish.shape is not None:
            request.placement.shape = inference_pb2.PlanShape.Value(f"PLAN_SHAPE_{wish.shape.upper()}")
        request.placement.node_id = _unicode(wish.node_id, "kvmesh.placement.node_id")
        request.placement.site = _unicode(wish.site, "kvmesh.placement.site")


def _unicode(text: str, field: str) -> str:
    """JSON can spell half of a surrogate pair, protobuf cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field} holds code points that are not valid Unicode", field=field) from None
    return text
