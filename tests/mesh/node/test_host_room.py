"""Back-pressure between a node that prefills and the one that decodes: waiting, bounds, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh.errors import Cancelled, InvalidRequest, Overloaded
from mesh.kv.slab import KvSlab
from mesh.node.engine import RunId
from mesh.node.host import HostSettings, NodeHost
from mesh.node.host_room import PrefillBacklog
from mesh.node.port import KvDirection, KvReport, KvSource
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import (
    CORE,
    FakeGuard,
    FakeSigner,
    MemoryNetwork,
    collect,
    kv_order,
    place_of,
    prompt,
    run_order,
    until,
)

DECODE = place_of("core-2")


class Pair:
    """A node that prefills and one that decodes, which pulls."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def make(self, *, source_tokens: int = 4096, target_tokens: int = 4096, **settings: Any) -> None:
        self.engines = [
            FakeEngine(capacity_tokens=source_tokens, prefill_chunk_tokens=32),
            FakeEngine(capacity_tokens=target_tokens),
        ]
        values = {"idle_timeout_s": 5.0, **settings}
        self.hosts = [
            NodeHost(engine, FakeSigner(place), FakeGuard(), place, settings=HostSettings(**values))
            for engine, place in zip(self.engines, (CORE, DECODE), strict=True)
        ]
        for host in self.hosts:
            self.network.add(host)
        self.source, self.target = self.hosts

    def pull(self, number: int, tokens: int = 200) -> asyncio.Task[KvReport]:
        ids = prompt(tokens, seed=number)
        run_id = RunId(f"p{number}")
        order = kv_order(
            CORE,
            direction=KvDirection.PULL,
            token_ids=ids,
            source=KvSource(run_id=run_id, prefill=run_order(run_id, ids, prefill_only=True)),
            target=f"t{number}",
            max_tokens=tokens + 8,
        )
        return asyncio.create_task(self.target.move_kv(order, self.network.dial_from(DECODE)))

    async def used(self) -> list[int]:
        return [(await engine.load()).kv_used_tokens for engine in self.engines]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    for host in made.hosts:
        await host.close()
    for engine in made.engines:
        await engine.check_integrity()
        assert engine.hold_ids == []
    assert await made.used() == [0, 0]


async def test_imports_wait_for_room_in_their_order_and_the_source_computes_nothing_for_them(pair: Pair) -> None:
    pair.make(target_tokens=500)  # two fit
    first = [pair.pull(0), pair.pull(1)]
    await asyncio.gather(*first)
    ended: list[int] = []
    waiting = [pair.pull(n) for n in (2, 3, 4)]
    for number, task in enumerate(waiting, start=2):
        task.add_done_callback(lambda _, n=number: ended.append(n))  # type: ignore[misc]

    await until(lambda: pair.target._moves.waiting_imports == 3)
    assert (await pair.target.load()).waiting == 3  # placement sees them
    assert await pair.used() == [0, 416]
    assert not any(task.done() for task in waiting)
    for number in range(5):  # each that is released makes room for the next
        if number >= 2:
            await waiting[number - 2]
        await pair.target.release(RunId(f"t{number}"))
    assert ended == [2, 3, 4]
    assert (await pair.target.load()).waiting == 0


async def test_no_room_for_too_long_or_ever_is_overloaded(pair: Pair) -> None:
    pair.make(target_tokens=300, room_timeout_s=0.1)
    await pair.pull(0)
    with pytest.raises(Overloaded):
        await pair.pull(1)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(pair.pull(2, tokens=500), 5.0)
    assert pair.source.statistics().runs_started_total == 1


async def test_only_so_many_wait(pair: Pair) -> None:
    pair.make(target_tokens=300, most_waiting_imports=1)
    await pair.pull(0)
    waiting = pair.pull(1)
    await until(lambda: pair.target._moves.waiting_imports == 1)
    with pytest.raises(Overloaded, match="at most 1"):
        await pair.pull(2)
    await pair.target.release(RunId("t0"))
    await waiting


@pytest.mark.parametrize("how", ["released", "cancelled"])
async def test_an_import_that_nobody_wants_any_more_stops_waiting(pair: Pair, how: str) -> None:
    pair.make(target_tokens=300)
    await pair.pull(0)
    waiting = pair.pull(1)
    await until(lambda: pair.target._moves.waiting_imports == 1)
    if how == "released":
        await pair.target.release(RunId("t1"))
    else:
        waiting.cancel()
    with pytest.raises(Cancelled if how == "released" else asyncio.CancelledError):
        await waiting
    await until(lambda: pair.target._moves.waiting_imports == 0)
    await pair.target.release(RunId("t0"))


async def test_finished_prefills_that_wait_to_move_keep_others_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.make(source_tokens=450, prefill_backlog_ratio=1.0)  # two fit
    write, gate = pair.engines[1].write_kv, asyncio.Event()

    async def slow(run_id: RunId, slab: KvSlab) -> None:
        await gate.wait()
        await write(run_id, slab)

    monkeypatch.setattr(pair.engines[1], "write_kv", slow)
    moving = [pair.pull(0), pair.pull(1)]
    await until(lambda: pair.source.statistics().holds == 2)  # computed, and cannot leave
    assert (await pair.used())[0] >= 400
    with pytest.raises(Overloaded, match="wait to move"):
        await pair.pull(2)
    gate.set()
    await asyncio.gather(*moving)
    await pair.pull(3)
    for number in (0, 1, 3):
        await pair.target.release(RunId(f"t{number}"))


async def test_a_prefill_that_is_preempted_while_it_is_shipped_is_shipped_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.make()
    engine = pair.engines[0]
    export, tokens, lost = engine.export_kv, engine.kv_tokens, 3

    async def preempted(run_id: RunId, start: int, stop: int) -> KvSlab:
        if lost > 0 and start >= 32:
            raise InvalidRequest("positions are not there any more")
        return await export(run_id, start, stop)

    async def recomputing(run_id: RunId) -> int:
        nonlocal lost
        if lost > 0:
            lost -= 1
            return 0
        return await tokens(run_id)

    monkeypatch.setattr(engine, "export_kv", preempted)
    monkeypatch.setattr(engine, "kv_tokens", recomputing)
    engine.step_delay_s = 0.05
    report = await pair.pull(0)
    assert report.tokens == 200
    ids = prompt(200)
    outcome = await collect(pair.target, run_order("r", (*ids, 5), kv_from=RunId("t0")))
    alone = await collect(pair.source, run_order("r", (*ids, 5)))
    assert outcome.ids == alone.ids


def test_a_backlog_counts_down_whatever_happens() -> None:
    backlog = PrefillBacklog(most_tokens=100)
    with backlog.counted(150):  # alone, anything goes: the engine knows what fits
        with pytest.raises(Overloaded), backlog.counted(1):
            pass
        assert backlog.tokens == 150
    with pytest.raises(KeyError), backlog.counted(60):
        raise KeyError
    with backlog.counted(60), backlog.counted(40), pytest.raises(Overloaded), backlog.counted(1):
        pass
    assert backlog.tokens == 0
