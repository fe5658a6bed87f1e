"""A whole mesh on this machine: an authority, certificates, settings files and one process per node.

`kvmesh up`, `kvmesh demo`, benchmarks and end-to-end tests use this; a node does not know that it runs here.
Nodes start one after another, so that each measures its speed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mesh.address import HostPort
from mesh.client import MeshClient
from mesh.configfile import to_yaml
from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, UnknownNode
from mesh.identity.ca import CertificateAuthority
from mesh.identity.files import make_private_folder, write_error, write_private
from mesh.identity.place import Place, Role
from mesh.local.layout import MESH, PLACEMENT_ID, LocalPlan
from mesh.local.process import NodeProcess

NODE_COMMAND = (sys.executable, "-m", "mesh.cli.main")
_DRAIN_TIMEOUT_S = 20.0
_SEEN_TIMEOUT_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where clients reach one entry: gRPC as host:port, HTTP as a base URL."""

    grpc: str
    http: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Entry:
        """From what its process announced."""
        return cls(grpc=str(facts["grpc"]), http=str(facts["http"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReady:
    """Where a running local mesh is reached. `edges`: site -> its agent's entry."""

    core: Entry
    edges: Mapping[str, Entry]
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    ca_file: Path
    pids: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The object that `kvmesh up --json` prints."""
        return {
            "event": "ready",
            **asdict(self.core),
            "edges": {site: asdict(entry) for site, entry in self.edges.items()},
            "api_key": self.api_key,
            "admin_key": self.admin_key,
            "ca_file": str(self.ca_file),
            "pids": dict(self.pids),
        }


class LocalMesh:
    """Owns the processes of one mesh. `tell` gets lines for people."""

    def __init__(
        self, plan: LocalPlan, tell: Callable[[str], None], node_command: Sequence[str] = NODE_COMMAND
    ) -> None:
        self.plan = plan
        self._tell = tell
        self._node_command = node_command
        self._processes: dict[str, NodeProcess] = {}
        self._expected_to_end: set[str] = set()
        self._lock: int | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, plan: LocalPlan, tell: Callable[[str], None], node_command: Sequence[str] = NODE_COMMAND
    ) -> AsyncIterator[tuple[LocalMesh, MeshReady]]:
        """A mesh that is up inside the `async with` and drained after it, whatever happens."""
        mesh = cls(plan, tell, node_command)
        try:
            yield mesh, await mesh.start()
        finally:
            await mesh.stop()

    async def start(self) -> MeshReady:
        """Bring everything up. Raises MeshError (port in use, folder in use, a process that does not start); call
        `stop` in any case."""
        make_private_folder(self.plan.folder)
        self._lock_folder()
        for port in filter(None, (self.plan.grpc_port, self.plan.http_port)):
            _check_free(HostPort("127.0.0.1", port))
        authority = CertificateAuthority.create_or_load(self.plan.folder / "ca", MESH)
        ready: dict[str, Mapping[str, Any]] = {}
        for place in self.plan.places():
            placement = HostPort.parse(ready[PLACEMENT_ID]["node"]) if ready else None
            ready[place.node_id] = await self._start_one(place, authority, placement)
        api_key, admin_key = _read_keys(self.plan.keys_file)
        await self._until_seen(ready[PLACEMENT_ID]["grpc"], admin_key)
        ca_file = self.plan.folder / "ca.pem"
        write_private(ca_file, authority.ca_pem)
        return MeshReady(
            core=Entry.of(ready[PLACEMENT_ID]),
            edges={p.site: Entry.of(ready[p.node_id]) for p in self.plan.places() if p.role is Role.EDGE},
            api_key=api_key,
            admin_key=admin_key,
            ca_file=ca_file,
            pids={name: process.pid for name, process in self._processes.items() if process.pid is not None},
        )

    async def watch(self) -> None:
        """Tell of each process that ends by itself; returns when none is left."""

        async def one(process: NodeProcess) -> None:
            code = await process.wait()
            if process.node_id not in self._expected_to_end:
                self._tell(f"{process.node_id} ended with code {code}; the end of its log:\n{process.log_tail()}")

        async with asyncio.TaskGroup() as tasks:
            for process in self._processes.values():
                tasks.create_task(one(process))

    async def kill(self, node_id: str) -> None:
        """Kill one process as a crash would. Raises UnknownNode."""
        self._expected_to_end.add(node_id)
        await self._process(node_id).kill()

    async def start_again(self, node_id: str) -> Mapping[str, Any]:
        """Start a process that was killed, from the settings and state that it had; returns what it announces. Raises
        UnknownNode, or NodeUnreachable if it does not start."""
        facts = await self._process(node_id).start()
        self._expected_to_end.discard(node_id)
        return facts

    async def stop(self) -> None:
        """Drain all: nodes first, together; placement, which they report to, last. Idempotent."""
        self._expected_to_end.update(self._processes)
        nodes = [process for name, process in self._processes.items() if name != PLACEMENT_ID]
        await asyncio.gather(*(process.drain(_DRAIN_TIMEOUT_S) for process in nodes))
        if PLACEMENT_ID in self._processes:
            await self._processes[PLACEMENT_ID].drain(_DRAIN_TIMEOUT_S)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _start_one(
        self, place: Place, authority: CertificateAuthority, placement: HostPort | None
    ) -> Mapping[str, Any]:
        folder = self.plan.folder_of(place.node_id)
        make_private_folder(folder)
        settings = self.plan.settings_of(place, placement)
        credentials = authority.issue(place, dns_names=("localhost",), ip_addresses=("127.0.0.1", "::1"))
        credentials.save(settings.identity.folder)
        config = folder / f"{place.role.value}.yaml"
        write_private(config, to_yaml(settings).encode())
        process = NodeProcess(
            node_id=place.node_id,
            command=(*self._node_command, place.role.value, "--config", str(config)),
            state_folder=settings.state_folder,
            log_file=folder / "process.log",
        )
        self._processes[place.node_id] = process
        self._tell(f"starting {place.node_id}")
        try:
            return await process.start()
        except MeshError:
            self._tell(f"{place.node_id} did not start; the end of its log:\n{process.log_tail()}")
            raise

    async def _until_seen(self, address: str, admin_key: str) -> None:
        """Wait until placement sees every node as ready. Raises NodeUnreachable after _SEEN_TIMEOUT_S."""
        expected = set(self._processes) - {PLACEMENT_ID}
        missing = expected
        try:
            async with asyncio.timeout(_SEEN_TIMEOUT_S):
                while True:
                    missing = expected - await ready_nodes(address, admin_key)
                    if not missing:
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as exc:
            names = ", ".join(sorted(missing))
            raise NodeUnreachable(f"placement did not see {names} within {_SEEN_TIMEOUT_S:.0f} s", node=names) from exc

    def _process(self, node_id: str) -> NodeProcess:
        if node_id not in self._processes:
            raise UnknownNode(f"{node_id} is not of this mesh; it has {', '.join(self._processes)}", node=node_id)
        return self._processes[node_id]

    def _lock_folder(self) -> None:
        """One mesh per folder; the lock goes with the process."""
        path = self.plan.folder / ".lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise write_error(path, exc) from exc
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(handle)
            raise InvalidRequest(
                f"another mesh runs in {self.plan.folder}; stop it, or choose another folder with --state",
                field="state",
            ) from exc
        self._lock = handle


async def ready_nodes(address: str, admin_key: str) -> set[str]:
    """Ids of the nodes that the placement service at `address` sees as ready."""
    async with MeshClient(address, admin_key) as client:
        return {node.node_id for node in (await client.snapshot()).nodes if node.state == "ready"}


def _check_free(address: HostPort) -> None:
    with socket.socket() as probe:
        # As servers bind: connections of an earlier run that are still closing are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as exc:
            raise InvalidRequest(
                f"port {address.port} is in use ({exc.strerror}); choose another", field="port"
            ) from exc


def _read_keys(path: Path) -> tuple[str, str]:
    """The first keys, as placement wrote them. Raises InvalidRequest."""
    try:
        record = json.loads(path.read_text())
        return str(record["api_key"]), str(record["admin_key"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InvalidRequest(
            f"{path} does not hold the first keys ({type(exc).__name__}); remove {path.parent.parent} to start afresh",
            field="keys_file",
        ) from exc
