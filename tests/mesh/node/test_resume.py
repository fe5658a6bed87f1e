"""Transfers whose connection breaks, and receivers that are slow: two hosts linked in memory.

After a break the transfer goes on over another connection, or both ends free everything in time; nothing is written
twice. What is under way is bounded by the window.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import AlreadyExists, InvalidRequest, MeshError, NodeUnreachable, NotFound
from mesh.kv.geometry import KvDtype
from mesh.kv.transfer_frames import Chunk, Commit, Done, Offer, Piece, Want
from mesh.node.engine import RunId
from mesh.node.host import NodeHost
from mesh.node.host_frames import HostFrame, KvOpen, Resume
from mesh.node.port import KvSource
from tests.fakes.fake_engine import FakeEngine, tokens_of
from tests.fakes.fake_node import EDGE, MemoryStream, collect, memory_pair, place_of, prompt, run_order, until
from tests.mesh.node.move_bench import IDS, PULL, PUSH, Bench, nth


@pytest.fixture(params=[PUSH, PULL], ids=["push", "pull"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(request.param)
    configure(bench, resume_timeout_s=5.0)
    await collect(bench.source, run_order("h", IDS[:-1], prefill_only=True))
    yield bench
    for host in (bench.edge, bench.core):
        await host.close()
        assert host.statistics().transfers == 0
    for engine in bench.engines.values():
        await engine.check_integrity()
        assert engine.hold_ids == []


def configure(bench: Bench, **changes: Any) -> None:
    for host in (bench.edge, bench.core):
        host._moves._settings = replace(host._moves._settings, **changes)


def writes_of(engine: FakeEngine) -> list[tuple[int, int]]:
    """Ranges as they are written from now on."""
    written: list[tuple[int, int]] = []
    write = engine.write_kv

    async def watched(run_id: RunId, slab: Any) -> None:
        await write(run_id, slab)
        written.append((slab.start, slab.stop))

    engine.write_kv = watched  # type: ignore[method-assign]
    return written


def breaker(bench: Bench, breaks: Callable[[HostFrame, bool], bool]) -> None:
    """Break the connection instead of carrying a frame for which `breaks(frame, from the sender)` says so."""

    def on_pair(ours: MemoryStream, theirs: MemoryStream) -> None:
        def tamper(from_sender: bool) -> Callable[[HostFrame], list[HostFrame]]:
            def carry(frame: HostFrame) -> list[HostFrame]:
                if breaks(frame, from_sender):
                    ours.end()
                    theirs.end()
                    return []
                return [frame]

            return carry

        ours.tamper = tamper(bench.direction is PUSH)
        theirs.tamper = tamper(bench.direction is PULL)

    bench.network.on_pair = on_pair


def once(kind: type, n: int) -> Callable[[HostFrame, bool], bool]:
    seen = 0

    def breaks(frame: HostFrame, from_sender: bool) -> bool:
        nonlocal seen
        seen += isinstance(frame, kind)
        return isinstance(frame, kind) and seen == n + 1

    return breaks


async def arrived(bench: Bench, written: list[tuple[int, int]]) -> None:
    slab = await bench.target_engine.export_kv(RunId("target"), 0, 600)
    assert tokens_of(slab) == IDS[:-1]
    assert [a for a, _ in written] == [0, *(b for _, b in written[:-1])]  # in order, no gap, nothing twice
    assert written[-1][1] == 600
    outcome = await collect(bench.target, run_order("r", IDS, kv_from=RunId("target")))
    assert len(outcome.ids) == 8
    await bench.source.release(RunId("h"))


STEPS: list[tuple[type, int]] = [
    (Chunk, 0), (Piece, 0), (Chunk, 1), (Piece, 1), (Chunk, 2), (Piece, 2), (Commit, 0), (Done, 0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "n"), STEPS, ids=lambda v: getattr(v, "__name__", str(v)))
async def test_a_transfer_goes_on_where_it_stopped(bench: Bench, kind: type, n: int) -> None:
    breaker(bench, once(kind, n))
    written = writes_of(bench.target_engine)
    report = await bench.move()
    assert (report.tokens, report.wire_bytes) == (600, 600 * 512)
    assert len(bench.network.streams) == 2
    resume = bench.network.streams[1][0].sent[0]
    assert isinstance(resume, Resume)
    assert len(resume.token) == 32
    assert bench.edge.statistics().transfers_resumed_total == 1
    await arrived(bench, written)
    if kind is not Done:  # a frame that got through is not sent again
        pieces = [f for pair in bench.network.streams for s in pair for f in s.sent if isinstance(f, Piece)]
        assert len(pieces) <= 3 + (kind is Piece) + 1


async def test_a_connection_that_breaks_again_and_again(bench: Bench) -> None:
    """Each lets a few frames through: two, three, four ..."""
    carried: dict[int, int] = {}

    def breaks(frame: HostFrame, from_sender: bool) -> bool:
        number = len(bench.network.streams)
        if not isinstance(frame, Want | Offer | KvOpen):
            carried[number] = carried.get(number, 0) + 1
        return carried.get(number, 0) > number + 2

    breaker(bench, breaks)
    written = writes_of(bench.target_engine)
    await bench.move()
    assert len(bench.network.streams) > 2
    await arrived(bench, written)


async def test_a_prefill_that_is_shipped_survives_a_break(bench: Bench) -> None:
    breaker(bench, once(Piece, 3))
    prefill = run_order("p", IDS[:-1], prefill_only=True)
    runs = bench.source.statistics().runs_started_total
    written = writes_of(bench.target_engine)
    report = await bench.move(source=KvSource(run_id=RunId("p"), prefill=prefill))
    assert report.leg is not None
    assert bench.source.statistics().runs_started_total == runs + 1  # it was not computed again
    await arrived(bench, written)


async def test_a_peer_that_stays_away_is_given_up_and_both_ends_are_free(bench: Bench) -> None:
    configure(bench, resume_timeout_s=0.1)
    dead = False

    def breaks(frame: HostFrame, from_sender: bool) -> bool:
        nonlocal dead
        dead = dead or isinstance(frame, Piece)
        return dead

    breaker(bench, breaks)
    with pytest.raises(NodeUnreachable):
        await bench.move()
    await until_free(bench)
    assert bench.source_engine.hold_ids == ["h"]
    assert bench.target_engine.hold_ids == []
    bench.network.on_pair = lambda ours, theirs: None
    await bench.move()
    for host in (bench.edge, bench.core):
        await host.release(RunId("target"))
        await host.release(RunId("h"))


async def until_free(bench: Bench) -> None:
    async with asyncio.timeout(5):
        while any(host.statistics().transfers for host in (bench.edge, bench.core)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_node_that_forgot_the_transfer_ends_it_at_once(bench: Bench) -> None:
    """As after a restart."""
    configure(bench, resume_timeout_s=60.0)

    def breaks(frame: HostFrame, from_sender: bool) -> bool:
        if not isinstance(frame, Piece):
            return False
        bench.core._moves._served.clear()
        return True

    breaker(bench, breaks)
    bench.core._moves._end = lambda key: None  # type: ignore[method-assign]
    with pytest.raises(NodeUnreachable):
        await bench.move()
    for work in list(bench.core._moves._transfers):
        work.cancel()
    await until_free(bench)
    await bench.source.release(RunId("h"))


@pytest.mark.parametrize("wrong", ["token", "short token", "id", "peer", "same name, other place"])
async def test_only_who_opened_a_transfer_resumes_it(bench: Bench, wrong: str) -> None:
    """A right name with anything wrong is answered like a name that does not exist."""
    bench.tamper_sender(lambda frame: [] if isinstance(frame, Commit) else [frame])
    move = asyncio.create_task(bench.move())
    await until(lambda: any(isinstance(f, Commit) for pair in bench.network.streams for s in pair for f in s.sent))
    opening = bench.network.streams[0][0].sent[0]
    assert isinstance(opening, KvOpen)
    resume = Resume(transfer_id=opening.transfer_id, token=opening.token, received=0)
    caller = EDGE
    match wrong:
        case "token":
            resume = replace(resume, token=bytes(32))
        case "short token":
            resume = replace(resume, token=b"")
        case "id":
            resume = replace(resume, transfer_id="t-other")
        case "peer":
            caller = place_of("core-9")
        case _:
            caller = replace(EDGE, site="elsewhere")
    _, theirs = memory_pair(caller, bench.core.place)
    with pytest.raises(NotFound):
        await bench.core.serve_transfer(resume, theirs)
    assert not move.done()
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    await until_free(bench)
    await bench.source.release(RunId("h"))


async def test_the_token_is_secret_and_new_each_time(bench: Bench) -> None:
    tokens = set()
    for _ in range(2):
        await bench.move()
        opening = bench.network.streams[-1][0].sent[0]
        assert isinstance(opening, KvOpen)
        assert opening.token.hex() not in repr(opening)
        assert repr(opening.token) not in repr(opening)
        tokens.add(opening.token)
        await bench.target.release(RunId("target"))
    assert len(tokens) == 2
    await bench.source.release(RunId("h"))


@pytest.mark.parametrize("received", [0, 1000, 2**40])
async def test_a_resumed_count_that_cannot_be_ends_the_transfer(bench: Bench, received: int) -> None:
    breaker(bench, once(Piece, 1))
    carry = bench.network.on_pair

    def lie(ours: MemoryStream, theirs: MemoryStream) -> None:
        carry(ours, theirs)
        plain = ours.tamper
        ours.tamper = lambda f: [replace(f, received=received)] if isinstance(f, Resume) else plain(f)

    bench.network.on_pair = lie
    with pytest.raises(MeshError):
        await bench.move()
    await until_free(bench)
    await bench.source.release(RunId("h"))
    await bench.target.release(RunId("target"))


async def test_the_same_transfer_twice_at_once(bench: Bench) -> None:
    bench.tamper_sender(lambda frame: [] if isinstance(frame, Commit) else [frame])
    first = asyncio.create_task(bench.move())
    await until(lambda: any(isinstance(f, Commit) for pair in bench.network.streams for s in pair for f in s.sent))
    with pytest.raises((AlreadyExists, NodeUnreachable)):  # the latter is how a served error looks on this network
        await bench.move(target=RunId("other"), transfer_id="t-target")
    assert isinstance(bench.network.served[-1], AlreadyExists)
    assert not first.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await until_free(bench)
    await bench.source.release(RunId("h"))


async def test_two_transfers_of_the_same_blocks_at_once(bench: Bench) -> None:
    """Both arrive whole, each in a hold of its own; the source's hold is shared, not used up."""
    reports = await asyncio.gather(
        *(bench.move(target=RunId(name), transfer_id=f"t-{name}") for name in ("one", "two"))
    )
    assert [r.tokens for r in reports] == [600, 600]
    for name in ("one", "two"):
        assert tokens_of(await bench.target_engine.export_kv(RunId(name), 0, 600)) == IDS[:-1]
        outcome = await collect(bench.target, run_order(f"r-{name}", IDS, kv_from=RunId(name)))
        assert len(outcome.ids) == 8
    await bench.source.release(RunId("h"))


