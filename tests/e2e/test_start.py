"""Single processes in a bad place: ports taken, certificates that expired, disks that are full."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import pytest

from mesh.address import HostPort
from mesh.client import MeshClient
from mesh.configfile import to_yaml
from mesh.errors import MeshError, Overloaded
from mesh.identity.ca import CertificateAuthority
from mesh.identity.files import make_private_folder
from mesh.local.commands import make_plan
from mesh.local.layout import MESH, LocalPlan
from mesh.local.process import NodeProcess
from mesh.model.catalogue import DEMO_MODEL
from mesh.rpc.channel import node_channel
from mesh.rpc.errors import translate_rpc_errors
from mesh.v1 import registry_pb2, registry_pb2_grpc
from tests.e2e.running_mesh import KVMESH, POLICY, RunningMesh

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
LONG_AGO = datetime.now(UTC) - timedelta(days=30)


class Box:
    """One machine: the identity and settings of one node, and its process."""

    def __init__(self, folder: Path, node_id: str, placement: HostPort | None = None) -> None:
        self.plan: LocalPlan = make_plan(core=1, edge="paris", state=folder, model=DEMO_MODEL, device="cpu")
        self.place = next(p for p in self.plan.places() if p.node_id == node_id)
        self.settings = self.plan.settings_of(self.place, placement)
        self.state = folder / "state"
        make_private_folder(self.plan.folder_of(node_id))
        self.authority = CertificateAuthority.create_or_load(self.plan.folder / "ca", MESH)
        self.issue()

    def issue(self, authority: CertificateAuthority | None = None, *, expired: bool = False) -> None:
        lifetime = timedelta(days=1)
        now = LONG_AGO if expired else None
        credentials = (authority or self.authority).issue(
            self.place, ip_addresses=("127.0.0.1",), lifetime=lifetime, now=now
        )
        credentials.save(self.settings.identity.folder)

    def process(self, **flags: str) -> NodeProcess:
        folder = self.plan.folder_of(self.place.node_id)
        config = folder / "settings.yaml"
        config.write_text(to_yaml(self.settings))
        more = [word for key, value in flags.items() for word in (f"--{key.replace('__', '.')}", value)]
        return NodeProcess(
            node_id=self.place.node_id,
            command=(*KVMESH, self.place.role.value, "--config", str(config), *more),
            state_folder=Path(flags.get("state_folder", self.settings.state_folder)),
            log_file=folder / "process.log",
        )


async def fails(process: NodeProcess) -> str:
    """Its log, after it ended with 1 and without a traceback."""
    with pytest.raises(Exception, match="ended with code 1"):
        await process.start()
    log = process.log_tail()
    assert "Traceback" not in log
    return log


@pytest.mark.parametrize("listener", ["public", "node"])
async def test_a_port_in_use(tmp_path: Path, listener: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        log = await fails(Box(tmp_path, "placement-1").process(**{f"listeners__{listener}": f"127.0.0.1:{port}"}))
    assert f"port {port} is in use" in log


async def test_an_own_certificate_that_expired(tmp_path: Path) -> None:
    box = Box(tmp_path, "placement-1")
    box.issue(expired=True)
    log = await fails(box.process())
    assert "node's certificate is valid from" in log
    assert "UNAUTHENTICATED" in log


async def test_peers_with_an_expired_or_foreign_certificate_are_refused(mesh: RunningMesh, tmp_path: Path) -> None:
    """An agent whose clock is wrong, or who is of another mesh, gets no session and no work."""
    facts = (mesh.folder("placement-1") / "state" / "ready.json").read_text()
    address = json.loads(facts)["node"]
    ours = CertificateAuthority.create_or_load(mesh.plan.folder / "ca", MESH)
    stranger = CertificateAuthority.create_or_load(tmp_path / "ca", MESH)
    core = next(p for p in mesh.plan.places() if p.node_id == "core-1")
    good = ours.issue(core)
    expired = ours.issue(core, lifetime=timedelta(days=1), now=LONG_AGO)
    foreign = stranger.issue(core)
    for credentials, accepted in ((good, True), (expired, False), (foreign, False)):
        channel: grpc.aio.Channel = node_channel(address, credentials, "placement-1")
        async with channel:
            call = registry_pb2_grpc.RegistryStub(channel).WatchNodes(registry_pb2.WatchNodesRequest(), timeout=10)
            try:
                with translate_rpc_errors():
                    await call.read()
            except MeshError:
                assert not accepted
            else:
                assert accepted
            call.cancel()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs to fill")
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all room that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


@asynccontextmanager
async def placement_on(disk: Path, tmp_path: Path) -> AsyncIterator[tuple[NodeProcess, MeshClient]]:
    box = Box(tmp_path, "placement-1")
    process = box.process(state_folder=str(disk / "state"))
    facts = await process.start()
    keys = json.loads(box.plan.keys_file.read_text())
    try:
        async with MeshClient(facts["grpc"], keys["admin_key"]) as admin:
            yield process, admin
    finally:
        assert await process.drain(20) == 0


async def test_a_full_disk_is_told_and_outlived(tiny_disk: Path, tmp_path: Path) -> None:
    async with placement_on(tiny_disk, tmp_path) as (process, admin):
        assert await admin.put_policy("dev", POLICY) == 1
        filler = fill(tiny_disk)
        for call in (admin.put_policy("dev", POLICY + "# more"), admin.create_tenant("other")):
            with pytest.raises(Overloaded, match="is full"):
                await call
        await asyncio.sleep(2)  # heartbeats go on
        assert process.pid is not None
        assert (await admin.get_policy("dev")).version == 1
        assert [t.tenant for t in await admin.list_tenants()] == ["dev"]
        filler.unlink()
        assert await admin.put_policy("dev", POLICY + "# more") == 2


async def test_a_start_on_a_full_disk(tiny_disk: Path, tmp_path: Path) -> None:
    (tiny_disk / "state").mkdir(mode=0o700)
    fill(tiny_disk)
    log = await fails(Box(tmp_path, "placement-1").process(state_folder=str(tiny_disk / "state")))
    assert "is full" in log
    assert "OVERLOADED" in log


async def test_a_core_node_without_placement(tmp_path: Path) -> None:
    log = await fails(Box(tmp_path, "core-1", HostPort("127.0.0.1", 1)).process(engine__n_threads="1"))
    assert "NODE_UNREACHABLE" in log


async def test_bad_settings(tmp_path: Path) -> None:
    box = Box(tmp_path, "placement-1")
    log = await fails(box.process(drain_s="soon"))
    assert "drain_s" in log
    with (box.plan.folder_of("placement-1") / "settings.yaml").open("a") as file:
        file.write("nonsense: 1\n")
