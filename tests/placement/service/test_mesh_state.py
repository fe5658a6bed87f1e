"""The placement service's view: a registry, core nodes that listen, edges that are attached, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest
from structlog.testing import capture_logs

from mesh import process
from mesh.errors import InvalidRequest, NodeUnreachable, Overloaded, UnknownNode
from mesh.identity.place import Place, Role
from mesh.node.host import NodeHost
from mesh.node.servicer import NodeServicer
from mesh.node.serving_role import ServingRole
from mesh.registry.types import Health, NodesView, Registration
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import node_pb2_grpc
from placement.entry import peers as peers_module
from placement.entry.mesh_view import NodeFacts, NodeState
from placement.service import mesh_state as mesh_state_module
from placement.service.mesh_state import MeshState
from placement.service.registrations import to_registration
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import FakeGuard, FakeSigner
from tests.fakes.mesh import until
from tests.mesh.rpc.uplink.harness import Mesh, mesh, place
from tests.placement.entry.test_mesh_view import MODEL
from tests.placement.service.registries import MoodyRegistry

PLACEMENT = place("placement-1", Role.PLACEMENT, "dc1")
CORE = place("core-1", Role.CORE, "dc1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(peers_module, "_BACKOFF_CAP_S", 0.1)
    monkeypatch.setattr(mesh_state_module, "_EDGE_BEAT_S", 0.02)
    monkeypatch.setattr(mesh_state_module, "_PUSH_EVERY_S", 0.02)
    monkeypatch.setattr(process, "_RESUME_AFTER_S", 0.02)


@pytest.fixture
async def uplinks() -> AsyncIterator[Mesh]:
    async with mesh(lease_s=2.0, heartbeat_s=0.05) as made:
        yield made


@pytest.fixture
async def state(registry: MoodyRegistry, uplinks: Mesh) -> AsyncIterator[MeshState]:
    made = MeshState(
        place=PLACEMENT, registry=registry, hub=uplinks.hub, dial=lambda peer: grpc.aio.insecure_channel(peer.address)
    )
    await made.start()
    yield made
    await made.close()


@asynccontextmanager
async def listening(at: Place = CORE) -> AsyncIterator[str]:
    """A core node's address."""
    host = NodeHost(FakeEngine(), FakeSigner(at), FakeGuard(), at)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(host, lambda context: PLACEMENT), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)
    await host.close()


async def join(registry: MoodyRegistry, at: Place, address: str, ttl_s: float = 60.0) -> None:
    await registry.register(to_registration(at, address, (MODEL,), ttl_s=ttl_s))
    await registry.heartbeat(at.node_id, ready=True)


def node(state: MeshState, node_id: str) -> NodeFacts | None:
    return next((n for n in state.nodes() if n.place.node_id == node_id), None)


def is_in(state: MeshState, node_id: str, wanted: NodeState) -> Callable[[], bool]:
    def ask() -> bool:
        found = node(state, node_id)
        return found is not None and found.state is wanted

    return ask


async def test_a_core_node_is_ready_when_it_answers(registry: MoodyRegistry, state: MeshState) -> None:
    async with listening() as address:
        await join(registry, CORE, address)
        await until(is_in(state, "core-1", NodeState.READY))
        found = node(state, "core-1")
        assert found is not None
        assert (found.address, found.reachable, found.models) == (address, True, (MODEL,))
        assert found.age_s < 5
        snapshot = state.snapshot()
        assert (snapshot.entry_row, snapshot.n_nodes, snapshot.ready.tolist()) == (-1, 1, [True])
        assert state.port("core-1").place == CORE
        assert state.snapshot_age_s() < 10
        await registry.heartbeat("core-1", ready=False)
        await until(is_in(state, "core-1", NodeState.DISCONNECTED))
        await registry.heartbeat("core-1", ready=True)
        await until(is_in(state, "core-1", NodeState.READY))
    await until(is_in(state, "core-1", NodeState.DISCONNECTED))  # silent, and not deleted
    assert not state.snapshot().reachable[0]