# --- credits ------------------------------------------------------------------------------------------------------


def gated(engine: FakeEngine) -> asyncio.Event:
    """A receiver whose engine takes nothing until the event is set."""
    gate, write = asyncio.Event(), engine.write_kv

    async def slow(run_id: RunId, slab: Any) -> None:
        await gate.wait()
        await write(run_id, slab)

    engine.write_kv = slow  # type: ignore[method-assign]
    return gate


def piece_bytes(bench: Bench) -> int:
    return sum(len(f.data) for pair in bench.network.streams for s in pair for f in s.sent if isinstance(f, Piece))


@pytest.mark.parametrize(("window_bytes", "n_pieces"), [(1, 1), (140_000, 1), (280_000, 2), (1 << 20, 3)])
@pytest.mark.parametrize("slow", ["both", "receiver"])
async def test_a_slow_receiver_stops_the_sender_at_the_window(
    bench: Bench, window_bytes: int, n_pieces: int, slow: str
) -> None:
    """The window may be either end's: the smaller one counts."""
    gate = gated(bench.target_engine)
    host = bench.target
    configure(bench, window_bytes=1 << 24)
    for one in (bench.edge, bench.core) if slow == "both" else (host,):
        one._moves._settings = replace(one._moves._settings, window_bytes=window_bytes)
    move = asyncio.create_task(bench.move())
    await until(lambda: piece_bytes(bench) > 0)
    for _ in range(500):
        await asyncio.sleep(0)
    pieces = [f for pair in bench.network.streams for s in pair for f in s.sent if isinstance(f, Piece)]
    assert len(pieces) == n_pieces
    assert piece_bytes(bench) <= max(window_bytes, len(pieces[0].data))
    gate.set()
    assert (await move).tokens == 600
    for name in ("target", "h"):
        await bench.edge.release(RunId(name))
        await bench.core.release(RunId(name))


