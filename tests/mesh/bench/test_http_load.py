"""The load generator over HTTP against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mesh.bench import http_load

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@asynccontextmanager
async def server(answer: Callable[[dict[str, Any]], bytes]) -> AsyncIterator[int]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-len")), 0)
        body = await reader.readexactly(length)
        writer.write(answer(json.loads(body) if body else {}))
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(one, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


def events(n_tokens: int, *, usage: int | None = None) -> bytes:
    each = [{"choices": [{"text": "", "finish_reason": None}]} for _ in range(n_tokens)]
    each.append({"choices": [], "usage": {"completion_tokens": n_tokens if usage is None else usage}})
    return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in each) + b"data: [DONE]\n\n"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    coded = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in [*pieces, b""])
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + coded


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_are_read_however_they_are_cut_into_chunks(size: int) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> bytes:
        asked.append(body)
        return chunked(events(body["max_tokens"]), size)

    async with server(answer) as port:
        found = await http_load.Server(port, body={"model": "m"}).work([[1, 2], [3]], [3, 2], [0.0, 0.0])
    assert found.n_tokens == (3, 2)
    assert all(0 < f <= last <= found.wall_s for f, last in zip(found.first_s, found.last_s, strict=True))
    assert sorted(body["prompt"] for body in asked) == [[1, 2], [3]]
    assert all(body["model"] == "m" and body["ignore_eos"] and body["temperature"] == 0.0 for body in asked)


async def test_a_body_that_ends_with_the_connection() -> None:
    async with server(lambda body: HEAD + b"\r\n" + events(2)) as port:
        assert (await http_load.Server(port, body={}).work([[1]], [2], [0.0])).n_tokens == (2,)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"HTTP/1.1 429 Too Many\r\n\r\nslow down", "status 429: "),
        (chunked(events(2), 50), "2 tokens came, 3 were asked for"),
        (chunked(events(3, usage=2), 50), "2 tokens came, 3 were asked for"),
        (chunked(b'data: {"error": "out of memory"}\n\n', 50), "ended with an error: out of memory"),
        (chunked(events(3)[:60] + b"\n\n", 500), "without a usage"),
        (b"", "closed the connection"),
    ],
)
async def test_a_failed_request_is_an_error(raw: bytes, said: str) -> None:
    async with server(lambda body: raw) as port:
        with pytest.raises(RuntimeError, match=said):
            await http_load.Server(port, body={}).work([[1]], [3], [0.0])


async def test_a_server_that_is_not_there_yet() -> None:
    async with server(lambda body: b"HTTP/1.1 503 Loading\r\n\r\n") as port:
        assert await http_load.Server(port, body={}).get("/health") == 503
    assert await http_load.Server(port, body={}).get("/health") is None
