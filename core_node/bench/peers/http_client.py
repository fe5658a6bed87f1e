"""Requests to an OpenAI-compatible server, streamed, with the standard library alone: a load generator for one server
on loopback that takes as little of its processors as it can.

One connection a request. A token's time is that of the event that brings it, which may be without text (a piece of a
character); the usage at the end says how many tokens there were.
"""

import asyncio
import json
import time

import protocol

_LIMIT_BYTES = 1 << 22


class Server:
    """Where the server is and what it wants in each body. `headers`: name -> value."""

    def __init__(self, port, *, body, headers=None):
        self.port = port
        self.body = body
        self.headers = headers or {}

    async def work(self, prompts, max_tokens, at_s):
        """Send it all; returns a driver's answer. Raises RuntimeError on a request that was refused or cut short."""
        watch, started = protocol.Watch(len(prompts)), time.perf_counter()
        work = zip(prompts, max_tokens, at_s, strict=True)
        await asyncio.gather(*(self._one(i, *each, started, watch) for i, each in enumerate(work)))
        return watch.answer(time.perf_counter() - started, with_ids=False)

    async def get(self, path):
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

    async def _one(self, i, prompt, max_tokens, at_s, started, watch):
        await asyncio.sleep(at_s)
        body = json.dumps(
            {
                **self.body,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=_LIMIT_BYTES)
        try:
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **self.headers}
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n"
            writer.write(head.encode() + body)
            status = await _status(reader)
            if status != 200:
                raise RuntimeError(f"status {status}: {(await reader.read(2000)).decode(errors='replace')}")
            await self._stream(i, reader, max_tokens, started, watch)
        finally:
            writer.close()

    async def _stream(self, i, reader, max_tokens, started, watch):
        usage = None
        async for line in _lines(reader):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter() - started
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream ended with an error: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                watch.saw(i, now, n_tokens=1)
        if usage is None:
            raise RuntimeError("the stream ended without a usage")
        if usage["completion_tokens"] != max_tokens:
            raise RuntimeError(f"{usage['completion_tokens']} tokens came, {max_tokens} were asked for")
        watch.n_tokens[i] = max_tokens  # an event may bring several


async def _lines(reader):
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


async def _status(reader):
    line = await reader.readline()
    if not line:
        raise RuntimeError("the server closed the connection")
    return int(line.split()[1])
