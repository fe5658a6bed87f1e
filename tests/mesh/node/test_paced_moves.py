"""A run that is slowed while it moves, and one that is stopped before anything is shipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mesh.errors import MeshError, PayloadCorrupt
from mesh.kv.transfer_frames import Chunk, Commit
from mesh.node.engine import RunId
from mesh.node.host_frames import HostFrame
from mesh.node.port import KvSource, PortFinished, PortHeld, PortPrefilled
from tests.fakes.fake_node import Outcome, collect, greedy, prompt, run_order, until
from tests.mesh.node.move_bench import Bench, nth

IDS = prompt(600)
PACE_S = 0.03


@asynccontextmanager
async def running(bench: Bench, n_tokens: int) -> AsyncIterator[tuple[Outcome, asyncio.Task[Outcome]]]:
    seen = Outcome()
    bench.source_engine.step_delay_s = 0.001
    task = asyncio.create_task(collect(bench.source, run_order("r", IDS, sampling=greedy(n_tokens)), seen))
    await until(lambda: len(seen.ids) > 3)
    yield seen, task
    await asyncio.gather(task, return_exceptions=True)


async def the_rest(bench: Bench, seen: Outcome, n_tokens: int) -> tuple[int, ...]:
    sampling = greedy(n_tokens)
    order = run_order("s", IDS + seen.ids, prompt_tokens=600, sampling=sampling, kv_from=RunId("target"))
    return seen.ids + (await collect(bench.target, order)).ids


async def undisturbed(bench: Bench, n_tokens: int) -> tuple[int, ...]:
    return (await collect(bench.target, run_order("w", IDS, sampling=greedy(n_tokens)))).ids


async def test_a_paced_run_makes_few_tokens_while_it_is_shipped_and_none_wrong(bench: Bench) -> None:
    slow: list[int] = []

    def drag(frame: HostFrame) -> list[HostFrame]:
        if isinstance(frame, Chunk):
            slow.append(len(seen.ids))
        return [frame]

    async with running(bench, 400) as (seen, task):
        before = len(seen.ids)
        bench.tamper_sender(drag)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await bench.move(source=KvSource(run_id=RunId("r"), pause=True, pace_s=PACE_S), token_ids=IDS)
        took_s = loop.time() - started_s
        assert isinstance((await task).last, PortHeld)
    assert len(seen.ids) - before <= took_s / PACE_S + 3
    assert sum(isinstance(e, PortPrefilled) for e in seen.events) == 1
    assert await the_rest(bench, seen, len(seen.ids) + 20) == await undisturbed(bench, len(seen.ids) + 20)


async def test_the_pace_ends_with_a_move_that_fails(bench: Bench) -> None:
    """Before the run was paused for good: it goes on as if nothing had happened."""
    bench.tamper_sender(nth(Chunk, 0, lambda c: []))  # nothing arrives, so the receiver refuses what follows
    async with running(bench, 300) as (seen, task):
        with pytest.raises(MeshError):
            await bench.move(source=KvSource(run_id=RunId("r"), pause=True, pace_s=5.0), token_ids=IDS)
        done = await asyncio.wait_for(task, 10)
    assert isinstance(done.last, PortFinished)
    assert seen.ids == await undisturbed(bench, 300)


async def test_a_paced_run_that_is_released_leaves_nothing(bench: Bench) -> None:
    async with running(bench, 300) as (seen, task):
        run = bench.source._desk.run_of(RunId("r"))
        assert run is not None
        run.pace(30.0)
        n_tokens = len(seen.ids)
        while len(seen.ids) == n_tokens:  # noqa: ASYNC110 - until it rests
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.01)
        await bench.source.release(RunId("r"))
        with pytest.raises(MeshError):
            await task
    assert bench.source_engine.hold_ids == ["h"]


async def test_a_run_that_is_stopped_first_makes_no_token_while_it_is_shipped(bench: Bench) -> None:
    at: list[int] = []

    def count(frame: HostFrame) -> list[HostFrame]:
        if isinstance(frame, Chunk):
            at.append(len(seen.ids))
        return [frame]

    bench.tamper_sender(count)
    async with running(bench, 300) as (seen, task):
        report = await bench.move(source=KvSource(run_id=RunId("r"), pause=True, stop_first=True), token_ids=IDS)
        assert isinstance((await task).last, PortHeld)
    assert len(at) >= 2
    assert len(set(at)) == 1
    assert report.tokens == 600 + len(seen.ids) - 1
    assert await the_rest(bench, seen, len(seen.ids) + 20) == await undisturbed(bench, len(seen.ids) + 20)


async def test_a_stopped_run_whose_move_fails_is_a_hold(bench: Bench) -> None:
    bench.tamper_sender(nth(Commit, 0, lambda c: [type(c)(chunks=c.chunks, stop=c.stop, digest=bytes(32))]))
    async with running(bench, 100) as (seen, task):
        source = KvSource(run_id=RunId("r"), pause=True, stop_first=True)
        await bench.fails(PayloadCorrupt, source=source, token_ids=IDS)
        assert isinstance((await task).last, PortHeld)
    rest = run_order("s", IDS + seen.ids, prompt_tokens=600, sampling=greedy(100), kv_from=RunId("r"))
    assert len(seen.ids + (await collect(bench.source, rest)).ids) == 100
