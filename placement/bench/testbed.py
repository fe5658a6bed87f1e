"""A mesh on this machine whose core sits behind a link that can be shaped; what the benchmarks here run on.

Every connection to the core (legs, KV, probes) passes the link. TLS checks who answers by its certificate, not by
its address, so a proxy in between changes nothing else.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mesh.address import HostPort
from mesh.bench.link import LinkProxy
from mesh.client import MeshClient
from mesh.local.commands import make_plan
from mesh.local.local_mesh import LocalMesh
from mesh.model.catalogue import DEMO_MODEL

POLICY = """\
version: 1
labels: {order: [public, internal], default: public}
rules:
  public: {anywhere: true}
  internal: {anywhere: true}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A running mesh; clients are open. `edges`: site -> client of its entry. `pids`: node id -> process."""

    mesh: LocalMesh
    link: LinkProxy
    core: MeshClient
    admin: MeshClient
    edges: dict[str, MeshClient]
    pids: Mapping[str, int]


@asynccontextmanager
async def running_testbed(*, sites: str, core_dtype: str = "", core_threads: int = 1) -> AsyncIterator[Testbed]:
    """Up inside the `async with`. The state folder is temporary."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
        port = _free_port()
        link = await stack.enter_async_context(LinkProxy("127.0.0.1", port))
        plan = make_plan(core=1, edge=sites, state=folder, model=DEMO_MODEL, device="cpu", core_threads=core_threads)
        plan = replace(
            plan,
            core_dtype=core_dtype or plan.core_dtype,
            core_node=HostPort("127.0.0.1", port),
            core_advertise=HostPort.parse(link.address),
        )
        mesh, ready = await stack.enter_async_context(LocalMesh.running(plan, lambda line: None))
        core = await stack.enter_async_context(MeshClient(ready.core.grpc, ready.api_key))
        admin = await stack.enter_async_context(MeshClient(ready.core.grpc, ready.admin_key))
        edges = {
            site: await stack.enter_async_context(MeshClient(entry.grpc, ready.admin_key))
            for site, entry in ready.edges.items()
        }
        await admin.put_policy("dev", POLICY)
        yield Testbed(mesh=mesh, link=link, core=core, admin=admin, edges=edges, pids=ready.pids)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
