"""A TCP proxy that makes a link out of loopback: rate, one-way delay, cuts, stalls, counters. For benchmarks and
fault tests.

It shapes a byte stream, not packets: no loss, no reordering, no slow start of its own. A direction is one link
that all connections share. A chunk departs when the token bucket lets it (a virtual schedule, so that late timers
do not lower the rate), arrives `delay_s` later, and is written to the other side then. Reading stops while a chunk
waits to depart and while `MAX_IN_FLIGHT_BYTES` are under way, so that a slow link pushes back on the sender.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1500, 64 * 1024
MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024


class _LinkCut(Exception):
    """Ends the connection on which a cut came due."""


class Direction(Enum):
    """UP: from the side that connects to the proxy. DOWN: back to it."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """One direction. `burst_bytes` may pass at once after a pause; it also makes up for timers that are late by up
    to its time on the link. None: 20 ms of the rate, at least 32 KiB."""

    rate_bit_per_s: float = math.inf
    delay_s: float = 0.0
    burst_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.rate_bit_per_s > 0:
            raise ValueError(f"rate_bit_per_s must be positive, got {self.rate_bit_per_s}")
        if not 0 <= self.delay_s < math.inf:
            raise ValueError(f"delay_s must be finite and not negative, got {self.delay_s}")
        if self.burst_bytes is not None and self.burst_bytes < 1:
            raise ValueError(f"burst_bytes must be at least 1, got {self.burst_bytes}")

    @property
    def chunk_bytes(self) -> int:
        """Bytes that depart together: 2 ms of the rate, so that little waits behind much."""
        return int(min(max(self.rate_bit_per_s / 8 * 0.002, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES))

    def bucket(self) -> TokenBucket:
        """A fresh bucket for this direction."""
        rate_bytes_per_s = self.rate_bit_per_s / 8
        burst_bytes = self.burst_bytes
        if burst_bytes is None:
            burst_bytes = int(max(32 * 1024, rate_bytes_per_s * 0.02)) if rate_bytes_per_s < math.inf else 1
        return TokenBucket(rate_bytes_per_s=rate_bytes_per_s, burst_bytes=burst_bytes)


class TokenBucket:
    """When bytes may depart. Pure: time comes in and goes out as seconds of one monotonic clock."""

    def __init__(self, *, rate_bytes_per_s: float, burst_bytes: int) -> None:
        self._rate = rate_bytes_per_s
        self._burst_s = burst_bytes / rate_bytes_per_s
        self._clear_at_s = -math.inf  # when all that was let through would have passed at the bare rate

    def depart(self, size_bytes: int, now_s: float) -> float:
        """Take `size_bytes`; returns the time at which the last of them may go, at least `now_s`."""
        self._clear_at_s = max(self._clear_at_s, now_s - self._burst_s) + size_bytes / self._rate
        return max(now_s, self._clear_at_s)


@dataclass(slots=True)
class LinkCounters:
    """Bytes that were written to the far side, and connections that were accepted, since the start."""

    up_bytes: int = 0
    down_bytes: int = 0
    connections: int = 0
    refused_connections: int = 0


class _Lane:
    """One direction of the link: its bucket, and how many bytes may still pass before it cuts."""

    def __init__(self, shape: LinkShape) -> None:
        self.cut_after_bytes: int | None = None
        self.shape = shape

    @property
    def shape(self) -> LinkShape:
        return self._shape

    @shape.setter
    def shape(self, shape: LinkShape) -> None:
        self._shape = shape
        self.bucket = shape.bucket()


class LinkProxy:
    """Listens on loopback and forwards to `target`. Use as an async context manager, or `start` and `close`."""

    def __init__(
        self, target_host: str, target_port: int, *, up: LinkShape | None = None, down: LinkShape | None = None
    ) -> None:
        self._target = (target_host, target_port)
        self._lanes = {Direction.UP: _Lane(up or LinkShape()), Direction.DOWN: _Lane(down or LinkShape())}
        self.counters = LinkCounters()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> LinkProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """host:port to connect to."""
        if self._server is None:
            raise RuntimeError("the proxy was not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def port(self) -> int:
        """Port to connect to."""
        return int(self.address.rpartition(":")[2])

    async def start(self) -> None:
        """Listen on a free loopback port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=MAX_CHUNK_BYTES)

    async def close(self) -> None:
        """Stop listening and drop all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._drop_all())
        if self._server is not None:
            await self._server.wait_closed()

    def reshape(self, direction: Direction, shape: LinkShape) -> None:
        """Change one direction; what departed already keeps its delay."""
        self._lanes[direction].shape = shape

    async def cut(self) -> None:
        """Cut the link: connections are reset, new ones too, until `mend`."""
        self._is_cut = True
        await asyncio.gather(*self._drop_all())

    def cut_after(self, direction: Direction, size_bytes: int) -> None:
        """Cut the link when exactly so many more bytes have passed in this direction, over all connections."""
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be at least 1, got {size_bytes}")
        self._lanes[direction].cut_after_bytes = size_bytes

    def mend(self) -> None:
        """Undo a cut, and one that is still to come."""
        self._is_cut = False
        for lane in self._lanes.values():
            lane.cut_after_bytes = None

    @property
    def is_cut(self) -> bool:
        """No connection passes now."""
        return self._is_cut

    def stall(self) -> None:
        """Let nothing pass and close nothing: what a half-open connection looks like from both ends."""
        self._flowing.clear()

    def resume(self) -> None:
        """Undo `stall`; what was held arrives."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not run by start_server")
        self._connections.add(task)
        try:
            if self._is_cut:
                self.counters.refused_connections += 1
                return
            self.counters.connections += 1
            await self._connect(reader, writer)
        except asyncio.CancelledError:
            return  # dropped by a cut or by close; nobody else cancels it
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=MAX_CHUNK_BYTES)
        except OSError:
            return  # as if the far host refused: the caller resets the near side
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(Direction.UP, reader, far_writer))
                tasks.create_task(self._forward(Direction.DOWN, far_reader, writer))
        except* (OSError, _LinkCut):
            pass  # one side reset, or the link was cut: both ends see it
        finally:
            far_writer.transport.abort()

    async def _forward(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # drain waits until the socket has it all
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_IN_FLIGHT_BYTES // MAX_CHUNK_BYTES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._arrive(direction, under_way, room.release, writer))
            lane, loop = self._lanes[direction], asyncio.get_running_loop()
            while True:
                await room.acquire()
                data = await reader.read(lane.shape.chunk_bytes)
                departs_s = lane.bucket.depart(len(data), loop.time())
                await asyncio.sleep(departs_s - loop.time())
                under_way.put_nowait((departs_s + lane.shape.delay_s, data))
                if not data:
                    return

    async def _arrive(
        self,
        direction: Direction,
        under_way: asyncio.Queue[tuple[float, bytes]],
        release: Callable[[], None],
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrives_s, data = await under_way.get()
            await asyncio.sleep(arrives_s - loop.time())
            await self._flowing.wait()
            if not data:
                writer.write_eof()
                return
            await self._deliver(direction, data, writer)
            release()

    async def _deliver(self, direction: Direction, data: bytes, writer: asyncio.StreamWriter) -> None:
        lane = self._lanes[direction]
        budget = lane.cut_after_bytes
        passing = data if budget is None else data[:budget]
        writer.write(passing)
        await writer.drain()
        if direction is Direction.UP:
            self.counters.up_bytes += len(passing)
        else:
            self.counters.down_bytes += len(passing)
        if budget is not None:
            lane.cut_after_bytes = budget - len(passing)
            if lane.cut_after_bytes == 0:
                self._is_cut = True
                self._drop_all()
                raise _LinkCut

    def _drop_all(self) -> set[asyncio.Task[None]]:
        dropped = set(self._connections)
        for task in dropped:
            task.cancel()
        return dropped
