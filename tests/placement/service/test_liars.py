"""A node that registers a place which its certificate does not have, and clocks that jump."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog
from mesh.audit.verify import verify_log
from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place, Role
from mesh.identity.signing import NodeIdentity
from mesh.node.host import NodeHost
from mesh.node.servicer import NodeServicer
from mesh.rpc.channel import node_channel
from mesh.rpc.peer import peer_place
from mesh.rpc.server import node_server
from mesh.v1 import node_pb2_grpc
from placement.entry import peers as peers_module
from placement.entry.mesh_view import NodeState
from placement.service import stores
from placement.service.mesh_state import MeshState
from placement.service.stores import PolicyStore
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import FakeGuard
from tests.fakes.mesh import until
from tests.mesh.rpc.uplink.harness import mesh, place
from tests.placement.service.registries import MoodyRegistry
from tests.placement.service.test_mesh_state import is_in, join


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path / "ca", place("a").mesh)


async def test_a_node_that_lies_about_its_site_gets_no_work(
    registry: MoodyRegistry, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(peers_module, "_BACKOFF_CAP_S", 0.1)
    honest, us = place("core-1", Role.CORE, "dc1"), place("placement-1", Role.PLACEMENT, "dc1")
    lie = replace(honest, site="paris", jurisdiction="FR")
    own, ours = authority.issue(honest), authority.issue(us)
    listener = node_server("127.0.0.1:0", own)
    host = NodeHost(FakeEngine(), NodeIdentity(honest, own), FakeGuard(), honest)
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(host, peer_place), listener.server)
    await listener.server.start()
    failed: list[Place] = []
    inner: Callable[..., None] = peers_module.PeerLink._failed

    def note(link: peers_module.PeerLink, error: Exception) -> None:
        failed.append(link.peer.place)
        inner(link, error)

    monkeypatch.setattr(peers_module.PeerLink, "_failed", note)
    async with mesh(lease_s=2.0, heartbeat_s=0.05) as uplinks:
        state = MeshState(
            place=us, registry=registry, hub=uplinks.hub, dial=lambda peer: node_channel(peer.address, ours, peer.place)
        )
        await state.start()
        await join(registry, lie, listener.address)
        await until(lambda: failed.count(lie) >= 3)
        assert not state.snapshot().ready.any()
        await join(registry, honest, listener.address)
        await until(is_in(state, "core-1", NodeState.READY))
        await state.close()
    await listener.server.stop(0)
    await host.close()


async def test_a_clock_that_jumps_breaks_no_chain(authority: CertificateAuthority, tmp_path: Path) -> None:
    us = place("placement-1", Role.PLACEMENT, "dc1")
    now_s = [time.time()]
    log = AuditLog(tmp_path / "audit", NodeIdentity(us, authority.issue(us)), now=lambda: now_s[0])
    for jump_s in (0.0, 86_400.0, -86_400.0, 30.0):
        now_s[0] += jump_s
        await log.append(EntryKind.ADMIN, {"actor": {"key_id": "k"}, "action": "policy.put"})
    await log.close()
    report = verify_log(tmp_path / "audit", authority.ca_pem)
    assert (report.problems, report.n_entries) == ([], 6)


async def test_versions_are_ordered_by_the_registry_and_not_by_clocks(
    registry: MoodyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = PolicyStore(registry, lambda: None), PolicyStore(registry, lambda: None)
    for store in (one, two):
        await store.start()
    for at_s, store in ((2_000_000_000.0, one), (1_000_000_000.0, two)):
        monkeypatch.setattr(stores.time, "time", lambda at_s=at_s: at_s)
        await store.put("acme", f"version: 1\npriority: {1 if store is one else 2}", None)
    newest, older = await one.history("acme")
    assert (newest.version, older.version) == (2, 1)
    assert newest.stored_unix_s < older.stored_unix_s
    await until(lambda: one.stored[0].version == two.stored[0].version == 2)
    for store in (one, two):
        await store.close()
