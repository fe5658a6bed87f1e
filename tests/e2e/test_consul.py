"""The same mesh with a real Consul as its registry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.consul_fixture import ConsulAgent
from tests.e2e.running_mesh import RunningMesh, assert_complete, eventually, follow, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.consul, pytest.mark.timeout(240)]


def states(agent: ConsulAgent) -> dict[str, str]:
    """Node id -> worst status of its checks, of every node in the catalog."""
    client = agent.client
    try:
        _, services = client.catalog.services()
        found = {}
        for service in services:
            if service.startswith("kvmesh"):
                _, entries = client.health.service(service)
                for entry in entries:
                    worst = {check["Status"] for check in entry["Checks"]}
                    name = entry["Service"]["ID"].removeprefix("kvmesh-node-")
                    found[name] = "critical" if "critical" in worst else "passing"
        return found
    finally:
        client.http.session.close()


async def reaches(agent: ConsulAgent, wanted: dict[str, str]) -> None:
    async def asked() -> bool:
        return await asyncio.to_thread(states, agent) == wanted

    await eventually(asked)


ALL = {"placement-1": "passing", "core-1": "passing", "edge-paris": "passing"}


async def test_nodes_in_consul(consul_agent: ConsulAgent, tmp_path: Path) -> None:
    async with running_mesh(tmp_path, edge="paris", consul=consul_agent.address) as mesh:
        await reaches(consul_agent, ALL)
        await _answers(mesh)

        await mesh.kill("core-1")
        await reaches(consul_agent, ALL | {"core-1": "critical"})
        assert_complete(await follow(mesh.paris, "Still here", label="restricted", max_tokens=2), 2)
        await mesh.start("core-1")
        await reaches(consul_agent, ALL)

        consul_agent.kill()
        await _answers(mesh)  # the last view stays in use
        consul_agent.start()  # with nothing in it
        await reaches(consul_agent, ALL)
        await mesh.until_ready()
        await _answers(mesh)


async def _answers(mesh: RunningMesh) -> None:
    for client, label in ((mesh.core, "public"), (mesh.paris, "restricted"), (mesh.paris, "confidential")):
        assert_complete(await follow(client, "Hello", label=label, max_tokens=2), 2)
