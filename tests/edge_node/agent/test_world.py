"""The mesh as an edge sees it: pushed, probed, aged; with placement gone, and with everything gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from edge_node.agent import world as world_module
from edge_node.agent.world import EdgeWorld
from mesh.errors import NodeUnreachable
from mesh.node.host import NodeHost
from mesh.node.local_port import LocalPort
from mesh.node.port import KvReport
from mesh.node.servicer import NodeServicer
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import node_pb2_grpc
from placement.decide.settings import DEFAULTS
from placement.entry import peers as peers_module
from placement.entry.mesh_view import NodeFacts, NodeState, to_wire
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import FakeGuard, FakeSigner
from tests.fakes.mesh import place_of, until
from tests.placement.entry.test_mesh_view import LOAD, MODEL

PARIS, CORE, LYON = place_of("paris"), place_of("core-1"), place_of("lyon")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(peers_module, "_BACKOFF_CAP_S", 0.1)


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        address, options=[("grpc.min_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
    )


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    engine = FakeEngine()
    host = NodeHost(engine, FakeSigner(PARIS), FakeGuard(), PARIS)
    made = EdgeWorld(
        own=LocalPort(host, lambda peer: channel(peer.address)), models=(MODEL,), load=await host.load(),
        dial=lambda peer: channel(peer.address),
    )  # fmt: skip
    yield made
    await made.close()
    await host.close()


@asynccontextmanager
async def core_node(address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    host = NodeHost(FakeEngine(), FakeSigner(CORE), FakeGuard(), CORE)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(host, lambda context: PARIS), server)
    port = server.add_insecure_port(address)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)
    await host.close()


def facts(address: str, **changes: object) -> NodeFacts:
    values: dict[str, object] = {
        "place": CORE, "address": address, "state": NodeState.READY, "models": (MODEL,), "load": LOAD, "age_s": 0.5,
    }  # fmt: skip
    return NodeFacts(**(values | changes))  # type: ignore[arg-type]


def pushed(*nodes: NodeFacts) -> admin.Snapshot:
    return to_wire(nodes, version=1, registry_age_s=0.0, made_unix_s=0.0)


def node(world: EdgeWorld, node_id: str) -> NodeFacts:
    return next(n for n in world.nodes() if n.place.node_id == node_id)


def age_by(monkeypatch: pytest.MonkeyPatch, world: EdgeWorld, seconds: float) -> None:
    """As if the last snapshot had come so long ago."""
    assert world._pushed_at_s is not None
    monkeypatch.setattr(world, "_pushed_at_s", world._pushed_at_s - seconds)


async def test_alone_it_has_itself(world: EdgeWorld) -> None:
    (own,) = world.nodes()
    assert (own.place, own.state, own.reachable, own.rtt_s, own.age_s) == (PARIS, NodeState.READY, True, 0.0, 0.0)
    snapshot = world.snapshot()
    assert (snapshot.entry_row, snapshot.n_nodes) == (0, 1)
    assert world.snapshot_age_s() > 1e6
    assert world.port("paris").place == PARIS
    with pytest.raises(NodeUnreachable):
        world.port("core-1")
    world.set_load(LOAD, draining=True)
    assert (world.nodes()[0].load, world.nodes()[0].draining) == (LOAD, True)


async def test_a_core_node_that_answers_is_ready(world: EdgeWorld) -> None:
    async with core_node() as address:
        world.set_snapshot(pushed(facts(address), facts("", place=PARIS, state=NodeState.DISCONNECTED)))
        assert not node(world, "core-1").reachable
        assert node(world, "core-1").state is NodeState.DISCONNECTED  # until its first answer
        await until(lambda: node(world, "core-1").reachable)
        core = node(world, "core-1")
        assert (core.state, core.load) == (NodeState.READY, LOAD)
        assert core.rtt_s is not None
        assert world.port("core-1").place == CORE
        assert node(world, "paris").state is NodeState.READY  # it knows better
        assert world.snapshot().n_nodes == 2
        wire = world.wire_snapshot()
        assert [n.node_id for n in wire.nodes] == ["core-1", "paris"]
    await until(lambda: not node(world, "core-1").reachable)
    assert node(world, "core-1").state is NodeState.DISCONNECTED


async def test_with_placement_gone_a_core_node_that_answers_stays_in_use(
    world: EdgeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core_node() as address:
        world.set_snapshot(pushed(facts(address)))
        await until(lambda: node(world, "core-1").reachable)
        age_by(monkeypatch, world, 3600.0)
        core = node(world, "core-1")
        assert core.state is NodeState.READY
        assert DEFAULTS.busy_after_s < core.age_s <= DEFAULTS.stale_after_s
        assert world.snapshot_age_s() >= 3600
    await until(lambda: not node(world, "core-1").reachable)
    assert node(world, "core-1").age_s > 3600


async def test_a_state_that_placement_cannot_correct_any_more_gives_way_to_our_own_probe(
    world: EdgeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core_node() as address:
        world.set_snapshot(pushed(facts(address, state=NodeState.DISCONNECTED)))
        await until(lambda: node(world, "core-1").reachable)
        assert node(world, "core-1").state is NodeState.DISCONNECTED  # placement knows why
        age_by(monkeypatch, world, world_module._SILENT_AFTER_S)
        assert node(world, "core-1").state is NodeState.READY
        world.set_snapshot(pushed(facts(address, state=NodeState.RETIRED)))
        age_by(monkeypatch, world, 60.0)
        assert node(world, "core-1").state is NodeState.RETIRED


async def test_nodes_without_a_way_there_are_unreachable(world: EdgeWorld) -> None:
    world.set_snapshot(pushed(facts("", place=replace(LYON, site="paris"))))
    other = node(world, "lyon")
    assert not other.reachable
    with pytest.raises(NodeUnreachable):
        world.port("lyon")


async def test_nodes_of_a_newer_kind_are_left_out(world: EdgeWorld) -> None:
    wire = pushed(facts("127.0.0.1:1"))
    wire.nodes[0].tier = "moon"
    world.set_snapshot(wire)
    assert [n.place.node_id for n in world.nodes()] == ["paris"]


async def test_a_core_node_that_moved_is_found_at_its_new_address(world: EdgeWorld) -> None:
    world.set_snapshot(pushed(facts("127.0.0.1:1")))
    async with core_node() as address:
        world.set_snapshot(pushed(facts(address)))
        await until(lambda: node(world, "core-1").reachable)


async def test_transfers_teach_the_link_s_goodput(world: EdgeWorld) -> None:
    async with core_node() as address:
        world.set_snapshot(pushed(facts(address)))
        await until(lambda: node(world, "core-1").goodput_bytes_per_s is not None)
        before = node(world, "core-1").goodput_bytes_per_s
        report = KvReport(
            transfer_id="t", tokens=1, skipped_tokens=0, wire_bytes=1 << 20, codec="f16", duration_s=1e-6,
            first_chunk_s=1e-6,
        )  # fmt: skip
        world.saw_transfer("core-1", "core-2", report)  # did not pass here
        assert node(world, "core-1").goodput_bytes_per_s == before
        world.saw_transfer("core-1", "paris", report)
        after = node(world, "core-1").goodput_bytes_per_s
        assert before is not None
        assert after is not None
        assert after > before


async def test_a_change_wakes_who_waits(world: EdgeWorld) -> None:
    version = world.snapshot().version
    world.set_snapshot(pushed())
    assert world.snapshot().version > version
    await world.changed(0.0)
