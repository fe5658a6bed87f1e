"""Ship and recompute at once: the receiver computes the head of a prompt while KV of the tail comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mesh.errors import InvalidRequest, Overloaded, PayloadCorrupt, PolicyDenied
from mesh.kv.geometry import KvDtype
from mesh.kv.transfer_frames import Chunk, Piece, Want
from mesh.node.engine import RunId
from mesh.node.host_frames import HostFrame
from mesh.node.port import KvDirection, KvReport, KvSource
from tests.fakes.fake_engine import FakeEngine, tokens_of
from tests.fakes.fake_node import MemoryStream, collect, prompt, run_order, until
from tests.mesh.node.test_host_transfer import PULL, PUSH, Pair, make_pair, undisturbed

IDS = prompt(601)
SHIPPED = IDS[:-1]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with make_pair() as pair:
        yield pair


async def both(pair: Pair, own_tokens: int, direction: KvDirection = PULL, **kw: object) -> KvReport:
    prefill = run_order("p", SHIPPED, prefill_only=True)
    source = KvSource(run_id=RunId("p"), prefill=prefill)
    return await pair.move(direction, SHIPPED, source, own_tokens=own_tokens, **kw)


def receiver(pair: Pair, direction: KvDirection) -> tuple[object, FakeEngine]:
    return (pair.edge, pair.edge_engine) if direction is PULL else (pair.core, pair.core_engine)


@pytest.mark.parametrize("direction", [PULL, PUSH])
@pytest.mark.parametrize("own_tokens", [16, 304, 576])
async def test_head_here_tail_from_there(pair: Pair, direction: KvDirection, own_tokens: int) -> None:
    report = await both(pair, own_tokens, direction)
    host, engine = receiver(pair, direction)
    assert (report.tokens, report.skipped_tokens, report.own_tokens) == (600, own_tokens, own_tokens)
    assert report.wire_bytes == (600 - own_tokens) * engine.info.geometry.f16_bytes_per_token
    assert tokens_of(await engine.export_kv(RunId("target"), 0, 600)) == SHIPPED
    outcome = await collect(host, run_order("r", IDS, kv_from=RunId("target")))  # type: ignore[arg-type]
    assert outcome.ids == await undisturbed(IDS, 8)
    now = host.statistics()  # type: ignore[attr-defined]
    assert (now.kv_own_tokens_total, now.kv_skipped_tokens_total) == (own_tokens, 0)


async def test_the_tail_arrives_while_the_head_is_computed(pair: Pair) -> None:
    pair.edge_engine.gate = asyncio.Event()  # the receiver's prefill stands still after its first step
    moving = asyncio.create_task(both(pair, 304))
    theirs = lambda: pair.network.streams[0][1].sent  # noqa: E731
    await until(lambda: bool(pair.network.streams) and any(isinstance(f, Chunk) and f.stop == 600 for f in theirs()))
    assert not moving.done()
    assert next(f.start for f in theirs() if isinstance(f, Chunk)) == 304
    pair.edge_engine.gate.set()
    assert (await moving).own_tokens == 304
    await pair.edge.release(RunId("target"))


async def test_what_the_receiver_has_cached_is_not_computed_again(pair: Pair) -> None:
    await collect(pair.edge, run_order("warm", IDS[:401]))
    report = await both(pair, 304)
    assert report.own_tokens == 0
    assert report.skipped_tokens >= 384
    await pair.edge.release(RunId("target"))


async def test_a_shorter_cached_prefix_shortens_the_head(pair: Pair) -> None:
    await collect(pair.edge, run_order("warm", IDS[:129]))
    report = await both(pair, 304)
    assert report.own_tokens == 304
    assert (await pair.edge_engine.load()).cached_tokens_total >= 112
    await pair.edge.release(RunId("target"))


@pytest.mark.parametrize("own_tokens", [1, 17, 592, 608, 1 << 19])
async def test_an_order_that_cannot_be(pair: Pair, own_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="own_tokens"):
        await both(pair, own_tokens)
    assert pair.edge_engine.hold_ids == []


async def test_not_for_a_source_that_runs(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="own_tokens"):
        await pair.move(PULL, IDS, KvSource(run_id=RunId("r"), pause=True), own_tokens=16)


async def test_the_receivers_place_may_see_the_prompt_or_computes_nothing(pair: Pair) -> None:
    pair.edge_guard.no_prompt.add("paris-1")
    with pytest.raises(PolicyDenied):
        await both(pair, 304)
    assert (await pair.edge_engine.load()).prompt_tokens_total == 0


@pytest.mark.parametrize("at", [0, 1])
async def test_a_flipped_bit_leaves_neither_half(pair: Pair, at: int) -> None:
    seen = 0

    def flip(frame: HostFrame) -> list[HostFrame]:
        nonlocal seen
        if isinstance(frame, Piece):
            seen += 1
            if seen == at + 1:
                return [replace(frame, data=bytes([frame.data[0] ^ 1]) + frame.data[1:])]
        return [frame]

    def tamper(ours: MemoryStream, theirs: MemoryStream) -> None:
        theirs.tamper = flip

    pair.network.on_pair = tamper
    with pytest.raises(PayloadCorrupt):
        await both(pair, 304)
    assert pair.edge_engine.hold_ids == []
    assert (await pair.edge_engine.load()).running == 0
    assert ("DATA_LOSS" in dict(pair.edge.statistics().transfer_failures)) or (
        "PAYLOAD_CORRUPT" in dict(pair.edge.statistics().transfer_failures)
    )


async def test_a_head_that_cannot_be_computed_ends_the_transfer(pair: Pair) -> None:
    async def refuse(spec: object) -> AsyncIterator[object]:
        raise Overloaded("no room for the head")
        yield

    pair.edge_engine.generate = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(Overloaded):
        await both(pair, 304)
    assert pair.edge_engine.hold_ids == []


@pytest.mark.parametrize("frames", range(1, 12))
async def test_cancelled_at_any_frame_leaves_nothing(frames: int) -> None:
    async with make_pair() as pair:
        moving = asyncio.create_task(both(pair, 304))
        await until(
            lambda: moving.done() or (bool(pair.network.streams) and len(pair.network.streams[0][1].sent) >= frames)
        )
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        await pair.edge.release(RunId("target"))


async def test_two_transfers_of_the_same_tokens_at_once() -> None:
    """Each fills a hold of its own; neither sees the other's half."""
    async with make_pair(edge_dtype=KvDtype.F16) as pair:

        async def one(name: str, own_tokens: int) -> KvReport:
            source = KvSource(run_id=RunId(f"p-{name}"), prefill=run_order(f"p-{name}", SHIPPED, prefill_only=True))
            return await pair.move(PULL, SHIPPED, source, target=name, transfer_id=f"t-{name}", own_tokens=own_tokens)

        reports = await asyncio.gather(one("a", 0), one("b", 304), one("c", 304))
        assert [r.tokens for r in reports] == [600, 600, 600]
        want = await undisturbed(IDS, 8)
        for name in "abc":
            assert tokens_of(await pair.edge_engine.export_kv(RunId(name), 0, 600)) == SHIPPED
            assert (await collect(pair.edge, run_order(f"r-{name}", IDS, kv_from=RunId(name)))).ids == want


async def test_the_want_says_where_the_tail_begins(pair: Pair) -> None:
    await both(pair, 304)
    ours = pair.network.streams[0][0].sent
    assert [f.from_position for f in ours if isinstance(f, Want)] == [304]
    await pair.edge.release(RunId("target"))
