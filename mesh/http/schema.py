"""Request bodies of the OpenAI API as this mesh takes them.

Three kinds of fields: those with a meaning here; those of OpenAI's that would change the result and are not
supported, which are refused by name (`_REFUSED_*`); and everything else, which cannot change the result (`user`,
`store`, `metadata` ...) and is ignored, as clients send more with every version. Sampling fields that OpenAI lacks
(`top_k` ...) sit beside OpenAI's. kvmesh's own are under `kvmesh`, where unknown keys are errors, and are refused
beside it: a label that is lost in silence lets a prompt leave its site. So does a key given twice, which is refused.
Ranges are the entry's business: one rim checks them for gRPC and HTTP alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from mesh.errors import InvalidRequest

MAX_SAMPLES = 16
MAX_BODY_BYTES: Final = 4 * 1024 * 1024

_Whole = Annotated[int, Field(ge=0, le=2**32 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class _Ours(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Placement(_Ours):
    """Where the caller wants it to run; policy decides."""

    shape: Literal["local", "core", "split", "offload", "disaggregated"] | None = None
    node_id: str = ""
    site: str = ""


class Latency(_Ours):
    """Wishes in seconds; `deadline_s` ends the request."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


class Extension(_Ours):
    """The `kvmesh` object of a request."""

    label: str = ""
    placement: Placement | None = None
    latency: Latency | None = None
    idempotency_key: str = ""
    resume_offset_tokens: _Whole = 0
    attributes: dict[str, str] = {}
    continues: str = ""


class StreamOptions(_Body):
    """OpenAI's stream_options."""

    include_usage: bool | None = None


class Sampling(_Body):
    """What both endpoints share. None: not given."""

    model: str = ""
    max_tokens: _Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES, strict=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: _Whole | None = None
    ignore_eos: bool | None = None
    kvmesh: Extension = Extension()


class ContentPart(_Body):
    """One part of a message. Only text is known."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One chat message. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: _Whole | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(Sampling):
    """POST /v1/completions. One prompt: a text, token ids, or a list of one of these."""

    prompt: str | list[_Whole] | list[str] | list[list[_Whole]]
    logprobs: int | None = Field(None, ge=0, le=20)


def _is_one(value: object) -> bool:
    """Whether it is the integer 1: `true` and 1.0 equal it and are other types."""
    return type(value) is int and value == 1


BodyT = TypeVar("BodyT", ChatBody, CompletionBody)

# A field, and whether its value asks for what is not there.
_Refusals = Mapping[str, Callable[[Any], bool]]
_REFUSED: Final[_Refusals] = {
    "logit_bias": bool,
}
_REFUSED_CHAT: Final[_Refusals] = {
    **_REFUSED,
    "tools": bool,
    "tool_choice": lambda v: v != "none",
    "functions": bool,
    "function_call": lambda v: v != "none",
    "response_format": lambda v: not (isinstance(v, dict) and v.get("type") == "text"),
    "modalities": lambda v: v != ["text"],
    "audio": bool,
    "prediction": bool,
    "web_search_options": lambda _: True,
}
_REFUSED_COMPLETION: Final[_Refusals] = {
    **_REFUSED,
    "best_of": lambda v: not _is_one(v),
    "suffix": bool,
    "echo": lambda v: v is not False,
}


def parse_chat(raw: bytes) -> ChatBody:
    """Body of a chat request. Raises InvalidRequest naming the field."""
    return _parse(raw, ChatBody, _REFUSED_CHAT)


def parse_completion(raw: bytes) -> CompletionBody:
    """Body of a completion request. Raises InvalidRequest naming the field."""
    return _parse(raw, CompletionBody, _REFUSED_COMPLETION)


def _parse(raw: bytes, body: type[BodyT], refused: _Refusals) -> BodyT:
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc}", field="body") from exc
    _refuse_repeated_keys(raw)
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object", field="body")
    for field, asks in refused.items():
        if (value := data.get(field)) is not None and asks(value):
            raise InvalidRequest(f"{field} is not supported here: leave it out", field=field)
    for field in Extension.model_fields:
        if data.get(field) is not None:
            raise InvalidRequest(f"{field} is a field of kvmesh's own: put it under `kvmesh`", field=field)
    try:
        return body.model_validate(data)
    except ValidationError as exc:
        # Pydantic's own text quotes the input, which may be a prompt: only its kind and place are told.
        problem = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in problem["loc"] if not _is_branch(part))
        raise InvalidRequest(f"{field or 'body'}: {problem['msg']}", field=field) from None


def _refuse_repeated_keys(raw: bytes) -> None:
    """Of two equal keys one would be lost, a label too. The key is not told unless it is a field's name: it may be
    a user's text."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                known = key == "kvmesh" or key in ChatBody.model_fields or key in Extension.model_fields
                raise InvalidRequest(f"{key if known else 'a key'} is given twice", field=key if known else "body")
            seen.add(key)

    try:
        json.loads(raw, object_pairs_hook=check)
    except ValueError as exc:  # a number of thousands of digits, which is JSON all the same
        raise InvalidRequest("the body is not JSON that can be read here", field="body") from exc


def _is_branch(part: object) -> bool:
    """Whether a step of a pydantic location names a branch of a union and not a place in the body."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "ChatMessage", "ContentPart"))