async def test_an_operator_gives_a_core_node_its_role(registry: MoodyRegistry, state: MeshState) -> None:
    async with listening() as address:
        await join(registry, CORE, address)
        await until(is_in(state, "core-1", NodeState.READY))
        assert await state.set_role("core-1", ServingRole.PREFILL) is ServingRole.BOTH
        await until(lambda: not state.snapshot().decodes[0])  # as the node itself says
        assert state.snapshot().prefills[0]
        assert state.wire_snapshot().nodes[0].role == "prefill"
        with pytest.raises(UnknownNode):
            await state.set_role("core-9", ServingRole.BOTH)
        await state._registry.register(to_registration(place("paris-1", Role.EDGE, "paris"), "", (MODEL,), ttl_s=60.0))
        await until(lambda: node(state, "paris-1") is not None)
        with pytest.raises(InvalidRequest, match="edge node"):
            await state.set_role("paris-1", ServingRole.DECODE)
    with pytest.raises(NodeUnreachable):
        await state.set_role("core-1", ServingRole.BOTH)


async def test_a_registered_node_that_does_not_answer_is_disconnected(
    registry: MoodyRegistry, state: MeshState
) -> None:
    await join(registry, CORE, "127.0.0.1:1")
    await until(is_in(state, "core-1", NodeState.DISCONNECTED))
    assert state.nodes()[0].age_s > 1e6


async def test_what_cannot_be_read_is_left_out(registry: MoodyRegistry, state: MeshState) -> None:
    await registry.register(Registration(node_id="odd", address="a:1", meta={"place": "nonsense"}))
    await registry.register(to_registration(replace(CORE, mesh="other", node_id="alien"), "a:1", (), ttl_s=9.0))
    await registry.register(to_registration(PLACEMENT, "a:1", (), ttl_s=9.0))
    await join(registry, CORE, "127.0.0.1:1")
    await until(lambda: node(state, "core-1") is not None)
    assert [n.place.node_id for n in state.nodes()] == ["core-1"]


async def test_an_edge_is_attached_registered_and_remembered(
    registry: MoodyRegistry, uplinks: Mesh, state: MeshState
) -> None:
    site = await uplinks.attach("edge-1")
    found = node(state, "edge-1")
    assert found is not None
    assert (found.state, found.address, [m.model_id for m in found.models]) == (NodeState.READY, "", ["smol"])
    assert state.port("edge-1").place.node_id == "edge-1"
    await until(lambda: any(n.health is Health.PASSING for n in registry._nodes))
    await site.agent.stop()
    await until(is_in(state, "edge-1", NodeState.DISCONNECTED))
    await until(lambda: all(n.health is Health.CRITICAL for n in registry._nodes))
    with pytest.raises(NodeUnreachable):
        state.port("edge-1")


async def test_a_site_sees_the_core_and_itself(registry: MoodyRegistry, uplinks: Mesh, state: MeshState) -> None:
    await uplinks.attach("edge-1")
    await uplinks.attach("edge-2")
    await join(registry, CORE, "127.0.0.1:1")
    await until(lambda: len(state.nodes()) == 3)
    own = place("edge-1")
    assert [n.node_id for n in state.snapshot_for(own).nodes] == ["core-1", "edge-1", "edge-2"]  # both are at paris
    elsewhere = replace(own, site="osaka")
    assert [n.node_id for n in state.snapshot_for(elsewhere).nodes] == ["core-1"]
    assert len(state.wire_snapshot().nodes) == 3


