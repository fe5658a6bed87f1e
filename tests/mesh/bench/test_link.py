from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mesh.bench.link import Direction, LinkProxy, LinkShape, TokenBucket

MIB = 1024 * 1024


class TestTokenBucket:
    def test_the_rate_holds_after_the_burst(self) -> None:
        bucket = TokenBucket(rate_bytes_per_s=1000.0, burst_bytes=500)
        assert bucket.depart(500, 10.0) == 10.0
        assert bucket.depart(1000, 10.0) == pytest.approx(11.0)
        assert bucket.depart(1000, 10.0) == pytest.approx(12.0)

    def test_a_late_timer_does_not_lower_the_rate(self) -> None:
        bucket = TokenBucket(rate_bytes_per_s=1000.0, burst_bytes=500)
        now_s = bucket.depart(500, 0.0)
        for _ in range(100):
            now_s = bucket.depart(100, now_s + 0.05)  # woken half a chunk's time late each time
        assert now_s == pytest.approx(10.0, abs=0.2)

    def test_a_pause_earns_no_more_than_the_burst(self) -> None:
        bucket = TokenBucket(rate_bytes_per_s=1000.0, burst_bytes=500)
        bucket.depart(500, 0.0)
        assert bucket.depart(500, 100.0) == 100.0
        assert bucket.depart(500, 100.0) == pytest.approx(100.5)

    def test_no_limit(self) -> None:
        bucket = TokenBucket(rate_bytes_per_s=math.inf, burst_bytes=1)
        assert [bucket.depart(MIB, now) for now in (1.0, 1.0, 2.0)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "bad",
    [
        {"rate_bit_per_s": 0.0},
        {"rate_bit_per_s": -1.0},
        {"rate_bit_per_s": math.nan},
        {"delay_s": -0.1},
        {"delay_s": math.inf},
        {"delay_s": math.nan},
        {"burst_bytes": 0},
    ],
)
def test_shapes_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LinkShape(**bad)  # type: ignore[arg-type]


@asynccontextmanager
async def far_host() -> AsyncIterator[int]:
    """Answers each connection: what it reads comes back; at end of input it closes."""
    handlers: set[asyncio.Task[None]] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            while data := await reader.read(64 * 1024):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
            handlers.discard(task)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()


@asynccontextmanager
async def link(up: LinkShape | None = None, down: LinkShape | None = None) -> AsyncIterator[LinkProxy]:
    async with far_host() as port, LinkProxy("127.0.0.1", port, up=up, down=down) as proxy:
        yield proxy


async def connect(proxy: LinkProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def exchange(proxy: LinkProxy, data: bytes) -> tuple[bytes, float]:
    """Send, half-close, read to the end. Returns what came back and how long it took."""
    reader, writer = await connect(proxy)
    started_s = time.perf_counter()
    writer.write(data)
    writer.write_eof()
    back = await reader.read(-1)
    writer.close()
    return back, time.perf_counter() - started_s


async def read_until_reset(reader: asyncio.StreamReader) -> bytes:
    got = b""
    try:
        while data := await reader.read(64 * 1024):
            got += data
    except OSError:
        pass
    return got


async def test_bytes_pass_unchanged_and_are_counted() -> None:
    data = bytes(range(256)) * 8192
    async with link() as proxy:
        back, _ = await exchange(proxy, data)
        assert back == data
        assert (proxy.counters.up_bytes, proxy.counters.down_bytes) == (len(data), len(data))
        assert proxy.counters.connections == 1


async def test_a_quarter_of_the_rate_takes_about_four_times_as_long() -> None:
    data, burst_bytes = bytes(MIB // 4), 32 * 1024
    took_s = {}
    for rate in (8e6, 2e6):
        async with link(up=LinkShape(rate_bit_per_s=rate, burst_bytes=burst_bytes)) as proxy:
            _, took_s[rate] = await exchange(proxy, data)
    assert took_s[2e6] / took_s[8e6] == pytest.approx(4.0, rel=0.3)
    # Never faster than the link: all but the burst has to pass at the rate.
    assert took_s[2e6] >= (len(data) - burst_bytes) * 8 / 2e6


async def test_connections_share_the_rate() -> None:
    data = bytes(MIB // 8)
    async with link(up=LinkShape(rate_bit_per_s=8e6)) as proxy:
        _, alone_s = await exchange(proxy, data)
        together_s = max(took_s for _, took_s in await asyncio.gather(*(exchange(proxy, data) for _ in range(4))))
        assert together_s / alone_s == pytest.approx(4.0, rel=0.4)


async def test_delay_is_paid_once_each_way_and_not_per_chunk() -> None:
    shape = LinkShape(delay_s=0.1)
    async with link(up=shape, down=shape) as proxy:
        _, small_s = await exchange(proxy, b"x")
        _, large_s = await exchange(proxy, bytes(2 * MIB))
    assert small_s >= 0.2
    assert large_s < 3 * small_s  # one chunk at a time would take more than a hundred round trips


async def test_the_link_is_cut_after_exactly_so_many_bytes_and_stays_cut() -> None:
    async with link() as proxy:
        proxy.cut_after(Direction.DOWN, 100_000)
        reader, writer = await connect(proxy)
        writer.write(bytes(MIB))
        assert len(await read_until_reset(reader)) == 100_000
        assert proxy.counters.down_bytes == 100_000
        writer.close()
        assert proxy.is_cut
        reader, writer = await connect(proxy)
        assert await read_until_reset(reader) == b""
        writer.close()
        assert proxy.counters.refused_connections == 1
        proxy.mend()
        back, _ = await exchange(proxy, b"again")
        assert back == b"again"


async def test_cut_resets_all_connections_at_once() -> None:
    async with link() as proxy:
        ends = [await connect(proxy) for _ in range(3)]
        for reader, writer in ends:
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
        await proxy.cut()
        for reader, writer in ends:
            assert await read_until_reset(reader) == b""
            writer.close()


async def test_a_stalled_link_closes_nothing_and_loses_nothing() -> None:
    async with link() as proxy:
        reader, writer = await connect(proxy)
        proxy.stall()
        writer.write(b"held")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.readexactly(4)
        assert proxy.counters.up_bytes == 0
        proxy.resume()
        assert await reader.readexactly(4) == b"held"
        writer.close()


async def test_reshape_takes_effect_on_a_running_link() -> None:
    async with link(up=LinkShape(rate_bit_per_s=5e6)) as proxy:
        _, before_s = await exchange(proxy, bytes(MIB // 4))
        proxy.reshape(Direction.UP, LinkShape(rate_bit_per_s=50e6))
        _, after_s = await exchange(proxy, bytes(MIB // 4))
        assert after_s < before_s / 3


async def test_a_target_that_is_down_looks_like_one() -> None:
    async with far_host() as port:
        pass
    async with LinkProxy("127.0.0.1", port) as proxy:
        reader, writer = await connect(proxy)
        assert await read_until_reset(reader) == b""
        writer.close()


async def test_close_drops_connections_and_is_idempotent() -> None:
    async with link() as proxy:
        reader, writer = await connect(proxy)
        await proxy.close()
        assert await read_until_reset(reader) == b""
        writer.close()
        await proxy.close()


async def test_bad_cut_is_refused() -> None:
    async with link() as proxy:
        with pytest.raises(ValueError, match="size_bytes"):
            proxy.cut_after(Direction.UP, 0)
