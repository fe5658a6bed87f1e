"""mesh.v1 events to OpenAI's response objects. Pure: an event goes in, JSON-ready objects come out."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, Final
from urllib.parse import quote

from mesh.errors import Internal
from mesh.v1 import common_pb2, inference_pb2

TokenBytes = Callable[[str, Sequence[int]], list[bytes]]
Json = dict[str, Any]

_FINISH: Final[dict[int, str]] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Endpoint(Enum):
    """Which shape the answer takes."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(slots=True, kw_only=True)
class Assembler:
    """The answer to one request, as one object or as chunks. Fed by its owner in the stream's order.

    Of several samples `index` is the choice's, and `first` the assembler of the first one, whose id all chunks bear."""

    endpoint: Endpoint
    created_unix_s: int
    include_usage: bool
    token_bytes: TokenBytes
    index: int = 0
    first: Assembler | None = None
    _decision: inference_pb2.Decision = field(default_factory=inference_pb2.Decision)
    _finish: inference_pb2.Finish | None = None
    _texts: list[str] = field(default_factory=list)
    _positions: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    _migrations: list[Json] = field(default_factory=list)
    _text_offset: int = 0

    def headers(self) -> dict[str, str]:
        """Response headers; complete once the decision was fed."""
        plan = self._decision.plan
        nodes = list(dict.fromkeys(leg.node_id for leg in plan.legs))
        return {
            "x-kvmesh-request-id": _header(self._decision.request_id),
            "x-kvmesh-plan": _header(f"{shape_word(plan.shape)}:{','.join(nodes)}"),
            "x-kvmesh-label": _header(self._decision.label),
        }

    def feed(self, event: inference_pb2.GenerateResponse) -> list[Json]:
        """Take an event; returns the chunks to stream for it."""
        match event.WhichOneof("event"):
            case "decision":
                self._decision = event.decision
                return [self._chunk({"role": "assistant", "content": ""}, "")] if self._is_chat else []
            case "tokens":
                return self._tokens(event.tokens)
            case "migration":
                self._migrations.append(_migration(event.migration))
                return [self._chunk({}, "") | {"kvmesh": {"migration": self._migrations[-1]}}]
            case "finish":
                self._finish = event.finish
                last = self._chunk({}, "", finish_reason=_finish_word(event.finish.reason))
                return [last | {"kvmesh": self.extension()}]
        return []  # an event of a newer entry

    def body(self) -> Json:
        """The whole answer. Raises Internal if the stream ended without a finish."""
        head = self._head("chat.completion" if self._is_chat else "text_completion")
        return head | {"choices": [self.choice()], "usage": usage_json([self]), "kvmesh": self.extension()}

    def choice(self) -> Json:
        """The answer as one of `choices`. Raises Internal if the stream ended without a finish."""
        if self._finish is None:
            raise Internal("the stream ended without a finish")
        text, reason = "".join(self._texts), _finish_word(self._finish.reason)
        logprobs = self._logprobs(self._positions)
        choice: Json = {"index": self.index, "logprobs": logprobs, "finish_reason": reason}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return choice

    @property
    def usage(self) -> common_pb2.Usage:
        """Token counts, once it is finished."""
        assert self._finish is not None
        return self._finish.usage

    @property
    def finished(self) -> bool:
        """Whether the last event was fed."""
        return self._finish is not None

    @property
    def _is_chat(self) -> bool:
        return self.endpoint is Endpoint.CHAT

    def _tokens(self, delta: inference_pb2.TokenDelta) -> list[Json]:
        self._texts.append(delta.text)
        self._positions.extend(delta.logprobs)
        if not delta.text and not delta.logprobs:
            return []  # part of a character or of a possible stop string: nothing to show yet
        logprobs = self._logprobs(delta.logprobs, self._text_offset)
        if logprobs is not None and not self._is_chat:
            self._text_offset += sum(map(len, logprobs["tokens"]))
        return [self._chunk({"content": delta.text} if delta.text else {}, delta.text, logprobs)]

    def usage_chunk(self, samples: Sequence[Assembler]) -> Json:
        """The chunk behind the last one, if it was asked for: token counts of all samples."""
        return self._chunk_head() | {"choices": [], "usage": usage_json(samples)}

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        named_by = self if self.first is None else self.first
        return {
            "id": prefix + named_by._decision.request_id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self._decision.model,
        }

    def _chunk_head(self) -> Json:
        return self._head("chat.completion.chunk" if self._is_chat else "text_completion")

    def _chunk(self, delta: Json, text: str, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice: Json = {"index": self.index, "logprobs": logprobs, "finish_reason": finish_reason}
        choice |= {"delta": delta} if self._is_chat else {"text": text}
        chunk = self._chunk_head() | {"choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _logprobs(self, positions: Sequence[common_pb2.PositionLogprobs], text_offset: int = 0) -> Json | None:
        if not positions:
            return None
        ids = list(dict.fromkeys(entry.id for p in positions for entry in (p.chosen, *p.top)))
        raw = dict(zip(ids, self.token_bytes(self._decision.model, ids), strict=True))
        if self._is_chat:
            return {"content": [_chat_logprobs(p, raw) for p in positions], "refusal": None}
        return _completion_logprobs(positions, {i: _text(data) for i, data in raw.items()}, text_offset)

    def extension(self) -> Json:
        """What kvmesh adds, once it is finished."""
        assert self._finish is not None
        return {
            "request_id": self._decision.request_id,
            "label": self._decision.label,
            "policy_version": self._decision.policy_version,
            "plan": plan_json(self._decision.plan),
            "migrations": self._migrations,
            "ttft_s": self._finish.ttft_s,
            "total_s": self._finish.total_s,
            "stop_string": self._finish.stop_string or None,
            "continuation": self._decision.continuation or None,
            "receipt": receipt_json(self._finish.receipt),
        }


def samples_body(samples: Sequence[Assembler]) -> Json:
    """The whole answer of all samples: a choice for each, and under `kvmesh` what each one's request was told.

    Raises Internal if a stream ended without a finish."""
    if len(samples) == 1:
        return samples[0].body()
    choices = [sample.choice() for sample in samples]
    whole = samples[0].body()
    return whole | {
        "choices": choices,
        "usage": usage_json(samples),
        "kvmesh": {"samples": [sample.extension() for sample in samples]},
    }


def usage_json(samples: Sequence[Assembler]) -> Json:
    """Token counts: the prompt once, the answers together. `cached_tokens` is the first sample's."""
    first = samples[0].usage
    completion_tokens = sum(sample.usage.completion_tokens for sample in samples)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": first.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


def models_body(models: Sequence[inference_pb2.ModelInfo]) -> Json:
    """GET /v1/models."""
    return {"object": "list", "data": [model_json(m) for m in models]}


def model_json(model: inference_pb2.ModelInfo) -> Json:
    """One model object."""
    return {
        "id": model.id,
        "object": "model",
        "created": 0,  # OpenAI's field; a model of a mesh has no such date
        "owned_by": "kvmesh",
        "max_model_len": model.max_context_tokens,
        "kvmesh": {"node_ids": list(model.node_ids)},
    }


def plan_json(plan: inference_pb2.Plan) -> Json:
    """The plan in short: shape, legs, rule and predictions."""
    return {
        "shape": shape_word(plan.shape),
        "legs": [{"kind": leg.kind, "node_id": leg.node_id, "site": leg.site} for leg in plan.legs],
        "rule": plan.rule,
        "predicted_ttft_s": plan.predicted_ttft_s,
        "predicted_total_s": plan.predicted_total_s,
    }


def receipt_json(receipt: common_pb2.Receipt) -> Json:
    """A receipt whose byte fields are base64; a verifier decodes them and has the signed bytes."""
    return {"record": _record(receipt.record), "legs": [_record(leg) for leg in receipt.legs]}


def shape_word(shape: int) -> str:
    """ "split" for PLAN_SHAPE_SPLIT."""
    name = inference_pb2.PlanShape.DESCRIPTOR.values_by_number.get(shape)
    return name.name.removeprefix("PLAN_SHAPE_").lower() if name is not None else f"shape-{shape}"


def _record(record: common_pb2.SignedRecord) -> Json:
    return {
        "body": base64.b64encode(record.body).decode(),
        "signature": base64.b64encode(record.signature).decode(),
        "certificate": base64.b64encode(record.certificate).decode(),
    }


def _migration(migration: inference_pb2.Migration) -> Json:
    return {
        "from_node_id": migration.from_node_id,
        "to_node_id": migration.to_node_id,
        "offset_tokens": migration.offset_tokens,
        "kv_wire_bytes": migration.kv_wire_bytes,
        "kv_tokens": migration.kv_tokens,
        "codec": migration.codec,
        "cause": migration.cause,
        "pause_s": migration.pause_s,
        "transfer_s": migration.transfer_s,
        "recomputed": migration.recomputed,
    }


def _finish_word(reason: int) -> str:
    word = _FINISH.get(reason)
    if word is None:
        raise Internal(f"finish reason {reason} is not known here")
    return word


def _chat_logprobs(position: common_pb2.PositionLogprobs, raw: dict[int, bytes]) -> Json:
    def one(entry: common_pb2.TokenLogprob) -> Json:
        data = raw[entry.id]
        return {"token": _text(data), "logprob": entry.logprob, "bytes": list(data)}

    return one(position.chosen) | {"top_logprobs": [one(t) for t in position.top]}


def _completion_logprobs(
    positions: Sequence[common_pb2.PositionLogprobs], texts: dict[int, str], text_offset: int
) -> Json:
    tokens = [texts[p.chosen.id] for p in positions]
    return {
        "tokens": tokens,
        "token_logprobs": [p.chosen.logprob for p in positions],
        "top_logprobs": [{texts[t.id]: t.logprob for t in p.top} for p in positions],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=text_offset)),
    }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _header(text: str) -> str:
    """A header value: what is not printable ASCII is percent-encoded."""
    return quote(text, safe="!#$&'()*+,-./:;<=>?@[]^_`{|}~ ")
