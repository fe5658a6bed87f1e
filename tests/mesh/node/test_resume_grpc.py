"""Transfers over real grpc through a link that is cut at random bytes, in both directions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest

from mesh.bench.link import Direction, LinkProxy, LinkShape
from mesh.errors import NodeUnreachable
from mesh.kv.geometry import KvDtype
from mesh.node.engine import RunId
from mesh.node.host import HostSettings, NodeHost
from mesh.node.local_port import LocalPort
from mesh.node.port import KvDirection, KvSource
from mesh.node.servicer import NodeServicer
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import node_pb2_grpc
from tests.fakes.fake_engine import FakeEngine, tokens_of
from tests.fakes.fake_node import (
    CORE,
    EDGE,
    FakeGuard,
    FakeSigner,
    Outcome,
    collect,
    greedy,
    kv_order,
    prompt,
    run_order,
    until,
)

PUSH, PULL = KvDirection.PUSH, KvDirection.PULL
N_TOKENS = 1000
WIRE_BYTES = N_TOKENS * 1024  # f32, raw


@dataclass(slots=True)
class Far:
    """An edge, and a core behind a link."""

    edge: NodeHost
    core: NodeHost
    engines: dict[KvDirection, FakeEngine]  # the target's
    link: LinkProxy

    @property
    def port(self) -> LocalPort:
        return LocalPort(self.edge, lambda peer: grpc.aio.insecure_channel(peer.address))

    def order(self, direction: KvDirection, source: KvSource, ids: tuple[int, ...]) -> Any:
        return kv_order(CORE, direction=direction, token_ids=ids, source=source, address=self.link.address, codec="raw")


@asynccontextmanager
async def far(resume_timeout_s: float = 10.0) -> AsyncIterator[Far]:
    engines = {PUSH: FakeEngine(kv_dtype=KvDtype.F32), PULL: FakeEngine(kv_dtype=KvDtype.F32)}
    settings = HostSettings(resume_timeout_s=resume_timeout_s, window_bytes=600_000)
    edge = NodeHost(engines[PULL], FakeSigner(EDGE), FakeGuard(), EDGE, settings=settings)
    core = NodeHost(engines[PUSH], FakeSigner(CORE), FakeGuard(), CORE, settings=settings)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(core, lambda context: EDGE), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with LinkProxy("127.0.0.1", port) as link:
        yield Far(edge, core, engines, link)
    await edge.close()
    await core.close()
    await server.stop(None)
    for engine in engines.values():
        await engine.check_integrity()
        assert engine.hold_ids == []
        assert (await engine.load()).kv_used_tokens == 0


async def vandal(link: LinkProxy, rng: random.Random, bulk: Direction, cuts: int) -> None:
    """Cut the link `cuts` times, each after a random number of bytes, mostly of KV; mend it a little later."""
    for number in range(cuts):
        if number and rng.random() < 0.3:
            other = Direction.DOWN if bulk is Direction.UP else Direction.UP
            link.cut_after(other, rng.randint(1, 600))  # acks, and the handshake of a new connection
        else:
            link.cut_after(bulk, rng.randint(1, WIRE_BYTES // 5))
        while not link.is_cut:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await asyncio.sleep(rng.uniform(0, 0.05))
        link.mend()


@pytest.mark.parametrize("direction", [PUSH, PULL])
@pytest.mark.parametrize("seed", range(5))
async def test_cut_at_random_bytes(direction: KvDirection, seed: int) -> None:
    """Content equal, nothing twice in the engine, nothing left over."""
    rng = random.Random(seed)
    ids = prompt(N_TOKENS + 1)
    async with far() as pair:
        source, target = (pair.edge, pair.core) if direction is PUSH else (pair.core, pair.edge)
        engine = pair.engines[direction]
        await collect(source, run_order("h", ids[:-1], prefill_only=True))
        written: list[tuple[int, int]] = []
        write = engine.write_kv

        async def watched(run_id: RunId, slab: Any) -> None:
            await write(run_id, slab)
            written.append((slab.start, slab.stop))

        engine.write_kv = watched  # type: ignore[method-assign]
        # The open and the first word have to get through: before them there is nothing to resume.
        pair.link.reshape(Direction.DOWN, LinkShape(rate_bit_per_s=80e6))
        pair.link.reshape(Direction.UP, LinkShape(rate_bit_per_s=80e6))
        bulk = Direction.UP if direction is PUSH else Direction.DOWN
        move = asyncio.create_task(pair.port.move_kv(pair.order(direction, KvSource(run_id=RunId("h")), ids[:-1])))
        await until_bytes(pair.link, 60_000)
        breaking = asyncio.create_task(vandal(pair.link, rng, bulk, cuts=5))
        report = await move
        breaking.cancel()
        pair.link.mend()
        assert report.wire_bytes == WIRE_BYTES
        assert pair.edge.statistics().transfers_resumed_total >= 1
        assert [a for a, _ in written] == [0, *(b for _, b in written[:-1])]
        assert tokens_of(await engine.export_kv(RunId("target"), 0, N_TOKENS)) == ids[:-1]
        carried = pair.link.counters.up_bytes + pair.link.counters.down_bytes
        assert carried < 4 * WIRE_BYTES  # it went on, it did not begin again each time
        await source.release(RunId("h"))
        await target.release(RunId("target"))
        await until(lambda: pair.core.statistics().transfers == 0)


async def until_bytes(link: LinkProxy, size_bytes: int) -> None:
    while link.counters.up_bytes + link.counters.down_bytes < size_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("direction", [PUSH, PULL])
async def test_a_running_request_moves_over_a_link_that_is_cut(direction: KvDirection) -> None:
    ids = prompt(500)
    async with far() as pair:
        source, target = (pair.edge, pair.core) if direction is PUSH else (pair.core, pair.edge)
        for engine in pair.engines.values():
            engine.step_delay_s = 0.002
        seen = Outcome()
        run = asyncio.create_task(collect(source, run_order("r", ids, sampling=greedy(450)), seen))
        await until(lambda: len(seen.ids) >= 3)
        way = Direction.UP if direction is PUSH else Direction.DOWN
        pair.link.cut_after(way, 200_000)
        order = pair.order(direction, KvSource(run_id=RunId("r"), pause=True), ids + seen.ids)
        move = asyncio.create_task(pair.port.move_kv(order))
        while not pair.link.is_cut:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        before = len(seen.ids)
        await until(lambda: len(seen.ids) > before)  # it decodes on while the link is down
        pair.link.mend()
        report = await move
        await run
        assert report.tokens == len(ids) + len(seen.ids) - 1
        n_tokens = len(seen.ids) + 5
        rest = await collect(
            target,
            run_order("s", ids + seen.ids, prompt_tokens=500, sampling=greedy(n_tokens), kv_from=RunId("target")),
        )
        whole = await collect(target, run_order("w", ids, sampling=greedy(n_tokens)))
        assert seen.ids + rest.ids == whole.ids
        await source.release(RunId("r"))


@pytest.mark.parametrize("direction", [PUSH, PULL])
async def test_a_link_that_stays_cut_frees_both_ends_in_time(direction: KvDirection) -> None:
    ids = prompt(N_TOKENS + 1)
    async with far(resume_timeout_s=0.3) as pair:
        source = pair.edge if direction is PUSH else pair.core
        await collect(source, run_order("h", ids[:-1], prefill_only=True))
        pair.link.cut_after(Direction.UP if direction is PUSH else Direction.DOWN, 400_000)
        with pytest.raises(NodeUnreachable):
            await pair.port.move_kv(pair.order(direction, KvSource(run_id=RunId("h")), ids[:-1]))
        assert pair.engines[direction].hold_ids == [] or direction is PUSH  # the dialled end has its own time
        async with asyncio.timeout(10):
            while pair.core.statistics().transfers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert pair.engines[direction].hold_ids == []
        await source.release(RunId("h"))


async def test_a_node_that_cannot_be_reached_fails_at_once() -> None:
    """No patience where no transfer had begun: another node may take the request."""
    async with far(resume_timeout_s=600.0) as pair:
        await pair.link.cut()
        order = pair.order(PULL, KvSource(run_id=RunId("h")), prompt(40))
        with pytest.raises(NodeUnreachable):
            await pair.port.move_kv(replace(order, context=replace(order.context, deadline_s=60.0)))
