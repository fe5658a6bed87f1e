"""Prefill in one core engine, decode in another, with the demo model: the tokens of one engine, and no block lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from mesh.errors import MeshError
from mesh.kv.manifest import CANONICAL
from mesh.kv.slab import KvSlab
from mesh.node.engine import RunId
from mesh.node.host import HostSettings, NodeHost
from mesh.node.port import KvDirection, KvOrder, KvSource, PortPrefilled
from mesh.node.serving_role import ServingRole
from tests.core_node.engine.demo_model import demo_model_path
from tests.fakes.fake_node import (
    FakeGuard,
    FakeSigner,
    MemoryNetwork,
    collect,
    context_of,
    greedy,
    kv_order,
    place_of,
    run_order,
    until,
)

pytestmark = pytest.mark.model
PREFILL, DECODE = place_of("core-1"), place_of("core-2")
IDS = tuple(1000 + (i * 7919) % 30_000 for i in range(300))
CONTEXT = context_of(model="demo")


class Two:
    """A node that prefills and one that decodes."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.engines: list[CoreEngine] = []
        self.hosts: list[NodeHost] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for place, role in ((PREFILL, ServingRole.PREFILL), (DECODE, ServingRole.DECODE)):
            settings = CoreEngineSettings(
                model_path=demo_model_path(), model_id="demo", n_threads=1, kv_pool_tokens=512, max_step_tokens=64
            )
            engine = CoreEngine(settings)
            stack.push_async_callback(engine.close)
            await engine.start()
            limits = HostSettings(idle_timeout_s=240.0, room_timeout_s=120.0, resume_timeout_s=0.0)
            host = NodeHost(engine, FakeSigner(place), FakeGuard(), place, settings=limits)
            stack.push_async_callback(host.close)
            host.set_role(role)
            self.network.add(host)
            self.engines.append(engine)
            self.hosts.append(host)

    def pull(self, token_ids: tuple[int, ...], number: int = 0) -> KvOrder:
        run_id = RunId(f"p{number}")
        prefill = run_order(run_id, token_ids[:-1], prefill_only=True, context=CONTEXT)
        return kv_order(
            PREFILL,
            direction=KvDirection.PULL,
            token_ids=token_ids[:-1],
            source=KvSource(run_id=run_id, prefill=prefill),
            target=f"t{number}",
            context=CONTEXT,
            codec=CANONICAL,
        )


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        made = Two()
        await made.start(stack)
        yield made
        for engine in made.engines:
            await engine.check_integrity()


async def test_the_tokens_are_those_of_one_engine_and_a_dead_decoder_costs_the_prefill_node_nothing(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = two.hosts
    report = await decode.move_kv(two.pull(IDS), two.network.dial_from(DECODE))
    assert (report.tokens, report.codec) == (299, "raw")
    order = run_order("r", IDS, kv_from=RunId("t0"), context=CONTEXT, sampling=greedy(24))
    apart = await collect(decode, order)
    (prefilled,) = (event for event in apart.events if isinstance(event, PortPrefilled))
    assert prefilled.tokens - prefilled.cached_tokens <= 16  # what the decode node computed of the prompt
    prefill.set_role(ServingRole.BOTH)
    alone = await collect(prefill, run_order("r", IDS, context=CONTEXT, sampling=greedy(24)))
    assert apart.ids == alone.ids
    longer = (*IDS, *apart.ids, 7)  # the next turn: only what is new travels
    again = await decode.move_kv(two.pull(longer, 1), two.network.dial_from(DECODE))
    assert again.skipped_tokens >= len(IDS) // 16 * 16
    await decode.release(RunId("t1"))
    await dies_in_mid_transfer(two, monkeypatch)


async def dies_in_mid_transfer(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = two.hosts
    reached = asyncio.Event()

    async def dies(run_id: RunId, slab: KvSlab) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(two.engines[1], "write_kv", dies)
    moving = asyncio.create_task(decode.move_kv(two.pull((5, *IDS[:200]), 2), two.network.dial_from(DECODE)))
    await reached.wait()
    moving.cancel()
    with pytest.raises((asyncio.CancelledError, MeshError)):
        await moving
    await until(lambda: prefill.statistics().transfers == 0)
    await prefill.release(RunId("p2"))  # as its entry does; else its hold runs out
    assert (await two.engines[0].load()).kv_used_tokens == 0


async def test_prefills_that_all_want_the_pool_wait_and_none_is_lost(two: Two) -> None:
    """Six prompts of 150 tokens, pools of 512: they take turns at both ends."""
    _, decode = two.hosts

    async def one(number: int) -> int:
        ids = (1000 + number, *IDS[1:150])
        await decode.move_kv(two.pull(ids, number), two.network.dial_from(DECODE))
        order = run_order(f"r{number}", ids, kv_from=RunId(f"t{number}"), context=CONTEXT, sampling=greedy(4))
        return len((await collect(decode, order)).ids)

    assert await asyncio.gather(*(one(number) for number in range(6))) == [4] * 6
