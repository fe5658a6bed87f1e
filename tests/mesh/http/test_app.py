from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from mesh import errors
from mesh.http import app as app_module
from mesh.http.app import create_app
from mesh.http.errors import STATUS, error_headers
from mesh.http.sse import SseResponse
from tests.mesh.http.fake_gateway import KEY, FakeGateway, decision, finish, tokens, whole_answer

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


def _events(text: str) -> list[Any]:
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_chat_answers_in_openai_s_shape(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    body = response.json()
    assert body["id"] == "chatcmpl-osaka-0:ab12"
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_000, "tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert response.headers["x-kvmesh-request-id"] == "osaka-0:ab12"
    assert response.headers["x-kvmesh-plan"] == "split:core-0,osaka-0"
    assert response.headers["x-kvmesh-label"] == "internal"
    ours = body["kvmesh"]
    assert ours["plan"]["rule"] == "labels.internal"
    assert ours["policy_version"] == 3
    assert ours["migrations"][0]["to_node_id"] == "core-0"
    assert base64.b64decode(ours["receipt"]["record"]["body"]) == b'{"request":1}'
    assert base64.b64decode(ours["receipt"]["record"]["signature"]) == b"\x00\xff"
    assert len(ours["receipt"]["legs"]) == 1
    assert gateway.closed.is_set()


async def test_completion_answers_in_openai_s_shape(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/completions", json=COMPLETION)).json()
    assert body["id"] == "cmpl-osaka-0:ab12"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]


async def test_finish_by_length(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.events = [decision(), finish(reason=2)]
    body = (await http.post("/v1/completions", json=COMPLETION)).json()
    assert body["choices"][0]["finish_reason"] == "length"


async def test_chat_stream(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-kvmesh-plan"] == "split:core-0,osaka-0"
    *chunks, done = _events(response.text)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert {c["id"] for c in chunks} == {"chatcmpl-osaka-0:ab12"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello world"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[3]["kvmesh"]["migration"]["cause"] == "operator"
    assert chunks[-1]["kvmesh"]["label"] == "internal"
    assert not any("usage" in c for c in chunks)


async def test_stream_with_usage(http: httpx.AsyncClient) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, _ = _events((await http.post("/v1/completions", json=COMPLETION | asked)).text)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "Hello world"
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 11


async def test_usage_is_only_a_chunk_of_streams(http: httpx.AsyncClient) -> None:
    asked = {"stream": False, "stream_options": {"include_usage": True}}
    assert (await http.post("/v1/completions", json=COMPLETION | asked)).json()["usage"]["total_tokens"] == 11


async def test_chat_logprobs(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.events = list(whole_answer(logprobs=True))
    asked = {"logprobs": True, "top_logprobs": 2}
    body = (await http.post("/v1/chat/completions", json=CHAT | asked)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["Hel", "lo", " wor", "ld"]
    assert content[0]["bytes"] == [72, 101, 108]
    assert content[0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9.5, "bytes": [0xE6, 0x97]}
    assert gateway.requests[0].sampling.logprobs == 2
    streamed = _events((await http.post("/v1/chat/completions", json=CHAT | asked | {"stream": True})).text)
    parts = [c["choices"][0]["logprobs"] for c in streamed[:-1] if c["choices"][0]["logprobs"]]
    assert [c for part in parts for c in part["content"]] == content


async def test_completion_logprobs(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.events = list(whole_answer(logprobs=True))
    body = (await http.post("/v1/completions", json=COMPLETION | {"logprobs": 2})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hel", "lo", " wor", "ld"]
    assert logprobs["text_offset"] == [0, 3, 5, 9]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][1] == {"lo": -1.5, "\ufffd": -9.5}
    streamed = _events((await http.post("/v1/completions", json=COMPLETION | {"logprobs": 2, "stream": True})).text)
    parts = [c["choices"][0]["logprobs"] for c in streamed[:-1] if c["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 3, 5, 9]


async def test_models(http: httpx.AsyncClient) -> None:
    body = (await http.get("/v1/models")).json()
    assert [m["id"] for m in body["data"]] == ["tiny"]
    assert body["data"][0]["kvmesh"]["node_ids"] == ["core-0", "osaka-0"]
    assert (await http.get("/v1/models/tiny")).json() == body["data"][0]
    assert (await http.get("/v1/models/other")).status_code == 404


async def test_health_and_metrics_need_no_key(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    del http.headers["authorization"]
    assert (await http.get("/healthz")).status_code == 200
    gateway.is_ready = False
    assert (await http.get("/healthz")).status_code == 503
    metrics = await http.get("/metrics")
    assert metrics.content == b"kvmesh_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny"])
async def test_a_missing_or_wrong_key_is_401(http: httpx.AsyncClient, gateway: FakeGateway, path: str) -> None:
    for key in (None, "Bearer wrong"):
        headers = {} if key is None else {"authorization": key}
        http.headers.pop("authorization", None)
        method = "GET" if "models" in path else "POST"
        response = await http.request(method, path, headers=headers, content=b"not even json")
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
    assert not gateway.requests


@pytest.mark.parametrize("cls", [c for c in errors.walk() if c is not errors.MeshError])
async def test_every_error_class_has_its_status(
    http: httpx.AsyncClient, gateway: FakeGateway, cls: type[errors.MeshError]
) -> None:
    gateway.events = [cls("what was wrong", field="temperature", rule="r1")]
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == STATUS[cls.code]
        error = response.json()["error"]
        assert (error["message"], error["param"], error["code"]) == (
            "what was wrong",
            "temperature",
            cls.reason.lower(),
        )
        assert error["kvmesh"]["details"]["rule"] == "r1"
        retried = cls.retry not in (errors.Retry.STOP, errors.Retry.FIX_STATE)
        assert response.headers["x-should-retry"] == ("true" if retried else "false")
    assert gateway.closed.is_set()


@pytest.mark.parametrize(("wait", "shown"), [("0.2", "1"), ("7.2", "8"), ("1e9", "3600"), ("soon", "1"), ("inf", "1")])
def test_back_off_errors_say_how_long(wait: str, shown: str) -> None:
    assert error_headers(errors.Overloaded("x", retry_after_s=wait))["retry-after"] == shown


async def test_an_error_in_mid_stream_is_an_event_and_no_done(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.events = [decision(), tokens(0, "Hel"), errors.NodeUnreachable("core-0 is gone", node="core-0")]
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.status_code == 200
    events = _events(response.text)
    assert events[-1]["error"]["code"] == "node_unreachable"
    assert "[DONE]" not in events


async def test_an_error_in_mid_answer_is_a_status_without_a_stream(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.events = [decision(), tokens(0, "Hel"), errors.NodeUnreachable("core-0 is gone")]
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [[RuntimeError("secret prompt")], [decision(), RuntimeError("secret prompt")], []])
async def test_a_bug_is_500_with_an_id_and_no_text(
    http: httpx.AsyncClient, gateway: FakeGateway, events: list[Any], stream: bool
) -> None:
    gateway.events = events
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert "secret" not in response.text
    error = _events(response.text)[-1] if response.status_code == 200 else response.json()
    assert error["error"]["code"] == "internal"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_without_a_finish_is_an_error(
    http: httpx.AsyncClient, gateway: FakeGateway, stream: bool
) -> None:
    gateway.events = [decision(), tokens(0, "Hel")]
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert "internal" in response.text


async def test_a_body_over_the_limit_is_413(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    response = await http.post("/v1/completions", content=b" " * (4 * 1024 * 1024 + 1))
    assert response.status_code == 413
    assert response.json()["error"]["param"] == "body"
    assert not gateway.requests


async def test_a_body_that_does_not_arrive_is_408(
    http: httpx.AsyncClient, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "BODY_TIMEOUT_S", 0.01)

    async def stalling() -> AsyncIterator[bytes]:
        yield b'{"messages"'
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        response = await http.post("/v1/chat/completions", content=stalling())
    assert (response.status_code, response.headers["connection"]) == (408, "close")
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"] == "body"
    assert not gateway.requests


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2/x", 404), ("GET", "/v1/completions", 405)])
async def test_wrong_paths_and_methods_have_the_same_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


class _Client:
    """An ASGI client that leaves when told."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = json.dumps(body).encode()
        self._sent = False
        self.left = asyncio.Event()
        self.kept_alive = asyncio.Event()
        self.messages: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body") == b": keep-alive\n\n":
            self.kept_alive.set()

    def scope(self, path: str) -> dict[str, Any]:
        return {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("mesh", 80), "client": ("c", 1),
            "headers": [(b"authorization", f"Bearer {KEY}".encode())], "asgi": {"version": "3.0"},
        }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [[None], [decision(), tokens(0, "Hel"), None]])
async def test_a_client_that_leaves_cancels_its_request(gateway: FakeGateway, stream: bool, events: list[Any]) -> None:
    gateway.events = events
    client = _Client(CHAT | {"stream": stream})
    path = "/v1/chat/completions"
    running = asyncio.create_task(create_app(gateway)(client.scope(path), client.receive, client.send))  # type: ignore[arg-type]
    await gateway.waiting.wait()
    assert not gateway.closed.is_set()
    client.left.set()
    await running
    assert gateway.closed.is_set()


async def test_a_quiet_stream_is_kept_alive() -> None:
    go = asyncio.Event()
    closed = asyncio.Event()

    async def events() -> Any:
        await go.wait()
        yield b"data: x\n\n"

    async def on_close() -> None:
        closed.set()

    client = _Client({})
    response = SseResponse(events(), {}, on_close=on_close, keep_alive_s=0.01)
    running = asyncio.create_task(response(client.scope("/"), client.receive, client.send))
    await client.kept_alive.wait()
    go.set()
    await running
    assert any(m.get("body") == b"data: x\n\n" for m in client.messages)
    assert closed.is_set()
