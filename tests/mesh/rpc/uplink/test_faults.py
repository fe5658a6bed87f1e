"""What breaks a session, and what each side makes of it. Links are cut by the proxy of mesh.bench.link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from mesh.bench.link import LinkProxy
from mesh.errors import (
    Draining,
    Expired,
    Internal,
    LeaseLost,
    MeshError,
    NodeUnreachable,
    NotFound,
    PolicyDenied,
    RevisionMismatch,
)
from mesh.identity.place import Place, Role
from mesh.node.port import PortEvent, PortFinished, PortPrefilled
from mesh.rpc.errors import from_rpc_error
from mesh.rpc.uplink.session import Session
from mesh.rpc.uplink.types import UplinkLimits
from mesh.v1 import admin_pb2, common_pb2, node_pb2, uplink_pb2
from tests.mesh.rpc.uplink.harness import (
    MODEL,
    Mesh,
    RawAgent,
    Site,
    collect,
    error_of,
    eventually,
    kv_order,
    mesh,
    run_order,
)
from tests.mesh.rpc.uplink.virtual_clock import VirtualClock


async def refusal(agent: RawAgent) -> MeshError:
    """How the hub ended the session."""
    try:
        while await agent.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the session ended well")


@asynccontextmanager
async def raw(m: Mesh, node_id: str = "edge-1", role: Role = Role.EDGE) -> AsyncIterator[RawAgent]:
    agent = RawAgent(m, node_id, role)
    try:
        yield agent
    finally:
        await agent.close()


@asynccontextmanager
async def raw_attached(m: Mesh, node_id: str = "edge-1") -> AsyncIterator[RawAgent]:
    async with raw(m, node_id) as agent:
        assert (await agent.hello()).HasField("lease")
        await eventually(lambda: any(edge.place.node_id == node_id for edge in m.hub.attached()))
        yield agent


@asynccontextmanager
async def behind_a_link(m: Mesh) -> AsyncIterator[tuple[Site, LinkProxy]]:
    """An attached agent whose link to the hub can be cut."""
    async with LinkProxy("127.0.0.1", m.port) as link:
        site = m.site("edge-1", port=link.port)
        await site.agent.start()
        await site.agent.wait_connected()
        await eventually(lambda: len(m.hub.attached()) == 1)
        yield site, link
        await site.agent.stop()


async def running(m: Mesh, site: Site) -> AsyncIterator[PortEvent]:
    """A run that has started and waits at the gate."""
    site.host.gate.clear()
    events = m.hub.port("edge-1").run(run_order("a"))
    assert isinstance(await anext(events), PortPrefilled)
    return events


class TestBrokenLinks:
    async def test_a_cut_link_fails_open_work_on_both_sides_and_the_agent_comes_back(self) -> None:
        async with mesh() as m, behind_a_link(m) as (site, link):
            events = await running(m, site)
            moving = asyncio.create_task(m.hub.port("edge-1").move_kv(kv_order("t")))
            await site.host.until(lambda: "t" in site.host.started)
            await link.cut()
            assert isinstance(await error_of(collect(events)), NodeUnreachable)
            assert isinstance(await error_of(moving), NodeUnreachable)
            await site.host.until(lambda: sorted(site.host.cancelled) == ["a", "t"])
            assert m.hub.attached() == ()
            await site.agent.wait_disconnected()
            assert isinstance(site.agent.state.last_error, NodeUnreachable)
            link.mend()
            await site.agent.wait_connected()
            site.host.gate.set()
            await eventually(lambda: len(m.hub.attached()) == 1)
            assert isinstance((await collect(m.hub.port("edge-1").run(run_order("b"))))[-1], PortFinished)

    async def test_a_half_open_link_ends_by_lease_on_both_sides(self) -> None:
        async with mesh(lease_s=0.4, heartbeat_s=0.1) as m, behind_a_link(m) as (site, link):
            events = await running(m, site)
            link.stall()
            assert isinstance(await error_of(collect(events)), NodeUnreachable)
            await site.host.until(lambda: site.host.cancelled == ["a"])
            await eventually(lambda: isinstance(site.agent.state.last_error, LeaseLost))
            link.resume()
            await site.agent.wait_connected()

    async def test_a_hub_that_is_killed_and_back(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            events = await running(m, site)
            await m.kill_hub()
            assert isinstance(await error_of(collect(events)), NodeUnreachable)
            await site.host.until(lambda: site.host.cancelled == ["a"])
            await site.agent.wait_disconnected()
            await m.start_hub()
            await site.agent.wait_connected()
            site.host.gate.set()
            await eventually(lambda: len(m.hub.attached()) == 1)
            assert isinstance((await collect(m.hub.port("edge-1").run(run_order("b"))))[-1], PortFinished)

    async def test_no_hub_at_all_is_tried_again_and_does_not_hold_up_stop(self) -> None:
        async with mesh() as m:
            await m.kill_hub()
            site = m.site("edge-1")
            await site.agent.start()
            await eventually(lambda: isinstance(site.agent.state.last_error, NodeUnreachable))
            assert not site.agent.state.connected
            await site.agent.stop()

    async def test_a_hub_that_closes_tells_draining(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            events = await running(m, site)
            m.hub.close()
            assert isinstance(await error_of(collect(events)), Draining)
            await eventually(lambda: isinstance(site.agent.state.last_error, Draining))
            assert m.hub.attached() == ()

    async def test_a_command_under_way_fails_with_its_session(self) -> None:
        async with mesh() as m, behind_a_link(m) as (site, link):

            async def hang(_: uplink_pb2.Command) -> uplink_pb2.CommandResult:
                await asyncio.Event().wait()
                raise AssertionError

            site.on_command = hang
            command = uplink_pb2.Command(migrate=admin_pb2.MigrateRequest(request_id="request"))
            asked = asyncio.create_task(m.hub.command("edge-1", command))
            await eventually(lambda: len(site.commands) == 1)
            await link.cut()
            assert isinstance(await error_of(asked), NodeUnreachable)


class TestLease:
    async def test_a_silent_agent_is_disconnected_when_its_lease_ends(self) -> None:
        clock = VirtualClock()
        async with mesh(clock=clock) as m, raw_attached(m) as agent:
            run = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order())))
            assert (await agent.read()).HasField("run")
            await clock.advance(5.9)
            assert len(m.hub.attached()) == 1
            assert m.hub.attached()[0].age_s == pytest.approx(5.9)
            assert not run.done()
            await clock.advance(0.2)
            assert m.hub.attached() == ()
            error = await error_of(run)
            assert isinstance(error, NodeUnreachable)
            assert "silent for 6 s" in error.message
            assert isinstance(await refusal(agent), LeaseLost)

    async def test_heartbeats_keep_it_and_are_answered(self) -> None:
        clock = VirtualClock()
        async with mesh(clock=clock) as m, raw_attached(m) as agent:
            for sequence in range(1, 11):
                await clock.advance(4.0)
                await agent.send(heartbeat=uplink_pb2.Heartbeat(sequence=sequence, rtt_s=0.5))
                assert (await agent.read()).renewal.sequence == sequence
            (edge,) = m.hub.attached()
            assert edge.rtt_s == pytest.approx(0.5)
            assert edge.age_s == pytest.approx(40.0)  # none of them told the load

    async def test_the_agent_keeps_its_lease_for_as_long_as_it_is_renewed(self) -> None:
        clock = VirtualClock()
        async with mesh(clock=clock) as m:
            site = await m.attach("edge-1")
            for _ in range(10):
                await eventually(lambda: m.hub.attached()[0].age_s == 0.0)
                await eventually(lambda: site.agent.state.heard_monotonic_s == clock.monotonic())
                await clock.advance(2.0)
            assert site.agent.state.connected

    async def test_no_hello_in_time(self) -> None:
        clock = VirtualClock()
        async with mesh(clock=clock) as m, raw(m) as agent:
            await agent.call.wait_for_connection()
            refused = asyncio.create_task(refusal(agent))
            while not refused.done():
                await clock.advance(6.1)
                await asyncio.sleep(0.01)
            assert isinstance(await refused, Expired)
            assert m.hub.attached() == ()


class TestReplacement:
    async def test_a_newer_session_replaces_the_older_whose_work_is_lost(self) -> None:
        async with mesh() as m, raw_attached(m) as old:
            port = m.hub.port("edge-1")
            run = asyncio.create_task(collect(port.run(run_order())))
            assert (await old.read()).HasField("run")
            first = m.hub.attached()[0].session_id
            async with raw(m) as new:
                second = (await new.hello()).lease.session_id
                assert isinstance(await error_of(run), LeaseLost)
                assert isinstance(await refusal(old), LeaseLost)
                assert [edge.session_id for edge in m.hub.attached()] == [second]
                assert first != second
                await old.close()
                again = asyncio.create_task(collect(port.run(run_order("b"))))
                assert (await new.read()).run.order.run_id == "b"
                again.cancel()

    async def test_two_boxes_with_one_certificate_slow_down_and_show(self) -> None:
        async with mesh() as m:
            one, two = m.site("edge-1"), m.site("edge-1")
            await one.agent.start()
            await two.agent.start()
            for site in (one, two):
                await eventually(lambda s=site: isinstance(s.agent.state.last_error, LeaseLost))  # type: ignore[misc]
            assert len(m.hub.attached()) <= 1


class TestRefusals:
    @pytest.mark.parametrize("role", [Role.CORE, Role.PLACEMENT])
    async def test_only_an_edge_certificate_may_attach(self, role: Role) -> None:
        async with mesh() as m:
            site = m.site("core-1", role=role)
            await site.agent.start()
            await eventually(lambda: isinstance(site.agent.state.last_error, PolicyDenied))
            assert m.hub.attached() == ()
            assert not site.agent.state.connected

    async def test_another_protocol_version(self) -> None:
        async with mesh() as m, raw(m) as agent:
            await agent.send(hello=uplink_pb2.AgentHello(protocol=2, build="newer"))
            error = await refusal(agent)
            assert isinstance(error, RevisionMismatch)
            assert "protocol 2" in error.message

    @pytest.mark.parametrize(
        ("hello", "code"),
        [
            ({"models": [admin_pb2.NodeModel()]}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"models": [admin_pb2.NodeModel(id="m")] * 65}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"clock_unix_s": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"load": node_pb2.NodeLoad(prefill_tokens_per_s=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"load": node_pb2.NodeLoad(decode_tokens_per_s=-1.0)}, grpc.StatusCode.INVALID_ARGUMENT),
        ],
    )
    async def test_a_hello_that_cannot_be(self, hello: dict[str, object], code: grpc.StatusCode) -> None:
        async with mesh() as m, raw(m) as agent:
            await agent.send(hello=uplink_pb2.AgentHello(protocol=1, **hello))  # type: ignore[arg-type]
            assert (await refusal(agent)).code.value == code.value[0]
            assert m.hub.attached() == ()

    @pytest.mark.parametrize(
        ("message", "code"),
        [
            ({}, grpc.StatusCode.FAILED_PRECONDITION),  # a kind that this build does not know looks like this
            ({"hello": uplink_pb2.AgentHello(protocol=1)}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"heartbeat": uplink_pb2.Heartbeat(sequence=0)}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"heartbeat": uplink_pb2.Heartbeat(sequence=1, rtt_s=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"heartbeat": uplink_pb2.Heartbeat(sequence=1, rtt_s=-1.0)}, grpc.StatusCode.INVALID_ARGUMENT),
        ],
    )
    async def test_a_message_that_breaks_the_protocol_ends_the_session(
        self, message: dict[str, object], code: grpc.StatusCode
    ) -> None:
        async with mesh() as m, raw_attached(m) as agent:
            run = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order())))
            assert (await agent.read()).HasField("run")
            await agent.send(**message)
            assert (await refusal(agent)).code.value == code.value[0]
            assert isinstance(await error_of(run), NodeUnreachable)
            assert m.hub.attached() == ()

    async def test_something_else_than_a_hello_first(self) -> None:
        async with mesh() as m, raw(m) as agent:
            await agent.send(heartbeat=uplink_pb2.Heartbeat(sequence=1))
            assert (await refusal(agent)).reason == "INVALID_REQUEST"

    async def test_nothing_first(self) -> None:
        async with mesh() as m, raw(m) as agent:
            await agent.call.done_writing()
            assert (await refusal(agent)).reason == "INVALID_REQUEST"


class TestOddAgents:
    async def test_words_about_unknown_orders_are_ignored(self) -> None:
        async with mesh() as m, raw_attached(m) as agent:
            event = node_pb2.RunEvent(tokens=node_pb2.NewTokens(ids=[1]))
            await agent.send(work_event=uplink_pb2.WorkEvent(work_id=99, event=event))
            await agent.send(work_result=uplink_pb2.WorkResult(work_id=99))
            await agent.send(command_result=uplink_pb2.CommandResult(command_id=99))
            await agent.send(heartbeat=uplink_pb2.Heartbeat(sequence=1))
            assert (await agent.read()).renewal.sequence == 1
            assert len(m.hub.attached()) == 1

    @pytest.mark.parametrize(
        ("result", "error"),
        [
            ({}, Internal),  # ended well, without a last event
            ({"error_reason": "A_WORD_OF_A_NEWER_BUILD", "error_message": "hm"}, Internal),
            ({"error_reason": "EXPIRED"}, Expired),
        ],
    )
    async def test_a_run_that_ends_oddly(self, result: dict[str, str], error: type[MeshError]) -> None:
        async with mesh() as m, raw_attached(m) as agent:
            run = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order())))
            work_id = (await agent.read()).run.work_id
            await agent.send(work_result=uplink_pb2.WorkResult(work_id=work_id, **result))  # type: ignore[arg-type]
            assert type(await error_of(run)) is error

    async def test_a_move_that_ends_without_a_report(self) -> None:
        async with mesh() as m, raw_attached(m) as agent:
            moving = asyncio.create_task(m.hub.port("edge-1").move_kv(kv_order()))
            await agent.send(work_result=uplink_pb2.WorkResult(work_id=(await agent.read()).move_kv.work_id))
            assert isinstance(await error_of(moving), Internal)

    async def test_an_event_of_an_unknown_kind_fails_its_run_alone(self) -> None:
        async with mesh() as m, raw_attached(m) as agent:
            run = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order())))
            work_id = (await agent.read()).run.work_id
            await agent.send(work_event=uplink_pb2.WorkEvent(work_id=work_id, event=node_pb2.RunEvent()))
            assert isinstance(await error_of(run), MeshError)
            assert (await agent.read()).cancel.work_id == work_id
            assert len(m.hub.attached()) == 1

    async def test_a_slow_agent_costs_the_hub_no_more_than_the_bound(self) -> None:
        limits = UplinkLimits(outbox_bytes=256 * 1024, max_open=60)
        clock = VirtualClock()
        async with mesh(limits=limits, clock=clock) as m, raw_attached(m):  # reads nothing more
            port = m.hub.port("edge-1")
            session = m.hub._sessions["edge-1"]
            runs = [asyncio.create_task(collect(port.run(run_order(f"run-{i}", prompt=50_000)))) for i in range(60)]
            await eventually(lambda: session.waiting_orders > 0)
            assert session.queued_bytes <= limits.outbox_bytes
            for run in runs[30:]:
                run.cancel()
            await asyncio.gather(*runs[30:], return_exceptions=True)
            assert session.open_orders == 30
            assert session.queued_bytes <= limits.outbox_bytes
            for version in range(1000):
                m.hub.push_snapshot(lambda _, v=version: admin_pb2.Snapshot(version=v))  # type: ignore[misc]
            await clock.advance(6.1)
            errors = await asyncio.gather(*(error_of(run) for run in runs[:30]))
            assert all(isinstance(error, NodeUnreachable) for error in errors)
            assert session.queued_bytes == 0
            assert session.open_orders == 0


class TestStop:
    async def test_stop_tells_the_hub_draining_for_what_runs(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            events = await running(m, site)
            await site.agent.stop()
            assert isinstance(await error_of(collect(events)), Draining)
            assert site.host.running == 0
            await eventually(lambda: m.hub.attached() == ())
            assert site.agent.state.last_error is None

    async def test_stop_twice_and_before_start(self) -> None:
        async with mesh() as m:
            never = m.site("edge-2")
            await never.agent.stop()
            site = await m.attach("edge-1")
            await site.agent.stop()
            await site.agent.stop()
            assert not site.agent.state.connected

    async def test_stop_of_a_half_open_link_does_not_hang(self) -> None:
        async with mesh() as m, behind_a_link(m) as (site, link):
            await running(m, site)
            link.stall()
            await site.agent.stop(timeout_s=0.1)
            assert site.host.running == 0
            link.resume()


async def test_a_finish_reason_of_a_newer_build_is_not_guessed_at() -> None:
    async with mesh() as m, raw_attached(m) as agent:
        run = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order())))
        work_id = (await agent.read()).run.work_id
        finished = node_pb2.RunFinished(reason=common_pb2.FINISH_REASON_UNSPECIFIED)
        event = node_pb2.RunEvent(finished=finished)
        await agent.send(work_event=uplink_pb2.WorkEvent(work_id=work_id, event=event))
        assert isinstance(await error_of(run), MeshError)


async def test_one_that_is_cut_off_while_it_says_hello_does_not_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh() as m, raw(m) as agent:
        greet = m.hub._greet

        async def slow(place: Place, requests: Any) -> Session:
            session = await greet(place, requests)
            del m.places["edge-1"]  # revoked meanwhile: no session was there to be ended
            return session

        monkeypatch.setattr(m.hub, "_greet", slow)
        await agent.send(hello=uplink_pb2.AgentHello(protocol=1, build="raw", clock_unix_s=1.0, models=[MODEL]))
        async with asyncio.timeout(10):
            assert isinstance(await refusal(agent), NotFound)
        assert m.hub.attached() == ()
