"""A response of server-sent events that owns its source: closed when the client leaves, and quiet gaps are filled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final

from starlette.types import Receive, Scope, Send

KEEP_ALIVE_S: Final = 15.0  # below the idle limits of common proxies (60 s and up)
_KEEP_ALIVE: Final = b": keep-alive\n\n"


class SseResponse:
    """An ASGI response. `events` are whole events as bytes; the generator is closed in every case, and then
    `on_close` is called, also if not one event was taken."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        on_close: Callable[[], Awaitable[None]],
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._events = events
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send), name="sse:write")
        leaving = asyncio.create_task(until_disconnect(receive), name="sse:leave")
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            await self._on_close()
        if not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            headers = [(k.encode(), v.encode("latin-1")) for k, v in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (event := await self._next(events, send)) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, events: AsyncGenerator[bytes, None], send: Send) -> bytes | None:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait((coming,), timeout=self._keep_alive_s))[0]:
                await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
