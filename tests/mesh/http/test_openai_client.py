"""The unmodified `openai` package against a real uvicorn on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from mesh import errors
from mesh.errors import InvalidRequest
from mesh.http.app import create_app
from mesh.http.server import HttpServer
from tests.mesh.http.fake_gateway import KEY, FakeGateway, decision, tokens, whole_answer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def server(gateway: FakeGateway) -> AsyncIterator[HttpServer]:
    server = HttpServer(create_app(gateway), "127.0.0.1:0")
    await server.start()
    yield server
    await server.close(grace_s=1.0)


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HI, user="ignored")  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.model_extra is not None
    assert answer.model_extra["kvmesh"]["plan"]["shape"] == "split"


async def test_headers_and_extension_fields(client: AsyncOpenAI, gateway: FakeGateway) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=HI,  # type: ignore[arg-type]
        extra_body={"kvmesh": {"label": "internal", "placement": {"site": "osaka"}}, "top_k": 5},
    )
    assert raw.headers["x-kvmesh-request-id"] == "osaka-0:ab12"
    assert gateway.requests[0].label == "internal"
    assert gateway.requests[0].placement.site == "osaka"
    assert gateway.requests[0].sampling.top_k == 5


async def test_chat_stream(client: AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.events = list(whole_answer(logprobs=True))
    stream = await client.chat.completions.create(
        model="tiny",
        messages=HI,  # type: ignore[arg-type]
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["kvmesh"]["receipt"]["record"]["body"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 11
    shown = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [t.token for part in shown for t in part.content or ()] == ["Hel", "lo", " wor", "ld"]


@pytest.mark.parametrize("prompt", ["hi", [1, 2, 3]])
async def test_completion(client: AsyncOpenAI, prompt: str | list[int]) -> None:
    answer = await client.completions.create(model="tiny", prompt=prompt)
    assert answer.choices[0].text == "Hello world"
    stream = await client.completions.create(model="tiny", prompt=prompt, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "Hello world"


async def test_models(client: AsyncOpenAI) -> None:
    assert [m.id for m in (await client.models.list()).data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "kvmesh"


async def test_the_blocking_client(server: HttpServer) -> None:
    def talk() -> str:
        with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[arg-type]
            return "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(talk) == "Hello world"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.InvalidRequest("x"), openai.BadRequestError),
        (errors.Unauthenticated("x"), openai.AuthenticationError),
        (errors.PolicyDenied("x"), openai.PermissionDeniedError),
        (errors.UnknownModel("x"), openai.NotFoundError),
        (errors.AlreadyExists("x"), openai.ConflictError),
        (errors.Overloaded("x"), openai.RateLimitError),
        (errors.NoNodeNow("x"), openai.InternalServerError),
        (errors.Internal("x"), openai.InternalServerError),
    ],
)
async def test_errors_are_the_client_s_own(
    client: AsyncOpenAI, gateway: FakeGateway, error: errors.MeshError, raised: type[openai.APIStatusError]
) -> None:
    gateway.events = [error]
    with pytest.raises(raised) as caught:
        await client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
    assert caught.value.code == error.reason.lower()


async def test_an_error_in_mid_stream_is_raised(client: AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.events = [decision(), tokens(0, "Hel"), errors.NodeUnreachable("core-0 is gone")]
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="core-0 is gone"):
        async for _ in stream:
            pass


async def test_a_permanent_error_is_not_tried_again(server: HttpServer, gateway: FakeGateway) -> None:
    gateway.events = [errors.NotImplementedHere("x")]  # 501: the client would retry it by its status
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
    assert len(gateway.requests) == 1


async def test_closing_the_client_s_stream_cancels_the_request(client: AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.events = [decision(), tokens(0, "Hel"), None]
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[arg-type]
    await gateway.waiting.wait()
    await stream.close()
    await asyncio.wait_for(gateway.closed.wait(), 5)


async def test_closing_the_server_ends_open_requests(gateway: FakeGateway) -> None:
    gateway.events = [decision(), None]
    server = HttpServer(create_app(gateway), "127.0.0.1:0")
    await server.start()

    async def ask() -> None:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
            await http.post(f"{server.url}/v1/chat/completions", json={"messages": HI})

    asking = asyncio.create_task(ask())
    await gateway.waiting.wait()
    await server.close(grace_s=0)
    assert gateway.closed.is_set()
    await asyncio.gather(asking, return_exceptions=True)
    await server.close()


async def test_a_port_in_use_is_a_clear_error(server: HttpServer, gateway: FakeGateway) -> None:
    with pytest.raises(InvalidRequest, match="in use"):
        HttpServer(create_app(gateway), server.address)


async def test_plain_http_is_for_loopback_only(gateway: FakeGateway) -> None:
    with pytest.raises(InvalidRequest, match="loopback"):
        HttpServer(create_app(gateway), "0.0.0.0:0")


async def test_a_bad_certificate_is_a_clear_error(gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("not a certificate")
    files = {"cert_file": tmp_path / "cert.pem", "key_file": tmp_path / "cert.pem"}
    server = HttpServer(create_app(gateway), "127.0.0.1:0", **files)
    with pytest.raises(InvalidRequest, match="certificate"):
        await server.start()
    with pytest.raises(InvalidRequest, match="certificate"):
        await HttpServer(create_app(gateway), "127.0.0.1:0", cert_file=tmp_path / "none", key_file=None).start()


async def test_a_server_that_never_started_frees_its_port(gateway: FakeGateway) -> None:
    server = HttpServer(create_app(gateway), "127.0.0.1:0")
    await server.close()
    host, _, port = server.address.rpartition(":")
    with socket.socket() as probe:
        probe.bind((host, int(port)))
