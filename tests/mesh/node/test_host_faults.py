"""KV transfers that go wrong between two NodeHosts: refusals, tampering, and peers that vanish at every step.

After each, nothing is left at the target, the source still has what it had, and both sides know why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import (
    AlreadyExists,
    Cancelled,
    Draining,
    Expired,
    InvalidRequest,
    KvIncompatible,
    MeshError,
    NodeUnreachable,
    NotFound,
    Overloaded,
    PayloadCorrupt,
    PolicyDenied,
    Unauthenticated,
    UnknownModel,
)
from mesh.kv.chunks import digest_of
from mesh.kv.geometry import KvDtype
from mesh.kv.transfer_frames import Chunk, Commit, Done, Offer, Piece, Want
from mesh.node.engine import RunId
from mesh.node.host_frames import HostFrame, KvOpen
from mesh.node.legs import Clock
from mesh.node.port import KvSource
from tests.fakes.fake_engine import GEOMETRY
from tests.fakes.fake_node import (
    CORE,
    MemoryStream,
    collect,
    context_of,
    kv_order,
    place_of,
    prompt,
    run_order,
    until,
)
from tests.mesh.node.move_bench import IDS, PULL, PUSH, Bench, nth

# --- refused by what the nodes are --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        ({"geometry": replace(GEOMETRY, rope_base=5e5)}, "layout_hash"),
        ({"weights_lineage": "another"}, "weights_lineage"),
    ],
)
async def test_unlike_models(bench: Bench, engine: dict[str, Any], field: str) -> None:
    bench.remake_target(**engine)
    error = await bench.fails(KvIncompatible)
    assert field in error.message
    assert bench.source_engine.hold_ids == ["h"]
    assert not any(isinstance(f, Chunk) for pair in bench.network.streams for s in pair for f in s.sent)
    assert ("KV_INCOMPATIBLE", 1) in bench.target.statistics().transfer_failures


@pytest.mark.parametrize("engine", [{"geometry": replace(GEOMETRY, rope_base=5e5)}, {"weights_lineage": "another"}])
async def test_nothing_is_computed_for_an_engine_that_cannot_take_it(bench: Bench, engine: dict[str, Any]) -> None:
    bench.remake_target(**engine)
    before = bench.source.statistics().runs_started_total
    prefill = run_order("p", IDS[:-1], prefill_only=True)
    await bench.fails(KvIncompatible, source=KvSource(run_id=RunId("p"), prefill=prefill))
    assert bench.source.statistics().runs_started_total == before


async def test_another_model_id(bench: Bench) -> None:
    bench.remake_target(model_id="another")
    await bench.fails(UnknownModel)
    bench.remake_target()
    await bench.fails(UnknownModel, context=context_of(model="another"))
    await bench.still_good()


async def test_raw_between_unlike_pools(bench: Bench) -> None:
    bench.remake_target(kv_dtype=KvDtype.F32)
    error = await bench.fails(KvIncompatible, codec="raw")
    assert "dtype" in error.message


@pytest.mark.parametrize(
    ("skew_s", "good"),
    [(0.0, True), (500.0, True), (650.0, True), (670.0, False), (86_400.0, False), (-86_400.0, True)],
)
async def test_expiry_with_clocks_apart(bench: Bench, skew_s: float, good: bool) -> None:
    """The receiver's clock is ahead by so much. KV lives for 600 s and a minute is forgiven; what counts as expired
    is refused and counted, and a clock that is behind makes nothing older."""
    parts = bench.target._moves._parts
    bench.target._moves._parts = replace(parts, clock=Clock(unix_s=lambda: time.time() + skew_s))
    if good:
        assert (await bench.move()).tokens == 600
        await bench.target.release(RunId("target"))
    else:
        error = await bench.fails(KvIncompatible)
        assert "expires_unix_s" in error.message
        assert ("KV_INCOMPATIBLE", 1) in bench.target.statistics().transfer_failures
        assert ("KV_INCOMPATIBLE", 1) in bench.source.statistics().transfer_failures
    assert bench.source_engine.hold_ids == ["h"]


async def test_an_unknown_codec(bench: Bench) -> None:
    await bench.fails(KvIncompatible, codec="kvtc")
    await bench.still_good()


async def test_no_room_at_the_target(bench: Bench) -> None:
    bench.remake_target(capacity_tokens=512)
    await bench.fails(Overloaded)
    assert bench.source_engine.hold_ids == ["h"]


async def test_a_target_name_in_use(bench: Bench) -> None:
    await collect(bench.target, run_order("target", prompt(9), prefill_only=True))
    with pytest.raises(AlreadyExists):
        await bench.move()
    assert bench.target_engine.hold_ids == ["target"]  # that other hold is untouched
    await bench.target.release(RunId("target"))
    await bench.still_good()


async def test_a_target_that_drains(bench: Bench) -> None:
    await bench.target.drain()
    await bench.fails(Draining)


# --- refused by policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["source", "target"])
async def test_the_targets_place_is_denied(bench: Bench, asked: str) -> None:
    """Each end asks by itself, and one no is enough."""
    host = bench.source if asked == "source" else bench.target
    bench.guards[host.place.node_id].no_kv = {bench.target.place.node_id}
    await bench.fails(PolicyDenied)
    sent = [f for pair in bench.network.streams for s in pair for f in s.sent]
    assert not any(isinstance(f, Chunk | Piece) for f in sent)
    bench.guards[host.place.node_id].no_kv = set()
    await bench.still_good()


async def test_a_push_asks_before_token_ids_leave() -> None:
    bench = Bench(PUSH)
    await collect(bench.edge, run_order("h", IDS[:-1], prefill_only=True))
    bench.guards["paris-1"].no_kv = {"core-1"}
    await bench.fails(PolicyDenied)
    assert bench.network.streams == []
    await bench.edge.close()


async def test_a_pull_of_a_prefill_asks_before_the_prompt_leaves() -> None:
    bench = Bench(PULL)
    source = KvSource(run_id=RunId("p"), prefill=run_order("p", IDS[:-1], prefill_only=True))
    bench.guards["paris-1"].no_prompt = {"core-1"}
    await bench.fails(PolicyDenied, source=source)
    assert bench.network.streams == []
    bench.guards["paris-1"].no_prompt = set()
    bench.guards["core-1"].no_prompt = {"core-1"}  # and so does the core, of itself
    await bench.fails(PolicyDenied, source=source)
    assert (await bench.engines["core-1"].load()).prompt_tokens_total == 0


@pytest.mark.parametrize("field", ["tenant", "label", "salt"])
async def test_the_context_must_be_that_of_the_source(bench: Bench, field: str) -> None:
    other = context_of(**{field: bytes(32) if field == "salt" else "other"})
    await bench.fails(PolicyDenied, context=other)
    await bench.still_good()


@pytest.mark.parametrize("field", ["tenant", "label"])
async def test_the_manifest_must_be_of_the_context(bench: Bench, field: str) -> None:
    def lie(frame: HostFrame) -> list[HostFrame]:
        if isinstance(frame, Offer):
            return [Offer(replace(frame.manifest, **{field: "other"}))]
        return [frame]

    bench.tamper_sender(lie)
    error = await bench.fails(KvIncompatible)
    assert field in error.message
    await bench.still_good()


async def test_a_prefill_for_another_owner(bench: Bench) -> None:
    prefill = run_order("p", IDS[:-1], prefill_only=True, context=context_of(tenant="other"))
    await bench.fails(PolicyDenied, source=KvSource(run_id=RunId("p"), prefill=prefill))
    await bench.still_good()


async def test_another_node_answers() -> None:
    bench = Bench(PULL)
    impostor = bench.make(place_of("core-2"))
    bench.network.hosts["core-1"] = impostor
    await bench.fails(Unauthenticated)


# --- tampering ----------------------------------------------------------------------------------------------------


def flipped(piece: Piece) -> Piece:
    data = bytearray(piece.data)
    data[7] ^= 0x40
    return replace(piece, data=bytes(data))


def with_digest(piece: Piece) -> Piece:
    return replace(piece, digest=digest_of(piece.data))


TAMPERED: dict[str, tuple[type, int, Callable[[Any], list[Any]]]] = {
    "piece flipped": (Piece, 1, lambda p: [flipped(p)]),
    "piece flipped, digest right": (Piece, 0, lambda p: [with_digest(flipped(p))]),
    "piece truncated": (Piece, 1, lambda p: [with_digest(replace(p, data=p.data[:-8]))]),
    "piece repeated": (Piece, 0, lambda p: [p, p]),
    "piece dropped": (Piece, 1, lambda p: []),
    "chunk dropped": (Chunk, 1, lambda c: []),
    "chunk repeated": (Chunk, 1, lambda c: [c, c]),
    "chunk of other tokens": (Chunk, 0, lambda c: [replace(c, prefix_hash=bytes(32))]),
    "chunk count lies": (Chunk, 1, lambda c: [replace(c, stop=c.stop - 1)]),
    "chunk size lies": (Chunk, 1, lambda c: [replace(c, size_bytes=c.size_bytes * 2)]),
    "chunk gap": (Chunk, 1, lambda c: [replace(c, start=c.start + 1, stop=c.stop + 1)]),
    "commit early": (Chunk, 2, lambda c: [Commit(chunks=2, stop=512, digest=bytes(32))]),
    "commit lies": (Commit, 0, lambda c: [replace(c, digest=bytes(32))]),
    "offer of fewer": (Offer, 0, lambda o: [Offer(replace(o.manifest, count_tokens=10, block_hashes=()))]),
    "offer of another namespace": (Offer, 0, lambda o: [Offer(replace(o.manifest, block_hashes=(bytes(32),) * 37))]),
    "offer expired": (Offer, 0, lambda o: [Offer(replace(o.manifest, expires_unix_s=1.0))]),
    "offer of another codec": (Offer, 0, lambda o: [Offer(replace(o.manifest, codec="q8_0"))]),
    "offer twice": (Offer, 0, lambda o: [o, o]),
    "open again": (Offer, 0, lambda o: [open_again(o)]),
}


def open_again(offer: Offer) -> KvOpen:
    del offer
    return KvOpen.of(kv_order(CORE, direction=PUSH, token_ids=(), source=KvSource(run_id=RunId("h"))))


@pytest.mark.parametrize("name", TAMPERED)
async def test_a_sender_that_lies(bench: Bench, name: str) -> None:
    kind, n, change = TAMPERED[name]
    written: list[int] = []
    write = bench.target_engine.write_kv

    async def watched(run_id: RunId, slab: Any) -> None:
        written.append(slab.stop)
        await write(run_id, slab)

    bench.target_engine.write_kv = watched  # type: ignore[method-assign]
    bench.tamper_sender(nth(kind, n, change))
    await bench.fails((PayloadCorrupt, InvalidRequest, KvIncompatible))
    bench.target_engine.write_kv = write  # type: ignore[method-assign]
    if name.startswith(("offer", "open")):
        assert written == []
    await bench.still_good()


def wanted() -> Want:
    return Want(from_position=0, layout_hash="l", weights_lineage="w", dtype=KvDtype.F16, window_bytes=1 << 20)


@pytest.mark.parametrize(
    "tamper",
    [
        (Want, lambda w: [replace(w, from_position=5000)]),
        (Want, lambda w: [Done(600)]),
        (Want, lambda w: [w, w]),
        (Done, lambda d: [Done(599)]),
        (Done, lambda d: [wanted()]),
    ],
    ids=["want too far", "done for want", "want twice", "done of fewer", "want for done"],
)
async def test_a_receiver_that_lies(bench: Bench, tamper: tuple[type, Any]) -> None:
    kind, change = tamper
    bench.tamper_receiver(nth(kind, 0, change))
    if kind is Done and bench.direction is PULL:
        # The puller has it all, committed: its own word about it was garbled on the way out.
        await bench.move()
        assert isinstance(bench.network.served[-1], MeshError)
        await bench.target.release(RunId("target"))
    elif kind is Done:
        with pytest.raises((PayloadCorrupt, InvalidRequest)):
            await bench.move()
        await bench.target.release(RunId("target"))  # two generals: else its timeout frees it
    else:
        await bench.fails((PayloadCorrupt, InvalidRequest))
    await bench.still_good()


# --- vanishing ----------------------------------------------------------------------------------------------------

STEPS: list[tuple[str, type, int]] = [
    ("offer", Offer, 0),
    ("chunk", Chunk, 0),
    ("piece", Piece, 0),
    ("last chunk", Chunk, 2),
    ("last piece", Piece, 2),
    ("commit", Commit, 0),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s[0])
async def test_the_sender_vanishes(bench: Bench, step: tuple[str, type, int]) -> None:
    _, kind, n = step
    seen = 0

    def break_pair(ours: MemoryStream, theirs: MemoryStream) -> None:
        sender = ours if bench.direction is PUSH else theirs

        def tamper(frame: HostFrame) -> list[HostFrame]:
            nonlocal seen
            if isinstance(frame, kind):
                seen += 1
                if seen == n + 1:
                    ours.end()
                    theirs.end()
                    return []
            return [frame]

        sender.tamper = tamper

    bench.network.on_pair = break_pair
    await bench.fails(NodeUnreachable)
    await bench.still_good()


@pytest.mark.parametrize("kind", [Want, Done])
async def test_the_receiver_vanishes(bench: Bench, kind: type) -> None:
    def break_pair(ours: MemoryStream, theirs: MemoryStream) -> None:
        receiver = theirs if bench.direction is PUSH else ours

        async def broken(frame: HostFrame) -> None:
            if isinstance(frame, kind):
                ours.end()
                theirs.end()
                raise NodeUnreachable("gone")
            await send(frame)

        send = receiver.send
        receiver.send = broken  # type: ignore[method-assign]

    bench.network.on_pair = break_pair
    await bench.fails(NodeUnreachable)
    await bench.still_good()


async def test_a_peer_that_says_nothing_is_given_up(bench: Bench) -> None:
    for host in (bench.edge, bench.core):
        host._moves._settings = replace(host._moves._settings, idle_timeout_s=0.05)
    bench.tamper_sender(lambda frame: [] if isinstance(frame, Commit) else [frame])
    error = await bench.fails(NodeUnreachable)
    assert "did not go on" in error.message
    for host in (bench.edge, bench.core):
        host._moves._settings = replace(host._moves._settings, idle_timeout_s=5.0)
    await bench.still_good()


async def test_the_deadline_ends_a_transfer(bench: Bench) -> None:
    bench.tamper_sender(lambda frame: [] if isinstance(frame, Commit) else [frame])
    await bench.fails(Expired, context=context_of(deadline_s=0.1))
    await bench.still_good()


async def test_a_cancelled_transfer(bench: Bench) -> None:
    bench.tamper_sender(lambda frame: [] if isinstance(frame, Commit) else [frame])
    task = asyncio.create_task(bench.move())
    await until(lambda: any(isinstance(f, Commit) for pair in bench.network.streams for s in pair for f in s.sent))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.nothing_left()
    assert isinstance(bench.network.served[-1], Cancelled)
    await bench.still_good()


async def test_closing_a_host_ends_its_transfers(bench: Bench) -> None:
    bench.tamper_sender(lambda frame: [] if isinstance(frame, Commit) else [frame])
    task = asyncio.create_task(bench.move())
    await until(lambda: any(isinstance(f, Commit) for pair in bench.network.streams for s in pair for f in s.sent))
    await bench.core.close()
    with pytest.raises(MeshError):
        await task
    await bench.nothing_left()


async def test_no_such_source(bench: Bench) -> None:
    await bench.fails(NotFound, source=KvSource(run_id=RunId("ghost")))
    await bench.still_good()


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 599},
        {"token_ids": (*IDS[:-1], 600)},
        {"token_ids": prompt(1025), "max_tokens": 2000},
        {"source": KvSource(run_id=RunId("p"), prefill=run_order("q", IDS[:-1], prefill_only=True))},
        {"source": KvSource(run_id=RunId("p"), prefill=run_order("p", IDS[:-1]))},
        {"source": KvSource(run_id=RunId("p"), prefill=run_order("p", IDS[:-1], prefill_only=True), pause=True)},
        {"source": KvSource(run_id=RunId("p"), prefill=run_order("p", (), prefill_only=True))},
    ],
)
async def test_bad_orders(bench: Bench, change: dict[str, Any]) -> None:
    await bench.fails(InvalidRequest, **change)
    await bench.still_good()
