"""What placement sends over the uplink, and what the node behind it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_node.agent.process import _OwnRequests, _Pushes, _SiteHost
from edge_node.agent.site_config import SiteConfig
from edge_node.agent.world import EdgeWorld
from mesh.errors import NotFound, NotImplementedHere
from mesh.node.local_port import LocalPort
from mesh.rpc.channel import public_channel
from mesh.v1 import admin_pb2, uplink_pb2
from placement.entry.mesh_view import NodeFacts, NodeState, to_wire
from tests.fakes.mesh import MemoryMesh, ask, asking, place_of, principal, request_of
from tests.placement.entry.test_mesh_view import MODEL

UNASKED: Any = None


class Attendant:
    def __init__(self) -> None:
        self.tickets: list[bytes] = []

    def attend(self, ticket: bytes) -> None:
        self.tickets.append(ticket)


@pytest.fixture
async def pushes(tmp_path: Path) -> _Pushes:
    mesh = MemoryMesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    host = mesh.nodes["paris"].host
    own = LocalPort(host, lambda peer: public_channel(peer.address))
    world = EdgeWorld(own=own, models=(MODEL,), load=await host.load(), dial=lambda peer: public_channel(peer.address))
    attendant = Attendant()
    file = SiteConfig(tmp_path / "site_config.bin")
    requests = _OwnRequests(mesh.door, world, "paris")
    made = _Pushes(file, world, mesh.door, UNASKED, attendant, requests, UNASKED)  # type: ignore[arg-type]
    made.mesh, made.attendant = mesh, attendant  # type: ignore[attr-defined]
    return made


def move(request_id: str, tenant: str = "") -> uplink_pb2.Command:
    request = admin_pb2.MigrateRequest(request_id=request_id, tier="core")
    return uplink_pb2.Command(command_id=7, migrate=request, tenant=tenant)


async def test_configuration_and_snapshot_are_taken(pushes: _Pushes) -> None:
    await pushes.config(uplink_pb2.SiteConfig(version=4))
    assert pushes._site.version == 4
    await pushes.snapshot(admin_pb2.Snapshot(version=1))
    assert pushes._world.snapshot_age_s() < 60


@pytest.mark.parametrize(("tenant", "allowed"), [("", True), ("acme", True), ("rival", False)])
async def test_a_command_moves_a_request_of_its_tenant(pushes: _Pushes, tenant: str, allowed: bool) -> None:
    mesh: MemoryMesh = pushes.mesh  # type: ignore[attr-defined]
    async with asking(mesh.door, request_of(shape=1, max_tokens=300), tokens=3) as (answer, task):
        if allowed:
            result = await pushes.command(move(answer.request_id, tenant))
            assert (result.command_id, result.migrate.to_node_id) == (7, "core-1")
            await task
            assert [m.cause for m in answer.migrations] == ["operator"]
        else:
            with pytest.raises(NotFound):
                await pushes.command(move(answer.request_id, tenant))
    await mesh.close()


async def test_a_command_to_come_to_the_relay(pushes: _Pushes) -> None:
    command = uplink_pb2.Command(command_id=3, attend=uplink_pb2.RelayAttend(ticket=b"t"))
    assert (await pushes.command(command)).command_id == 3
    assert pushes.attendant.tickets == [b"t"]  # type: ignore[attr-defined]


async def test_a_node_of_another_site_is_seen_only_when_it_is_asked_for(pushes: _Pushes) -> None:
    mesh: MemoryMesh = pushes.mesh  # type: ignore[attr-defined]
    facts = NodeFacts(place=place_of("osaka"), address="", state=NodeState.READY, models=(MODEL,))
    (view,) = to_wire([facts], version=1, registry_age_s=0.0, made_unix_s=0.0).nodes
    command = move("paris:unknown")
    command.target.CopyFrom(view)
    with pytest.raises(NotFound):
        await pushes.command(command)
    world = pushes._world
    assert world.snapshot().row_of("osaka") == -1
    assert world.snapshot_with("core-1").row_of("osaka") == -1
    assert world.snapshot_with("osaka").row_of("osaka") >= 0
    await mesh.close()


async def test_an_unknown_command_is_not_implemented(pushes: _Pushes) -> None:
    with pytest.raises(NotImplementedHere):
        await pushes.command(uplink_pb2.Command(command_id=1))


async def test_an_edge_moves_its_own_requests_only(pushes: _Pushes) -> None:
    with pytest.raises(NotFound):
        await pushes._requests.migrate(principal(), admin_pb2.MigrateRequest(request_id="osaka:1", tier="core"))


async def test_the_node_drains_as_soon_as_its_entry_does() -> None:
    mesh = MemoryMesh("paris", entry="paris")
    host = mesh.nodes["paris"].host
    site_host = _SiteHost(host, LocalPort(host, lambda peer: public_channel(peer.address)), mesh.door)
    assert not site_host.draining
    await ask(mesh.door, request_of())
    await mesh.door.drain(0.0)
    assert site_host.draining
    assert not host.draining  # what is on its way is still taken
    assert (await site_host.load()).running == 0


async def test_placement_is_told_the_requests_that_run_here(pushes: _Pushes) -> None:
    mesh: MemoryMesh = pushes.mesh  # type: ignore[attr-defined]
    async with asking(mesh.door, request_of(shape=1, max_tokens=300), tokens=3) as (answer, task):
        command = uplink_pb2.Command(command_id=5, list_requests=admin_pb2.ListRequestsRequest())
        (told,) = (await pushes.command(command)).requests.requests
        assert (told.request_id, told.entry_node_id, told.node_id) == (answer.request_id, "paris", "paris")
        await task
    await mesh.close()
