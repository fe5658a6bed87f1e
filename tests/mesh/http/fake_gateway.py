"""A gateway that answers from a list of events, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from mesh.errors import InvalidRequest, Unauthenticated
from mesh.identity.principal import AccessRole, Principal
from mesh.v1 import common_pb2, inference_pb2

KEY = "km_test_key"
PIECES = ["Hel", "lo", " wor", "ld"]


def decision() -> inference_pb2.GenerateResponse:
    plan = inference_pb2.Plan(
        shape=inference_pb2.PLAN_SHAPE_SPLIT,
        legs=[
            inference_pb2.PlanLeg(kind="prefill", node_id="core-0", site="cloud"),
            inference_pb2.PlanLeg(kind="decode", node_id="osaka-0", site="osaka"),
        ],
        rule="labels.internal",
        predicted_ttft_s=0.25,
        predicted_total_s=1.5,
    )
    return inference_pb2.GenerateResponse(
        decision=inference_pb2.Decision(
            request_id="osaka-0:ab12", plan=plan, label="internal", policy_version=3, prompt_tokens=7, model="tiny"
        )
    )


def tokens(offset: int, text: str, *, logprobs: bool = False) -> inference_pb2.GenerateResponse:
    delta = inference_pb2.TokenDelta(offset_tokens=offset, ids=[offset], text=text, node_id="osaka-0")
    if logprobs:
        position = delta.logprobs.add()
        position.chosen.id, position.chosen.logprob = offset, -0.5
        for i in (offset, 9):
            position.top.add(id=i, logprob=-0.5 - i)
    return inference_pb2.GenerateResponse(tokens=delta)


def migration() -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        migration=inference_pb2.Migration(
            from_node_id="osaka-0", to_node_id="core-0", offset_tokens=2, kv_wire_bytes=1000, kv_tokens=9, codec="f16",
            cause="operator",
        )
    )  # fmt: skip


def finish(reason: int = common_pb2.FINISH_REASON_STOP) -> inference_pb2.GenerateResponse:
    end = inference_pb2.Finish(
        usage=common_pb2.Usage(prompt_tokens=7, completion_tokens=4, cached_tokens=5), ttft_s=0.1, total_s=0.5
    )
    end.reason = reason  # type: ignore[assignment]
    end.receipt.record.body = b'{"request":1}'
    end.receipt.record.signature = b"\x00\xff"
    end.receipt.legs.add(body=b"{}")
    return inference_pb2.GenerateResponse(finish=end)


def whole_answer(*, logprobs: bool = False) -> list[inference_pb2.GenerateResponse]:
    deltas = [tokens(i, text, logprobs=logprobs) for i, text in enumerate(PIECES)]
    return [decision(), *deltas[:2], migration(), *deltas[2:], finish()]


class FakeGateway:
    """Set `events` (an error is raised at its place; None waits for ever)."""

    def __init__(self) -> None:
        self.events: list[inference_pb2.GenerateResponse | BaseException | None] = list(whole_answer())
        self.by_sample: dict[int, list[inference_pb2.GenerateResponse | BaseException | None]] = {}
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.principals: list[Principal] = []
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()
        self.n_closed = 0
        self.is_ready = True

    async def authenticate(self, authorization: str | None) -> Principal:
        if authorization != f"Bearer {KEY}":
            raise Unauthenticated("no API key, or one that is not known here")
        return Principal(tenant="dev", role=AccessRole.TENANT, key_id="k1")

    async def generate(
        self, principal: Principal, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.principals.append(principal)
        self.requests.append(request)
        try:
            await asyncio.sleep(0)
            for event in self.by_sample.get(request.sampling.sample_index, self.events):
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    self.waiting.set()
                    await asyncio.Event().wait()
                    continue
                yield event
        finally:
            self.n_closed += 1
            self.closed.set()

    async def models(self, principal: Principal) -> list[inference_pb2.ModelInfo]:
        return [inference_pb2.ModelInfo(id="tiny", max_context_tokens=64, node_ids=["core-0", "osaka-0"])]

    def token_bytes(self, model: str, token_ids: Sequence[int]) -> list[bytes]:
        if model != "tiny":
            raise InvalidRequest("unknown")
        return [PIECES[i].encode() if i < len(PIECES) else b"\xe6\x97" for i in token_ids]

    def metrics(self) -> bytes:
        return b"kvmesh_up 1\n"

    def ready(self) -> bool:
        return self.is_ready
