"""A load generator for one OpenAI-compatible server on loopback: completions of token ids, streamed, timed.

It uses bare sockets and takes as little of the server's processors as it can. One connection a request. A token's time
is that of the event that brings it, which may be without text (a piece of a character); the usage at the end says how
many tokens there were.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LIMIT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What a client saw. Times in seconds after the start, in the order of the requests."""

    wall_s: float
    first_s: tuple[float, ...]
    last_s: tuple[float, ...]
    n_tokens: tuple[int, ...]


class Server:
    """Where the server is and what it wants in each body. `headers`: name -> value."""

    def __init__(self, port: int, *, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self.port = port
        self.body = body
        self.headers = headers or {}

    async def work(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], at_s: Sequence[float]) -> Burst:
        """Send it all, greedy, end of sequence ignored; request i is sent `at_s[i]` after the start. Raises
        RuntimeError on a request that was refused or cut short, or has other than the tokens that were asked for."""
        started = time.perf_counter()
        work = zip(prompts, max_tokens, at_s, strict=True)
        times = await asyncio.gather(*(self._one(*each, started) for each in work))
        return Burst(
            wall_s=time.perf_counter() - started,
            first_s=tuple(first for first, _ in times),
            last_s=tuple(last for _, last in times),
            n_tokens=tuple(max_tokens),
        )

    async def get(self, path: str) -> int | None:
        """The status of a GET, or None if nobody listens."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return None
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return await _status(reader)
        finally:
            writer.close()

    async def _one(self, prompt: Sequence[int], max_tokens: int, at_s: float, started: float) -> tuple[float, float]:
        """When its first and its last token came."""
        await asyncio.sleep(at_s)
        asked = {
            **self.body,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=_LIMIT_BYTES)
        try:
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **self.headers}
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n"
            writer.write(head.encode() + body)
            status = await _status(reader)
            if status != 200:
                raise RuntimeError(f"status {status}: {(await reader.read(2000)).decode(errors='replace')}")
            return await _stream(reader, max_tokens, started)
        finally:
            writer.close()


async def _stream(reader: asyncio.StreamReader, max_tokens: int, started: float) -> tuple[float, float]:
    usage: dict[str, Any] | None = None
    first_s = last_s = -1.0
    async for line in _lines(reader):
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        now_s = time.perf_counter() - started
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        if event.get("choices"):
            first_s, last_s = (now_s if first_s < 0 else first_s), now_s
    if usage is None:
        raise RuntimeError("the stream ended without a usage")
    if usage["completion_tokens"] != max_tokens or first_s < 0:
        raise RuntimeError(f"{usage['completion_tokens']} tokens came, {max_tokens} were asked for")
    return first_s, last_s


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of the body after the status line, chunked or until the end."""
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked = chunked or line == b"transfer-encoding: chunked"
    rest = b""
    while True:
        size = int((await reader.readline()).split(b";")[0] or b"0", 16) if chunked else 1 << 16
        part = await (reader.readexactly(size) if chunked else reader.read(size))
        if chunked:
            await reader.readline()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
        if not part:
            return


async def _status(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise RuntimeError("the server closed the connection")
    return int(line.split()[1])
