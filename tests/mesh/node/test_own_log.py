"""A node keeps its own legs: before anybody is told of their end, failed ones too; it takes no work it cannot keep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from mesh.errors import MeshError, Overloaded
from mesh.identity.signing import SignedRecord
from mesh.node.host import NodeHost
from mesh.node.port import PortFinished, PortHeld
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import CORE, FakeGuard, FakeSigner, collect, greedy, prompt, run_order, until


class MemoryLog:
    """Keeps legs; `trouble` is raised instead."""

    def __init__(self) -> None:
        self.legs: list[dict[str, Any]] = []
        self.trouble: MeshError | None = None

    async def append_leg(self, leg: SignedRecord) -> None:
        await self.check()
        self.legs.append(json.loads(leg.body))

    async def check(self) -> None:
        await asyncio.sleep(0)
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
async def host(log: MemoryLog) -> AsyncIterator[NodeHost]:
    engine = FakeEngine()
    host = NodeHost(engine, FakeSigner(CORE), FakeGuard(), CORE, legs=log)
    yield host
    await host.close()
    await engine.close()


def outcomes(log: MemoryLog) -> list[tuple[str, str]]:
    return [(leg["run_id"], leg["outcome"]) for leg in log.legs]


async def test_a_leg_is_kept_before_its_end_is_told(host: NodeHost, log: MemoryLog) -> None:
    async with aclosing(host.run(run_order("r", prompt(40), sampling=greedy(3)))) as events:
        async for event in events:
            assert bool(log.legs) is isinstance(event, PortFinished)
            if isinstance(event, PortFinished):
                assert json.loads(event.leg.body) == log.legs[0]
    held = await collect(host, run_order("p", prompt(40), prefill_only=True))
    assert isinstance(held.last, PortHeld)
    assert outcomes(log) == [("r", "length"), ("p", "held")]


async def test_a_run_that_nobody_waited_for_is_kept_too(host: NodeHost, log: MemoryLog) -> None:
    async with aclosing(host.run(run_order("r", prompt(40), sampling=greedy(500)))) as events:
        async for _ in events:
            break
    await until(lambda: bool(log.legs))
    assert outcomes(log) == [("r", "failed")]
    assert log.legs[0]["ended_unix_s"] >= log.legs[0]["started_unix_s"] > 1e9


async def test_a_node_that_cannot_keep_legs_takes_no_work(host: NodeHost, log: MemoryLog) -> None:
    log.trouble = Overloaded("the disk is full")
    with pytest.raises(Overloaded):
        await collect(host, run_order("r", prompt(40)))
    assert host.statistics().runs_started_total == 0
    log.trouble = None
    assert len((await collect(host, run_order("r", prompt(40), sampling=greedy(2)))).ids) == 2


async def test_a_run_whose_leg_cannot_be_kept_fails(host: NodeHost, log: MemoryLog) -> None:
    seen = []

    async def follow() -> None:
        async with aclosing(host.run(run_order("r", prompt(40), sampling=greedy(3)))) as events:
            async for event in events:
                log.trouble = Overloaded("the disk is full")
                seen.append(event)

    with pytest.raises(Overloaded):
        await follow()
    assert seen
    assert not any(isinstance(event, PortFinished) for event in seen)
