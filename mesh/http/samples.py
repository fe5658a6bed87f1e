"""The streams of one HTTP request's samples, told as one: chunks of all of them as they come, the usage last.

If one fails all end: a client that asked for n choices gets n or an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mesh.errors import Internal
from mesh.http.responses import Assembler, Json
from mesh.v1 import inference_pb2

Events = AsyncGenerator[inference_pb2.GenerateResponse, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Owns the streams: `collect` and `begin` close all of them on an error or a cancellation; after `begin` the
    caller closes."""

    events: Sequence[Events]
    assemblers: Sequence[Assembler]

    async def collect(self) -> None:
        """Take all events of all samples."""
        await self._all([_collect(e, a) for e, a in zip(self.events, self.assemblers, strict=True)])

    async def begin(self) -> list[Json]:
        """Wait for the decision of each; their chunks."""
        begun = await self._all([_first(e, a) for e, a in zip(self.events, self.assemblers, strict=True)])
        return [chunk for chunks in begun for chunk in chunks]

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Chunks behind those of `begin`. Raises what a stream raised, and Internal if one ended without a finish."""
        async with aclosing(_merged(self.events)) as events:
            async for index, event in events:
                for chunk in self.assemblers[index].feed(event):
                    yield chunk
        if not all(assembler.finished for assembler in self.assemblers):
            raise Internal("the stream ended without a finish")
        if self.assemblers[0].include_usage:
            yield self.assemblers[0].usage_chunk(self.assemblers)

    async def close(self) -> None:
        """Cancel what still runs."""
        for events in self.events:
            await events.aclose()

    async def _all(self, work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise


async def _collect(events: Events, assembler: Assembler) -> None:
    async with aclosing(events):
        async for event in events:
            assembler.feed(event)


async def _first(events: Events, assembler: Assembler) -> list[Json]:
    try:
        return assembler.feed(await anext(events))
    except StopAsyncIteration:
        raise Internal("the stream ended before it began") from None


async def _merged(streams: Sequence[Events]) -> AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]:
    """Events of all streams with their stream's number, each stream in its order."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, inference_pb2.GenerateResponse | BaseException | None]] = asyncio.Queue(
        maxsize=len(streams)  # a client that does not read holds the streams back
    )

    async def pump(index: int) -> None:
        try:
            async for event in streams[index]:
                await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    pumps = [asyncio.create_task(pump(i), name=f"http:sample-{i}") for i in range(len(streams))]
    try:
        going = len(streams)
        while going:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                going -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
