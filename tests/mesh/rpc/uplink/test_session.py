"""Runs, moves, cancels and pushes over a real gRPC stream on loopback."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import (
    Draining,
    Expired,
    Internal,
    InvalidRequest,
    KvIncompatible,
    LeaseLost,
    NodeUnreachable,
    NotFound,
    NotImplementedHere,
    Overloaded,
    PolicyDenied,
    StalePlan,
)
from mesh.node.engine import RunId
from mesh.node.port import PortFinished, PortHeld, PortPrefilled, PortTokens, RunOrder
from mesh.rpc.uplink.types import AgentFacts, UplinkLimits
from mesh.v1 import admin_pb2, uplink_pb2
from tests.mesh.rpc.uplink.harness import (
    LEG,
    REPORT,
    FakeHost,
    collect,
    error_of,
    eventually,
    kv_order,
    mesh,
    place,
    run_order,
)


def migrate() -> uplink_pb2.Command:
    return uplink_pb2.Command(migrate=admin_pb2.MigrateRequest(request_id="request", tier="core"))


class TestAttach:
    async def test_the_hub_sees_who_attached_and_what_it_serves(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            await eventually(lambda: m.hub.attached()[0].rtt_s is None or True)
            (edge,) = m.hub.attached()
            assert edge.place == place("edge-1")
            assert [model.id for model in edge.models] == ["smol"]
            assert edge.load.kv_capacity_tokens == 4096
            assert not edge.draining
            assert site.agent.state.connected
            assert site.agent.state.session_id == edge.session_id

    async def test_models_that_change_are_told_in_the_running_session_and_after_it(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            session_id = site.agent.state.session_id
            facts = AgentFacts(
                build="b", models=(admin_pb2.NodeModel(id="smol", codecs=[admin_pb2.KvCodec(name="x")]),)
            )
            site.agent.set_facts(facts)
            await eventually(lambda: m.hub.attached()[0].models == facts.models)
            assert site.agent.state.session_id == session_id

    async def test_a_port_of_a_node_that_is_not_attached_is_refused(self) -> None:
        async with mesh() as m:
            with pytest.raises(NodeUnreachable, match="edge-9"):
                m.hub.port("edge-9")

    async def test_watch_shows_attach_and_detach(self) -> None:
        async with mesh() as m:
            views = m.hub.watch()
            assert await anext(views) == ()
            site = await m.attach("edge-1")
            while not (view := await anext(views)):
                pass
            assert view[0].place.node_id == "edge-1"
            await site.agent.stop()
            while await anext(views):
                pass
            await views.aclose()  # type: ignore[attr-defined]

    async def test_two_hundred_agents_attach_and_work(self) -> None:
        async with mesh() as m:
            sites = [m.site(f"edge-{i:03}") for i in range(200)]
            for site in sites:
                await site.agent.start()
            await asyncio.gather(*(site.agent.wait_connected() for site in sites))
            await eventually(lambda: len(m.hub.attached()) == 200)
            ports = [m.hub.port(edge.place.node_id) for edge in m.hub.attached()]
            runs = await asyncio.gather(*(collect(port.run(run_order())) for port in ports))
            assert all(isinstance(events[-1], PortFinished) for events in runs)


class TestRuns:
    async def test_events_arrive_in_order_and_end_with_the_last(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            order = run_order(max_tokens=5)
            events = await collect(m.hub.port("edge-1").run(order))
            assert events[0] == PortPrefilled(tokens=3, cached_tokens=1)
            assert [e.ids for e in events if isinstance(e, PortTokens)] == [(0,), (1,), (2,), (3,), (4,)]
            assert isinstance(events[-1], PortFinished)
            assert events[-1].leg == LEG
            assert site.host.orders == [order]
            await eventually(lambda: site.host.running == 0)
            assert site.host.cancelled == []

    async def test_a_prefill_ends_in_a_hold(self) -> None:
        async with mesh() as m:
            await m.attach("edge-1")
            order = run_order()
            order = RunOrder(
                context=order.context,
                run_id=order.run_id,
                token_ids=order.token_ids,
                prompt_tokens=3,
                sampling=order.sampling,
                prefill_only=True,
            )
            events = await collect(m.hub.port("edge-1").run(order))
            assert events[-1] == PortHeld(kv_tokens=3, leg=LEG)

    async def test_many_runs_share_a_session(self) -> None:
        async with mesh() as m:
            await m.attach("edge-1")
            port = m.hub.port("edge-1")
            runs = await asyncio.gather(
                *(collect(port.run(run_order(f"run-{i}", max_tokens=i + 1))) for i in range(64))
            )
            for i, events in enumerate(runs):
                ids = [token for e in events if isinstance(e, PortTokens) for token in e.ids]
                assert ids == list(range(i + 1))

    async def test_closing_the_iterator_cancels_at_the_node(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            site.host.gate.clear()
            events = m.hub.port("edge-1").run(run_order("a"))
            assert isinstance(await anext(events), PortPrefilled)
            await events.aclose()  # type: ignore[attr-defined]
            await site.host.until(lambda: site.host.cancelled == ["a"])
            assert site.host.running == 0
            site.host.gate.set()
            assert isinstance((await collect(m.hub.port("edge-1").run(run_order("b"))))[-1], PortFinished)

    async def test_cancelling_the_reader_cancels_at_the_node(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            site.host.gate.clear()
            reader = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order("a"))))
            await site.host.until(lambda: site.host.started == ["a"])
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await site.host.until(lambda: site.host.cancelled == ["a"])

    @pytest.mark.parametrize(
        "error",
        [
            NotFound("no such hold"),
            Overloaded("KV pool is full"),
            PolicyDenied("not here"),
            Expired("too late"),
            Draining("going down"),
        ],
    )
    async def test_an_error_of_the_node_arrives_as_itself_behind_the_events(self, error: Exception) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            site.host.fail = error
            events = m.hub.port("edge-1").run(run_order())
            assert isinstance(await anext(events), PortPrefilled)
            with pytest.raises(type(error), match=str(error)):
                await anext(events)

    async def test_a_bug_at_the_node_is_internal_and_tells_no_more(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            site.host.fail = RuntimeError("secret of the prompt")
            error = await error_of(collect(m.hub.port("edge-1").run(run_order())))
            assert isinstance(error, Internal)
            assert "secret" not in error.message
            site.host.fail = None
            assert await collect(m.hub.port("edge-1").run(run_order()))

    async def test_an_order_over_the_message_limit_is_refused_before_it_is_sent(self) -> None:
        async with mesh(limits=UplinkLimits(message_bytes=1000)) as m:
            site = await m.attach("edge-1")
            with pytest.raises(InvalidRequest, match="limit"):
                await collect(m.hub.port("edge-1").run(run_order(prompt=5000)))
            assert site.host.orders == []

    async def test_open_orders_are_bounded(self) -> None:
        async with mesh(limits=UplinkLimits(max_open=2)) as m:
            site = await m.attach("edge-1")
            site.host.gate.clear()
            port = m.hub.port("edge-1")
            open_runs = [port.run(run_order(f"run-{i}")) for i in range(2)]
            for events in open_runs:
                await anext(events)
            with pytest.raises(Overloaded, match="edge-1"):
                await collect(port.run(run_order("one too many")))
            for events in open_runs:
                await events.aclose()  # type: ignore[attr-defined]

    async def test_a_slow_reader_fails_alone_and_its_run_stops(self) -> None:
        async with mesh(limits=UplinkLimits(unread_bytes=20_000)) as m:
            site = await m.attach("edge-1")
            port = m.hub.port("edge-1")
            slow = port.run(run_order("slow", max_tokens=1_000_000))
            await anext(slow)
            await site.host.until(lambda: site.host.cancelled == ["slow"])
            assert site.host.events_made < 100_000
            assert isinstance((await collect(port.run(run_order("quick"))))[-1], PortFinished)
            with pytest.raises(Overloaded, match="behind"):
                await collect(slow)

    async def test_a_node_that_moved_is_not_used_under_an_old_plan(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            port = m.hub.port("edge-1")
            await site.agent.stop()
            again = m.site("edge-1")
            m.places["edge-1"] = place("edge-1", site="osaka")
            await again.agent.start()
            await again.agent.wait_connected()
            await eventually(lambda: [e.place.site for e in m.hub.attached()] == ["osaka"])
            with pytest.raises(StalePlan, match="osaka"):
                await collect(port.run(run_order()))


class TestMoves:
    async def test_a_move_brings_its_report(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            assert await m.hub.port("edge-1").move_kv(kv_order()) == REPORT
            assert site.host.moves == [kv_order()]

    async def test_a_failed_move_raises_the_nodes_error(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            site.host.fail = KvIncompatible("another layout")
            with pytest.raises(KvIncompatible, match="another layout"):
                await m.hub.port("edge-1").move_kv(kv_order())

    async def test_cancelling_a_move_cancels_it_at_the_node(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            site.host.gate.clear()
            moving = asyncio.create_task(m.hub.port("edge-1").move_kv(kv_order("t")))
            await site.host.until(lambda: site.host.started == ["t"])
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            await site.host.until(lambda: site.host.cancelled == ["t"])

    async def test_release_reaches_the_node(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            await m.hub.port("edge-1").release(RunId("hold"))
            await site.host.until(lambda: site.host.released == ["hold"])

    async def test_release_at_a_node_that_is_gone_does_nothing(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            port = m.hub.port("edge-1")
            await site.agent.stop()
            await eventually(lambda: m.hub.attached() == ())
            await port.release(RunId("hold"))


class TestPushes:
    async def test_config_and_snapshot_arrive_in_order_at_those_attached_and_those_to_come(self) -> None:
        async with mesh() as m:
            early = await m.attach("edge-1")
            for version in range(1, 6):
                m.hub.push_config(lambda _, v=version: uplink_pb2.SiteConfig(version=v))  # type: ignore[misc]
                m.hub.push_snapshot(lambda _, v=version: admin_pb2.Snapshot(version=v))  # type: ignore[misc]
                await eventually(lambda v=version: early.configs[-1:] == [v] and early.snapshots[-1:] == [v])  # type: ignore[misc]
            late = await m.attach("edge-2")
            await eventually(lambda: late.configs == [5] and late.snapshots == [5])
            assert early.configs == early.snapshots == [1, 2, 3, 4, 5]

    async def test_each_site_gets_its_own(self) -> None:
        async with mesh() as m:
            one, two = await m.attach("edge-1"), await m.attach("edge-2")
            m.hub.push_config(lambda p: uplink_pb2.SiteConfig(version=int(p.node_id[-1])))
            await eventually(lambda: one.configs == [1] and two.configs == [2])

    async def test_a_slow_site_skips_to_the_latest_and_keeps_its_lease(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            busy = asyncio.Event()

            async def write_to_disk(_: uplink_pb2.SiteConfig) -> None:
                await busy.wait()

            site.on_config = write_to_disk
            for version in range(1, 101):
                m.hub.push_config(lambda _, v=version: uplink_pb2.SiteConfig(version=v))  # type: ignore[misc]
                await asyncio.sleep(0)
            await eventually(lambda: len(site.configs) == 1)
            assert isinstance((await collect(m.hub.port("edge-1").run(run_order())))[-1], PortFinished)
            busy.set()
            await eventually(lambda: site.configs[-1] == 100)
            assert site.configs == sorted(site.configs)
            assert len(site.configs) < 10

    async def test_a_site_that_cannot_take_its_policies_is_not_attached(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")

            async def disk_full(_: uplink_pb2.SiteConfig) -> None:
                raise Overloaded("no room in the state folder")

            site.on_config = disk_full
            first = site.agent.state.session_id
            m.hub.push_config(lambda _: uplink_pb2.SiteConfig(version=1))
            await eventually(lambda: isinstance(site.agent.state.last_error, Overloaded))
            site.on_config = None
            await eventually(lambda: site.agent.state.session_id not in ("", first))


class TestCommands:
    async def test_round_trip(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")
            result = await m.hub.command("edge-1", migrate())
            assert result.migrate.to_node_id == "core-1"
            assert site.commands[0].migrate.tier == "core"

    async def test_the_agents_refusal_is_raised(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")

            async def refuse(_: uplink_pb2.Command) -> uplink_pb2.CommandResult:
                raise NotImplementedHere("not by this agent")

            site.on_command = refuse
            with pytest.raises(NotImplementedHere, match="not by this agent"):
                await m.hub.command("edge-1", migrate())

    async def test_no_answer_in_time_is_expired(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")

            async def hang(_: uplink_pb2.Command) -> uplink_pb2.CommandResult:
                await asyncio.Event().wait()
                raise AssertionError

            site.on_command = hang
            with pytest.raises(Expired, match="edge-1"):
                await m.hub.command("edge-1", migrate(), timeout_s=0.05)

    async def test_to_nobody(self) -> None:
        async with mesh() as m:
            with pytest.raises(NodeUnreachable):
                await m.hub.command("edge-1", migrate())

    async def test_a_bug_in_the_agent_is_internal(self) -> None:
        async with mesh() as m:
            site = await m.attach("edge-1")

            async def bug(_: uplink_pb2.Command) -> uplink_pb2.CommandResult:
                raise RuntimeError("bug")

            site.on_command = bug
            with pytest.raises(Internal):
                await m.hub.command("edge-1", migrate())


async def test_load_and_draining_reach_the_hub() -> None:
    async with mesh(lease_s=1.0, heartbeat_s=0.05) as m:
        site = await m.attach("edge-1")
        site.host.gate.clear()
        events = m.hub.port("edge-1").run(run_order())
        await anext(events)
        site.host.draining = True
        await eventually(lambda: m.hub.attached()[0].load.running == 1)
        await eventually(lambda: m.hub.attached()[0].draining)
        await eventually(lambda: m.hub.attached()[0].rtt_s is not None)
        assert m.hub.attached()[0].age_s < 1.0
        await events.aclose()  # type: ignore[attr-defined]


async def test_figures_grow_old_while_the_engine_does_not_tell() -> None:
    async with mesh(lease_s=1.0, heartbeat_s=0.05) as m:
        site = await m.attach("edge-1")

        async def hang() -> None:
            await asyncio.Event().wait()

        site.host.load = hang  # type: ignore[assignment,method-assign]
        await eventually(lambda: m.hub.attached() != () and m.hub.attached()[0].age_s > 1.2)
        assert site.agent.state.connected


async def test_what_a_session_holds_is_gone_when_it_ends() -> None:
    async with mesh() as m:
        site = await m.attach("edge-1")
        site.host.gate.clear()
        events = m.hub.port("edge-1").run(run_order("a"))
        await anext(events)
        await site.agent.stop()
        error = await error_of(collect(events))
        assert isinstance(error, Draining | NodeUnreachable | LeaseLost)
        assert site.host.running == 0
        assert isinstance(site.host, FakeHost)
