"""One mesh of real processes for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.consul_fixture import consul_agent as consul_agent
from tests.e2e.running_mesh import RunningMesh, running_mesh


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    async with running_mesh(tmp_path_factory.mktemp("mesh")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def whole(mesh: RunningMesh) -> RunningMesh:
    """The mesh, with all nodes up: a test that failed half-way must not make the next ones fail."""
    for node_id in list(mesh.local._processes):
        if mesh.process(node_id).pid is None:
            await mesh.start(node_id)
    await mesh.until_ready()
    return mesh
