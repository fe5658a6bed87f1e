"""Two placement services on one Consul: policies, tenants and requests are shared; either dies or is restarted under
load, and no client loses a token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.client import MeshClient
from mesh.configfile import to_yaml
from mesh.identity.ca import CertificateAuthority
from mesh.identity.files import make_private_folder, write_private
from mesh.local.layout import MESH, TENANT
from mesh.local.process import NodeProcess
from mesh.settings import PlacementSettings
from tests.consul_fixture import ConsulAgent
from tests.e2e.running_mesh import (
    KVMESH,
    POLICY,
    RunningMesh,
    assert_complete,
    eventually,
    follow,
    following,
    running_mesh,
)

pytestmark = [pytest.mark.e2e, pytest.mark.consul, pytest.mark.timeout(600)]
PROMPTS = ("The history of the sea begins", "Once there was a baker who", "In the year 1900 a train")
TOKENS = 60


@asynccontextmanager
async def second_placement(mesh: RunningMesh) -> AsyncIterator[tuple[NodeProcess, str]]:
    """placement-2 in the same mesh; gives its process and gRPC address."""
    place = replace(mesh.plan.places()[0], node_id="placement-2")
    folder = mesh.plan.folder / place.node_id
    make_private_folder(folder)
    first = mesh.plan.settings_of(mesh.plan.places()[0], None)
    assert isinstance(first, PlacementSettings)
    listeners = first.listeners.model_copy(
        update={name: getattr(first.listeners, name).with_port(0) for name in ("public", "http", "node")}
    )
    identity = first.identity.model_copy(update={"folder": folder / "identity"})
    settings = first.model_copy(
        update={
            "identity": identity, "state_folder": folder / "state", "bootstrap": None, "listeners": listeners,
        }
    )  # fmt: skip
    authority = CertificateAuthority.create_or_load(mesh.plan.folder / "ca", MESH)
    authority.issue(place, dns_names=("localhost",), ip_addresses=("127.0.0.1", "::1")).save(identity.folder)
    write_private(folder / "placement.yaml", to_yaml(settings).encode())
    process = NodeProcess(
        node_id=place.node_id,
        command=(*KVMESH, "placement", "--config", str(folder / "placement.yaml")),
        state_folder=settings.state_folder,
        log_file=folder / "process.log",
    )
    facts = await process.start()
    try:
        yield process, str(facts["grpc"])
    finally:
        await process.drain(20.0)


async def hear_one_another(mesh: RunningMesh, times: int = 1) -> None:
    """Until each placement service takes what the other tells, for the so manieth time."""

    async def heard() -> bool:
        logs = [
            "".join(p.read_text() for p in (mesh.plan.folder / name).glob("process*.log"))
            for name in ("placement-1", "placement-2")
        ]
        return all(text.count("sibling_hears_us") >= times for text in logs)

    await eventually(heard)


async def test_either_may_die_under_load(consul_agent: ConsulAgent, tmp_path: Path) -> None:
    async with (
        running_mesh(tmp_path, edge="", consul=consul_agent.address) as mesh,
        second_placement(mesh) as (second, address),
        AsyncExitStack() as stack,
    ):
        one, key = mesh.ready.core.grpc, mesh.ready.api_key
        both = await stack.enter_async_context(MeshClient(one, key, others=[address]))
        at_two = await stack.enter_async_context(MeshClient(address, key, others=[one]))
        await hear_one_another(mesh)
        version = await mesh.admin.put_policy(TENANT, POLICY + "# by the first\n")

        async def at_version() -> bool:
            return (await at_two.explain("hello", label="public")).decision.policy_version == version

        await eventually(at_version)
        whole = [await follow(at_two, prompt, label="public", max_tokens=TOKENS) for prompt in PROMPTS]

        async with AsyncExitStack() as load:
            running = [
                await load.enter_async_context(following(both, prompt, tokens=4, label="public", max_tokens=TOKENS))
                for prompt in PROMPTS
            ]
            await mesh.kill("placement-1")
            done = await asyncio.gather(*(task for _, task in running))
        for stream, reference in zip(done, whole, strict=True):
            assert_complete(stream, TOKENS)
            assert stream.ids == reference.ids
        assert any(stream.migrations for stream in done), "none was running when its entry died"

        await mesh.start("placement-1")
        await hear_one_another(mesh, times=2)  # requests are copied to whoever hears when they begin
        async with AsyncExitStack() as load:
            running = [
                await load.enter_async_context(following(at_two, prompt, tokens=4, label="public", max_tokens=TOKENS))
                for prompt in PROMPTS
            ]
            assert second.pid is not None
            os.kill(second.pid, signal.SIGTERM)  # a restart: it takes nothing new, what runs may end
            assert_complete(await follow(at_two, "Elsewhere", label="public", max_tokens=3), 3)
            for stream in await asyncio.gather(*(task for _, task in running)):
                assert_complete(stream, TOKENS)