async def test_trouble_with_one_edge_s_registration_does_not_stop_the_others(
    registry: MoodyRegistry, uplinks: Mesh, state: MeshState, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = registry.register

    async def picky(registration: Registration) -> None:
        if registration.node_id == "edge-1":
            raise Overloaded("the disk is full")
        await register(registration)

    monkeypatch.setattr(registry, "register", picky)
    await uplinks.attach("edge-1")
    await uplinks.attach("edge-2")
    await until(lambda: [n.registration.node_id for n in registry._nodes] == ["edge-2"])
    monkeypatch.setattr(registry, "register", register)
    await until(lambda: len(registry._nodes) == 2)


async def test_a_bad_figure_leaves_its_node_out_and_snapshots_go_on(
    registry: MoodyRegistry, uplinks: Mesh, state: MeshState
) -> None:
    site = await uplinks.attach("edge-1")
    bad = to_registration(replace(CORE, node_id="core-2"), "127.0.0.1:1", (MODEL,), ttl_s=60.0)
    await registry.register(replace(bad, meta={**bad.meta, "model-0-max_context_tokens": "9" * 25}))
    await join(registry, CORE, "127.0.0.1:1")
    await until(lambda: {n.node_id for n in state.wire_snapshot().nodes} == {"core-1", "edge-1"})
    told = len(site.snapshots)
    await until(lambda: len(site.snapshots) > told + 1)


async def test_no_loop_ends_for_good_of_one_error(
    registry: MoodyRegistry, uplinks: Mesh, state: MeshState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in any of them is logged with its trace, and the loop goes on when it is over."""
    left = dict.fromkeys(("_to_wire", "_read", "_register_edge", "_changed"), 2)
    raised: set[str] = set()

    def breaking(name: str) -> Callable[..., object]:
        real = getattr(state, name)

        def call(*args: object) -> object:
            if left[name] > 0:
                left[name] -= 1
                raised.add(name)
                raise TypeError(name)
            return real(*args)

        return call

    for name in left:
        monkeypatch.setattr(state, name, breaking(name))
    with capture_logs() as lines:
        site = await uplinks.attach("edge-1")
        await join(registry, CORE, "127.0.0.1:1")
        await until(lambda: not any(left.values()))
        await until(lambda: any(n.registration.node_id == "edge-1" for n in registry._nodes))
        await until(lambda: node(state, "core-1") is not None)
        told = len(site.snapshots)
        await until(lambda: len(site.snapshots) > told + 1)
    assert raised == left.keys()
    assert all(isinstance(line["exc_info"], TypeError) for line in lines if line["event"] == "background_loop_failed")
    assert all(not task.done() for task in state._tasks)


async def test_a_registry_that_is_gone_and_one_that_forgot(
    registry: MoodyRegistry, uplinks: Mesh, state: MeshState
) -> None:
    await uplinks.attach("edge-1")
    await until(lambda: len(registry._nodes) == 1)
    registry.trouble = NodeUnreachable("gone")
    await asyncio.sleep(0.1)
    assert is_in(state, "edge-1", NodeState.READY)()
    registry.trouble = None
    await registry.lose_everything()
    await until(lambda: len(registry._nodes) == 1 and registry._nodes[0].health is Health.PASSING)


async def test_changes_wake_who_waits(uplinks: Mesh, state: MeshState) -> None:
    waiting = asyncio.create_task(state.changed(30.0))
    await asyncio.sleep(0)
    await uplinks.attach("edge-1")
    async with asyncio.timeout(5):
        await waiting
    await state.changed(0.0)


async def test_sites_are_told_nothing_before_the_registry_was_heard(uplinks: Mesh) -> None:
    heard = asyncio.Event()

    class Mute(MoodyRegistry):
        async def watch(self) -> AsyncIterator[NodesView]:
            await heard.wait()
            async for view in super().watch():
                yield view

    registry = Mute()
    await registry.start()
    state = MeshState(
        place=PLACEMENT, registry=registry, hub=uplinks.hub, dial=lambda peer: grpc.aio.insecure_channel(peer.address)
    )
    await state.start()
    site = await uplinks.attach("edge-1")
    await asyncio.sleep(0.1)
    assert site.snapshots == []
    assert state.snapshot_age_s() > 1e6
    heard.set()
    await until(lambda: site.snapshots != [])
    await state.close()
    await registry.close()


async def test_nodes_are_read_once_for_a_push_to_any_number_of_sites(
    registry: MoodyRegistry, state: MeshState, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        await join(registry, place(f"edge-{i}", Role.EDGE, f"site-{i}"), "")
    await until(lambda: len(state.nodes()) == 20)
    read: list[str] = []
    inner = state._node
    monkeypatch.setattr(state, "_node", lambda node_id: read.append(node_id) or inner(node_id))
    together = state._snapshots()
    for i in range(20):
        assert [n.node_id for n in together.of(f"site-{i}").nodes] == [f"edge-{i}"]
    assert len(read) == 20
