"""An agent against a scripted hub that does what ours never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from mesh.errors import InvalidRequest, LeaseLost, MeshError, NodeUnreachable, RevisionMismatch
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.types import UplinkLimits
from mesh.v1 import node_pb2, uplink_pb2, uplink_pb2_grpc
from tests.mesh.rpc.uplink.harness import Mesh, Site, eventually, run_order
from tests.mesh.rpc.uplink.virtual_clock import VirtualClock

LEASE = uplink_pb2.AttachResponse(lease=uplink_pb2.SessionLease(session_id="s", lease_s=6.0, heartbeat_s=2.0))


class ScriptedHub(uplink_pb2_grpc.UplinkServicer):
    """Sends what tests put into `say` on the newest session; keeps what it hears. `say` None ends the session."""

    def __init__(self, first: uplink_pb2.AttachResponse | None = LEASE, *, renews: bool = False) -> None:
        self.first = first
        self.renews = renews
        self.say: asyncio.Queue[uplink_pb2.AttachResponse | None] = asyncio.Queue()
        self.heard: list[uplink_pb2.AttachRequest] = []
        self.sessions = 0

    async def Attach(
        self, request_iterator: AsyncIterator[uplink_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        self.sessions += 1
        if self.first is not None:
            await context.write(self.first)
        listener = asyncio.create_task(self._listen(request_iterator))
        try:
            while (message := await self.say.get()) is not None:
                await context.write(message)
        finally:
            listener.cancel()

    async def _listen(self, requests: AsyncIterator[uplink_pb2.AttachRequest]) -> None:
        async for request in requests:
            self.heard.append(request)
            if self.renews and request.HasField("heartbeat"):
                renewal = uplink_pb2.LeaseRenewal(sequence=request.heartbeat.sequence)
                self.say.put_nowait(uplink_pb2.AttachResponse(renewal=renewal))
        self.say.put_nowait(None)

    def results(self) -> list[uplink_pb2.WorkResult]:
        return [request.work_result for request in self.heard if request.HasField("work_result")]


@asynccontextmanager
async def against(
    hub: ScriptedHub, *, clock: VirtualClock | None = None, limits: UplinkLimits | None = None
) -> AsyncIterator[Site]:
    """A started agent of this hub."""
    server = grpc.aio.server()
    uplink_pb2_grpc.add_UplinkServicer_to_server(hub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    m = Mesh(clock or VirtualClock(), limits or UplinkLimits(), 6.0, 2.0)
    site = m.site("edge-1", port=port)
    await site.agent.start()
    try:
        yield site
    finally:
        await site.agent.stop()
        await server.stop(None)


def run(work_id: int, order: node_pb2.RunOrder | None = None) -> uplink_pb2.AttachResponse:
    if order is None:
        return wire.run_to_wire(work_id, run_order(f"run-{work_id}"))
    return uplink_pb2.AttachResponse(run=uplink_pb2.WorkRun(work_id=work_id, order=order))


async def last_error(site: Site) -> MeshError:
    await eventually(lambda: site.agent.state.last_error is not None)
    error = site.agent.state.last_error
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (run(1), RevisionMismatch),
        (uplink_pb2.AttachResponse(), RevisionMismatch),
        (uplink_pb2.AttachResponse(lease=uplink_pb2.SessionLease(lease_s=6, heartbeat_s=2)), InvalidRequest),
        (
            uplink_pb2.AttachResponse(lease=uplink_pb2.SessionLease(session_id="s", lease_s=1, heartbeat_s=2)),
            InvalidRequest,
        ),
        (
            uplink_pb2.AttachResponse(
                lease=uplink_pb2.SessionLease(session_id="s", lease_s=float("nan"), heartbeat_s=2)
            ),
            InvalidRequest,
        ),
        (
            uplink_pb2.AttachResponse(lease=uplink_pb2.SessionLease(session_id="s", lease_s=6, heartbeat_s=0)),
            InvalidRequest,
        ),
    ],
)
async def test_a_session_without_a_lease_that_can_be_kept(
    first: uplink_pb2.AttachResponse, error: type[MeshError]
) -> None:
    async with against(ScriptedHub(first)) as site:
        assert type(await last_error(site)) is error
        assert not site.agent.state.connected


async def test_no_lease_in_time() -> None:
    clock = VirtualClock()
    hub = ScriptedHub(None)
    async with against(hub, clock=clock) as site:
        await eventually(lambda: hub.sessions == 1)
        await clock.advance(10.1)
        error = await last_error(site)
        assert isinstance(error, NodeUnreachable)
        assert "no lease" in error.message


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (uplink_pb2.AttachResponse(), RevisionMismatch),
        (LEASE, RevisionMismatch),
        (uplink_pb2.AttachResponse(renewal=uplink_pb2.LeaseRenewal(sequence=1000)), InvalidRequest),
        (run(0), InvalidRequest),
        (None, NodeUnreachable),
    ],
)
async def test_a_hub_that_breaks_the_protocol_is_left(
    message: uplink_pb2.AttachResponse | None, error: type[MeshError]
) -> None:
    hub = ScriptedHub()
    async with against(hub) as site:
        await site.agent.wait_connected()
        site.host.gate.clear()
        hub.say.put_nowait(run(7))
        await site.host.until(lambda: site.host.started == ["run-7"])
        hub.say.put_nowait(message)
        assert type(await last_error(site)) is error
        await site.host.until(lambda: site.host.cancelled == ["run-7"])


async def test_an_order_id_that_is_open_already() -> None:
    hub = ScriptedHub()
    async with against(hub) as site:
        site.host.gate.clear()
        hub.say.put_nowait(run(7))
        hub.say.put_nowait(run(7))
        assert isinstance(await last_error(site), InvalidRequest)


async def test_the_agent_lets_go_when_it_is_not_renewed() -> None:
    clock = VirtualClock()
    hub = ScriptedHub()
    async with against(hub, clock=clock) as site:
        await site.agent.wait_connected()
        site.host.gate.clear()
        hub.say.put_nowait(run(1))
        await site.host.until(lambda: site.host.started == ["run-1"])
        await clock.advance(5.9)
        assert site.agent.state.connected
        await clock.advance(0.2)
        assert isinstance(await last_error(site), LeaseLost)
        await site.host.until(lambda: site.host.cancelled == ["run-1"])


async def test_the_agents_lease_counts_from_the_heartbeat_that_was_renewed() -> None:
    clock = VirtualClock()
    hub = ScriptedHub(renews=True)
    async with against(hub, clock=clock) as site:
        await site.agent.wait_connected()
        await eventually(lambda: site.agent.state.rtt_s is not None)
        hub.renews = False
        await clock.advance(1.9)
        await clock.advance(4.0)
        assert site.agent.state.connected
        await clock.advance(0.2)
        assert isinstance(await last_error(site), LeaseLost)


async def test_a_reconnect_waits_longer_each_time() -> None:
    clock = VirtualClock()
    hub = ScriptedHub(uplink_pb2.AttachResponse())
    async with against(hub, clock=clock) as site:
        await last_error(site)
        waits = []
        for sessions in range(1, 6):
            started_s = clock.monotonic()
            while hub.sessions == sessions:
                await clock.advance(0.001)
                await asyncio.sleep(0.001)
            waits.append(clock.monotonic() - started_s)
        assert max(waits[2:]) > waits[0]
        assert max(waits) <= 0.2  # the harness's cap, and a tick


@pytest.mark.parametrize(
    "order",
    [
        node_pb2.RunOrder(),
        node_pb2.RunOrder(run_id="r", tokens={"ids": [1]}, sampling={"temperature": float("nan"), "max_tokens": 1}),
        node_pb2.RunOrder(run_id="r", tokens={"ids": [1]}, sampling={"top_p": 7.0, "max_tokens": 1}),
    ],
)
async def test_an_order_that_cannot_be_is_refused_alone(order: node_pb2.RunOrder) -> None:
    hub = ScriptedHub()
    async with against(hub) as site:
        hub.say.put_nowait(run(3, order))
        hub.say.put_nowait(run(4))
        await eventually(lambda: len(hub.results()) == 1)
        (result,) = hub.results()
        assert (result.work_id, result.error_reason) == (3, "INVALID_REQUEST")
        await eventually(lambda: any(h.work_event.event.HasField("finished") for h in hub.heard))
        assert site.host.started == ["run-4"]


async def test_a_move_that_cannot_be_is_refused() -> None:
    hub = ScriptedHub()
    async with against(hub) as site:
        hub.say.put_nowait(uplink_pb2.AttachResponse(move_kv=uplink_pb2.WorkMoveKv(work_id=5)))
        await eventually(lambda: len(hub.results()) == 1)
        assert hub.results()[0].error_reason == "INVALID_REQUEST"
        assert site.host.moves == []


async def test_more_orders_than_agreed_are_refused() -> None:
    hub = ScriptedHub()
    async with against(hub, limits=UplinkLimits(max_open=2)) as site:
        site.host.gate.clear()
        for work_id in (1, 2, 3):
            hub.say.put_nowait(run(work_id))
        await eventually(lambda: len(hub.results()) == 1)
        assert (hub.results()[0].work_id, hub.results()[0].error_reason) == (3, "OVERLOADED")


async def test_cancels_of_unknown_orders_are_ignored() -> None:
    hub = ScriptedHub()
    async with against(hub) as site:
        hub.say.put_nowait(uplink_pb2.AttachResponse(cancel=uplink_pb2.WorkCancel(work_id=99)))
        hub.say.put_nowait(uplink_pb2.AttachResponse(cancel=uplink_pb2.WorkCancel()))
        hub.say.put_nowait(run(1))
        await site.host.until(lambda: site.host.started == ["run-1"])
        assert site.agent.state.connected
        assert site.host.released == []


async def test_a_command_of_an_unknown_kind_is_the_callbacks_to_refuse() -> None:
    hub = ScriptedHub()
    async with against(hub) as site:
        hub.say.put_nowait(uplink_pb2.AttachResponse(command=uplink_pb2.Command(command_id=4)))
        await eventually(lambda: len(site.commands) == 1)
        await eventually(lambda: any(h.command_result.command_id == 4 for h in hub.heard))


async def test_a_slow_hub_holds_the_engine_back_and_keeps_its_memory_bounded() -> None:
    class Deaf(ScriptedHub):
        async def _listen(self, requests: AsyncIterator[uplink_pb2.AttachRequest]) -> None:
            await asyncio.Event().wait()

    hub = Deaf()
    async with against(hub, limits=UplinkLimits(outbox_bytes=64 * 1024)) as site:
        site.host.ids_per_event = 10_000
        hub.say.put_nowait(wire.run_to_wire(1, run_order("flood", max_tokens=2**31 - 1)))
        made = -1
        while made != site.host.events_made:  # until nothing more is taken from the engine
            made = site.host.events_made
            await asyncio.sleep(0.2)
        assert 0 < made < 10_000  # gRPC's own window takes a few megabytes, and then no more
