"""Transfers that go wrong while their source goes on: paused runs, prefills, pinned holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mesh.errors import Cancelled, MeshError, NotFound, Overloaded, PayloadCorrupt, StalePlan
from mesh.kv.transfer_frames import Abort, Chunk, Commit, Offer, Want
from mesh.node.engine import RunId
from mesh.node.host_frames import HostFrame
from mesh.node.port import KvSource, PortHeld
from tests.fakes.fake_node import MemoryStream, Outcome, collect, greedy, prompt, run_order, until
from tests.mesh.node.move_bench import IDS, PUSH, Bench, nth


async def test_a_failed_move_leaves_the_paused_run_as_a_hold(bench: Bench) -> None:
    bench.tamper_sender(nth(Commit, 0, lambda c: [replace(c, digest=bytes(32))]))
    ids, sampling = prompt(40), greedy(100)
    seen = Outcome()
    task = asyncio.create_task(collect(bench.source, run_order("r", ids, sampling=sampling), seen))
    await until(lambda: len(seen.ids) > 3)
    await bench.fails(PayloadCorrupt, source=KvSource(run_id=RunId("r"), pause=True), token_ids=ids)
    first = await task
    assert isinstance(first.last, PortHeld)
    rest = await collect(
        bench.source,
        run_order("s", ids + first.ids, prompt_tokens=40, sampling=sampling, kv_from=RunId("r")),
    )
    assert len(first.ids + rest.ids) == 100  # it goes on where it was, nothing is computed again
    await bench.still_good()


async def test_a_run_that_ends_before_it_can_move(bench: Bench) -> None:
    ids = prompt(500)
    seen = Outcome()
    bench.source_engine.gate = asyncio.Event()
    bench.source_engine.gate.set()
    task = asyncio.create_task(collect(bench.source, run_order("r", ids, sampling=greedy(3)), seen))
    await until(lambda: len(seen.ids) == 1)
    bench.source_engine.gate.clear()

    def let_it_end(frame: HostFrame) -> list[HostFrame]:
        if isinstance(frame, Chunk):
            assert bench.source_engine.gate is not None
            bench.source_engine.gate.set()
        return [frame]

    slow = asyncio.Event()
    pause = bench.source_engine.pause

    async def late_pause(run_id: RunId) -> None:
        await slow.wait()
        await pause(run_id)

    bench.source_engine.pause = late_pause  # type: ignore[method-assign]
    bench.tamper_sender(let_it_end)
    move = asyncio.create_task(
        bench.fails((StalePlan, NotFound), source=KvSource(run_id=RunId("r"), pause=True), token_ids=ids)
    )
    assert len((await task).ids) == 3
    slow.set()
    await move
    await bench.still_good()


async def test_a_run_that_is_released_while_it_moves(bench: Bench) -> None:
    ids = prompt(400)
    bench.source_engine.step_delay_s = 0.001
    prefill = run_order("p", ids, prefill_only=True)
    move = asyncio.create_task(
        bench.fails(
            (Cancelled, NotFound, StalePlan), source=KvSource(run_id=RunId("p"), prefill=prefill), token_ids=ids
        )
    )
    await until(lambda: bench.source.statistics().running == 1)
    await bench.source.release(RunId("p"))
    await move
    await bench.still_good()


async def test_a_failed_prefill_transfer_stops_the_prefill(bench: Bench) -> None:
    bench.source_engine.step_delay_s = 0.001
    prefill = run_order("p", prompt(1000), prefill_only=True)
    bench.tamper_sender(nth(Chunk, 0, lambda c: [replace(c, prefix_hash=bytes(32))]))
    await bench.fails(PayloadCorrupt, source=KvSource(run_id=RunId("p"), prefill=prefill), token_ids=prompt(1000))
    assert bench.source.statistics().running == 0
    assert (await bench.source_engine.load()).running == 0
    await bench.still_good()


async def test_an_abort_is_heard_in_the_middle_of_a_long_prefill(bench: Bench) -> None:
    """The sender waits for its engine when the receiver gives up."""
    bench.source_engine.gate = asyncio.Event()
    prefill = run_order("p", prompt(1000), prefill_only=True)

    def give_up(ours: MemoryStream, theirs: MemoryStream) -> None:
        receiver = theirs if bench.direction is PUSH else ours
        receiver.tamper = lambda frame: (
            [frame, Abort(reason="OVERLOADED", message="no more")] if isinstance(frame, Want) else [frame]
        )

    bench.network.on_pair = give_up
    error = await bench.fails(
        Overloaded if bench.direction is PUSH else MeshError,
        source=KvSource(run_id=RunId("p"), prefill=prefill),
        token_ids=prompt(1000),
    )
    assert "no more" in error.message
    bench.source_engine.gate = None
    await bench.still_good()


async def test_a_hold_is_kept_while_it_is_shipped() -> None:
    bench = Bench(PUSH)
    for host in (bench.edge, bench.core):
        host._desk.ledger._hold_timeout_s = 0.05
    await collect(bench.edge, run_order("h", IDS[:-1], prefill_only=True))
    blocked = asyncio.Event()

    def block(ours: MemoryStream, theirs: MemoryStream) -> None:
        async def slow(frame: HostFrame) -> None:
            if isinstance(frame, Commit):
                await blocked.wait()
            await send(frame)

        send = ours.send
        ours.send = slow  # type: ignore[method-assign]

    bench.network.on_pair = block
    move = asyncio.create_task(bench.move())
    await asyncio.sleep(0.15)
    assert bench.engines["paris-1"].hold_ids == ["h"]
    with pytest.raises(StalePlan):  # and nobody continues it under the transfer
        await collect(bench.edge, run_order("r", IDS, kv_from=RunId("h")))
    blocked.set()
    await move
    while bench.engines["paris-1"].hold_ids or bench.engines["core-1"].hold_ids:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert bench.edge.statistics().holds_expired_total == 1
    assert bench.core.statistics().holds_expired_total == 1


@pytest.mark.parametrize("kind", [Offer, Chunk, Commit])
async def test_a_target_that_is_released_while_its_kv_arrives(bench: Bench, kind: type) -> None:
    """Before the engine has heard of it, in the middle, and at the end: it is gone, and not for a while only."""
    chores: list[asyncio.Task[None]] = []

    def release_first(frame: HostFrame) -> list[HostFrame]:
        if isinstance(frame, kind):
            chores.append(asyncio.create_task(bench.target.release(RunId("target"))))
        return [frame]

    bench.tamper_sender(release_first)
    await bench.fails((Cancelled, NotFound))
    await asyncio.gather(*chores)
    await bench.still_good()
