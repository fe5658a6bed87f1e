"""Transfers under faults drawn at random: broken connections, lost, repeated, swapped and flipped frames, ends that
are released or cancelled. Each has one outcome, and after it nothing is left: no hold, no block, no pin, no task."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import MeshError
from mesh.kv.transfer_frames import Piece
from mesh.node.engine import RunId
from mesh.node.host_frames import HostFrame, Resume, Resumed
from mesh.node.port import KvReport, KvSource, PortHeld
from tests.fakes.fake_engine import tokens_of
from tests.fakes.fake_node import MemoryStream, Outcome, collect, greedy, prompt, run_order, until
from tests.mesh.node.move_bench import PULL, PUSH, Bench

KINDS = ("hold", "prefill", "running")


class Chaos:
    """Faults of one transfer: at most `budget`, each frame may be hit."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self._bench = bench
        self._rng = rng
        self.budget = rng.randint(1, 4)
        self.corrupting = rng.random() < 0.5  # else connections only break, and the transfer must succeed
        self.chores: list[asyncio.Task[Any]] = []
        bench.network.on_pair = self._on_pair

    def _on_pair(self, ours: MemoryStream, theirs: MemoryStream) -> None:
        for stream in (ours, theirs):
            stream.tamper = lambda frame: self._carry(frame, ours, theirs)

    def _carry(self, frame: HostFrame, ours: MemoryStream, theirs: MemoryStream) -> list[HostFrame]:
        rng = self._rng
        if len(self._bench.network.streams) == 1 and sum(len(s.sent) for s in (ours, theirs)) <= 3:
            return [frame]  # the handshake, without which there is nothing to go on with
        if self.budget == 0 or rng.random() < 0.75:
            return [frame]
        self.budget -= 1
        fault = rng.choice(("break", "lose", "repeat", "flip", "release")) if self.corrupting else "break"
        match fault:
            case "lose":
                return []
            case "repeat":
                return [frame, frame]
            case "flip" if isinstance(frame, Piece):
                data = bytearray(frame.data)
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                return [replace(frame, data=bytes(data))]
            case "flip" if isinstance(frame, Resume | Resumed):
                return [replace(frame, received=frame.received + 1)]
            case "release":
                self.chores.append(asyncio.create_task(self._bench.target.release(RunId("target"))))
                return [frame]
            case _:
                ours.end()
                theirs.end()
                return []


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(s, marks=pytest.mark.soak) for s in range(40, 400))])
async def test_one_outcome_and_nothing_left(seed: int) -> None:
    rng = random.Random(seed)
    before = asyncio.all_tasks()
    bench = Bench(rng.choice([PUSH, PULL]))
    for host in (bench.edge, bench.core):
        host._moves._settings = replace(
            host._moves._settings,
            resume_timeout_s=1.0,
            idle_timeout_s=1.0,
            window_bytes=rng.choice([1, 200_000, 1 << 24]),
        )
    kind, ids = KINDS[seed % 3], prompt(rng.randint(17, 600), seed=seed)
    chaos = Chaos(bench, rng)
    seen, run = Outcome(), None
    if kind == "hold":
        await collect(bench.source, run_order("h", ids, prefill_only=True))
        source = KvSource(run_id=RunId("h"))
    elif kind == "prefill":
        source = KvSource(run_id=RunId("h"), prefill=run_order("h", ids, prefill_only=True))
    else:
        bench.source_engine.step_delay_s = 0.001
        run = asyncio.create_task(collect(bench.source, run_order("h", ids, sampling=greedy(300)), seen))
        await until(lambda: len(seen.ids) >= 2)
        source = KvSource(run_id=RunId("h"), pause=True)
    report, error = await outcome_of(bench, source, ids + seen.ids)
    if not chaos.corrupting:
        assert error is None  # where connections only break, it goes on
    await asyncio.gather(*chaos.chores)
    async with asyncio.timeout(10):
        while any(host.statistics().transfers for host in (bench.edge, bench.core)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    if report is not None and "target" in bench.target_engine.hold_ids:
        slab = await bench.target_engine.export_kv(RunId("target"), 0, report.tokens)
        assert tokens_of(slab) == (ids + seen.ids)[: report.tokens]
    if run is not None:
        await end_of(bench, run, seen, moved=report is not None)
    for host in (bench.edge, bench.core):
        for name in ("h", "target"):
            await host.release(RunId(name))
        await host.close()
        assert len(host._desk.ledger) == 0
        assert not host._moves._served
    for engine in bench.engines.values():
        await engine.check_integrity()
        assert engine.hold_ids == []
        assert (await engine.load()).kv_used_tokens == 0
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def outcome_of(
    bench: Bench, source: KvSource, token_ids: tuple[int, ...]
) -> tuple[KvReport | None, MeshError | None]:
    try:
        return await bench.move(source=source, token_ids=token_ids), None
    except MeshError as error:
        return None, error


async def end_of(bench: Bench, run: asyncio.Task[Outcome], seen: Outcome, *, moved: bool) -> None:
    """A run that moved is a hold; one whose move failed goes on, or is a hold that can be continued."""
    if not moved and not run.done():
        await bench.source.release(RunId("h"))
    try:
        outcome = await run
    except MeshError:
        assert not moved
        return
    if moved:
        assert isinstance(outcome.last, PortHeld)
