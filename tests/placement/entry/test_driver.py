"""The driver at its own rim: who dials, nodes that hang, cancellation at bad moments, bugs of the runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from mesh.errors import Cancelled, Internal, MeshError, NodeUnreachable, StalePlan
from mesh.identity.place import Place
from mesh.node.engine import FinishReason, RunId
from mesh.node.port import KvDirection, KvOrder, KvReport, NodePort, PortEvent, PortFinished, PortTokens, RunOrder
from placement.decide.types import Snapshot
from placement.entry import driver as driver_module
from placement.entry import runner_types as rt
from placement.entry.driver import RequestDriver
from placement.entry.notes import Notes
from placement.entry.orders import Work, choose_dialler
from placement.entry.runner import PlanRunner
from tests.fakes.fake_node import context_of, greedy
from tests.placement.entry.plans import LEG, place, spec

Script = Callable[[RunOrder], AsyncGenerator[PortEvent, None]]


@dataclass(eq=False)
class ScriptedPort:
    place: Place
    script: Script
    can_dial: bool = True
    address: str = ""
    released: list[RunId] = field(default_factory=list)
    orders: list[RunOrder] = field(default_factory=list)

    def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        self.orders.append(order)
        return self.script(order)

    async def move_kv(self, order: KvOrder) -> KvReport:
        raise NodeUnreachable("no way")

    async def release(self, run_id: RunId) -> None:
        self.released.append(run_id)


class ScriptedWorld:
    def __init__(self, *ports: ScriptedPort) -> None:
        self.ports = {p.place.node_id: p for p in ports}
        self.notes = Notes()

    def snapshot(self) -> Snapshot:
        raise NotImplementedError

    def snapshot_age_s(self) -> float:
        return 0.0

    def snapshot_with(self, node_id: str) -> Snapshot:
        return self.snapshot()

    relay_node_id = "placement-1"

    def port(self, node_id: str) -> NodePort:
        if node_id not in self.ports:
            raise NodeUnreachable(f"no node {node_id}")
        return self.ports[node_id]

    def saw_transfer(self, source_node_id: str, target_node_id: str, report: KvReport) -> None:
        return


def driver_over(
    world: ScriptedWorld,
    *ways: str,
    on_effect: Callable[[rt.Effect], None] | None = None,
    deadline_s: float | None = None,
) -> tuple[RequestDriver, list[rt.Effect]]:
    told: list[rt.Effect] = []
    work = Work(context=context_of(deadline_s=deadline_s), prompt_tokens=4, sampling=greedy(), priority=0)
    runner = PlanRunner(spec(*ways))
    return RequestDriver(runner=runner, work=work, world=world, on_effect=on_effect or told.append), told


async def answers(order: RunOrder) -> AsyncGenerator[PortEvent, None]:
    yield PortTokens((7,))
    yield PortFinished(reason=FinishReason.STOP, stop_string=None, leg=LEG)


async def goes_on(order: RunOrder) -> AsyncGenerator[PortEvent, None]:
    yield PortTokens((7,))
    await asyncio.Event().wait()


def hangs(until_s: float) -> Script:
    """Does not end when it is cancelled."""

    async def script(order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        yield PortTokens((7,))
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(until_s)

    return script


def fails(error: BaseException) -> Script:
    async def script(order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        raise error
        yield

    return script


async def told_tokens(told: list[rt.Effect]) -> None:
    async with asyncio.timeout(5):
        while not any(isinstance(e, rt.Emit) for e in told):  # noqa: ASYNC110 - the test's own list
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("source", "target", "dials", "direction"),
    [("edge", "core", "edge", KvDirection.PUSH), ("core", "edge", "edge", KvDirection.PULL),
     ("core", "core2", "core2", KvDirection.PULL)],
)  # fmt: skip
def test_an_edge_dials_and_between_core_nodes_the_target(
    source: str, target: str, dials: str, direction: KvDirection
) -> None:
    ports = {name: ScriptedPort(place(name), answers) for name in (source, target)}
    dialler, peer, way = choose_dialler(ports[source], ports[target])
    assert (dialler.place.node_id, way) == (dials, direction)
    assert {dialler.place.node_id, peer.place.node_id} == {source, target}


def test_between_edges_the_source_dials_unless_the_entry_cannot_order_it_to() -> None:
    ports = [ScriptedPort(place(name), answers) for name in ("a", "b")]
    assert choose_dialler(*ports) == (ports[0], ports[1], KvDirection.PUSH)
    ports[0].can_dial = False
    assert choose_dialler(*ports) == (ports[1], ports[0], KvDirection.PULL)


async def test_one_outcome() -> None:
    driver, told = driver_over(ScriptedWorld(ScriptedPort(place("core"), answers)), "core")
    await driver.run()
    assert [type(e).__name__ for e in told] == ["StartRun", "Emit", "LegDone", "Finish"]
    assert (driver.node_id, driver.usage.completion_tokens) == ("core", 1)
    with pytest.raises(StalePlan, match="has ended"):
        await driver.move("edge", rt.MoveCause.OPERATOR)


async def test_an_unknown_node_is_a_failed_run() -> None:
    driver, told = driver_over(ScriptedWorld(ScriptedPort(place("core2"), answers)), "core", "core2")
    await driver.run()
    assert isinstance(told[-1], rt.Finish)


async def test_a_node_that_hangs_does_not_keep_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_STOP_TIMEOUT_S", 0.02)
    driver, told = driver_over(ScriptedWorld(ScriptedPort(place("core"), hangs(0.3))), "core")
    running = asyncio.create_task(driver.run())
    await told_tokens(told)
    driver.cancel()
    async with asyncio.timeout(0.25):
        await running
    assert isinstance(told[-1], rt.Fail)
    assert isinstance(told[-1].error, Cancelled)
    await asyncio.sleep(0.35)  # the straggler ends by itself


async def test_a_cancellation_while_a_run_is_being_closed_is_not_lost() -> None:
    driver, told = driver_over(ScriptedWorld(ScriptedPort(place("core"), hangs(0.05))), "core")
    running = asyncio.create_task(driver.run())
    await told_tokens(told)
    driver.cancel()
    await asyncio.sleep(0.01)  # it waits for the run to close
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert driver._tasks == {}


async def test_cancelling_the_driver_frees_first_and_tells_nobody() -> None:
    port = ScriptedPort(place("core"), goes_on)
    driver, told = driver_over(ScriptedWorld(port), "core")
    running = asyncio.create_task(driver.run())
    await told_tokens(told)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(isinstance(e, rt.Fail | rt.Finish) for e in told)
    assert driver._tasks == {}


async def test_an_effect_that_cannot_be_told_ends_the_driver_and_frees() -> None:
    seen: list[rt.Effect] = []

    def on_effect(effect: rt.Effect) -> None:
        seen.append(effect)
        if isinstance(effect, rt.Emit):
            raise ValueError("a bug")

    world = ScriptedWorld(ScriptedPort(place("core"), goes_on))
    driver, _ = driver_over(world, "core", on_effect=on_effect)
    with pytest.raises(ValueError, match="a bug"):
        await driver.run()
    assert driver._tasks == {}
    assert [type(e).__name__ for e in seen] == ["StartRun", "Emit"]


async def test_a_move_of_an_abandoned_request_is_answered() -> None:
    driver, told = driver_over(ScriptedWorld(ScriptedPort(place("core"), goes_on)), "core")
    running = asyncio.create_task(driver.run())
    await told_tokens(told)
    moving = asyncio.create_task(driver.move("core2", rt.MoveCause.OPERATOR))
    await asyncio.sleep(0)
    running.cancel()
    outcomes = await asyncio.gather(moving, running, return_exceptions=True)
    assert isinstance(outcomes[0], MeshError)
    assert isinstance(outcomes[1], asyncio.CancelledError)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("y")])
async def test_a_bug_behind_a_port_is_internal(error: Exception) -> None:
    driver, told = driver_over(ScriptedWorld(ScriptedPort(place("core"), fails(error))), "core")
    await driver.run()
    assert isinstance(told[-1], rt.Fail)
    assert isinstance(told[-1].error, Internal)
    assert str(error) not in told[-1].error.message


async def test_a_run_whose_channel_was_closed_under_it_is_not_waited_for() -> None:
    first, second = ScriptedPort(place("core"), fails(asyncio.CancelledError())), ScriptedPort(place("core2"), answers)
    driver, told = driver_over(ScriptedWorld(first, second), "core", "core2")
    async with asyncio.timeout(5):
        await driver.run()
    assert isinstance(told[-1], rt.Finish)
    driver, told = driver_over(ScriptedWorld(first), "core")
    async with asyncio.timeout(5):
        await driver.run()
    assert isinstance(told[-1], rt.Fail)
    assert isinstance(told[-1].error, NodeUnreachable)


async def test_a_stale_plan_after_tokens_is_not_tried_again_in_place() -> None:
    async def script(order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        yield PortTokens((7,))
        raise StalePlan("moved away")

    first, second = ScriptedPort(place("core"), script), ScriptedPort(place("core2"), answers)
    driver, told = driver_over(ScriptedWorld(first, second), "core", "core2")
    await driver.run()
    assert len(first.orders) == 1
    assert second.orders[0].token_ids == (0, 1, 2, 3, 7)
    assert [e.ids for e in told if isinstance(e, rt.Emit)] == [(7,), (7,)]


async def test_orders_carry_what_is_left_of_the_deadline() -> None:
    first, second = ScriptedPort(place("core"), fails(NodeUnreachable("x"))), ScriptedPort(place("core2"), answers)
    driver, _ = driver_over(ScriptedWorld(first, second), "core", "core2", deadline_s=5.0)
    now = [100.0]
    driver._clock = lambda: now[0]
    driver._started_s = 98.0
    await driver.run()
    assert [p.orders[0].context.deadline_s for p in (first, second)] == [3.0, 3.0]
    now[0] = 1000.0
    assert driver._context().deadline_s == 0.001