async def test_a_sender_that_ignores_the_grant_is_refused(bench: Bench) -> None:
    bench.remake_target(kv_dtype=KvDtype.F32, capacity_tokens=4096)
    source = bench.source.place
    host: NodeHost = bench.make(source, kv_dtype=KvDtype.F32)
    if bench.direction is PUSH:
        bench.edge = bench.source = host
    else:
        bench.core = bench.source = host
    configure(bench, window_bytes=100_000, resume_timeout_s=5.0)
    bench.source._moves._settings = replace(bench.source._moves._settings, window_bytes=1 << 24)
    ids = prompt(1001)
    await collect(bench.source, run_order("h", ids[:-1], prefill_only=True))
    gate = gated(bench.target_engine)
    bench.tamper_receiver(nth(Want, 0, lambda w: [replace(w, window_bytes=1 << 24)]))
    move = asyncio.create_task(bench.move(token_ids=ids[:-1], codec="raw", max_tokens=1000))
    await until(lambda: piece_bytes(bench) > 600_000)
    gate.set()
    with pytest.raises(InvalidRequest) as caught:
        await move
    assert "granted" in caught.value.message
    await until_free(bench)
    await bench.source.release(RunId("h"))


async def test_a_cancelled_move_while_the_link_is_down(bench: Bench) -> None:
    """The dialling end stops at once; the other one when its time is over."""
    configure(bench, resume_timeout_s=0.3)
    down = False

    def breaks(frame: HostFrame, from_sender: bool) -> bool:
        nonlocal down
        down = down or isinstance(frame, Piece)
        return down

    breaker(bench, breaks)
    move = asyncio.create_task(bench.move())
    await until(lambda: len(bench.network.streams) > 1)
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    await until_free(bench)
    assert bench.target_engine.hold_ids == []
    await bench.source.release(RunId("h"))
