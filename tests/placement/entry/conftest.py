"""Meshes in memory that are looked over at the end: no run, hold or task may be left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any

import pytest

from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place
from mesh.identity.signing import NodeIdentity
from tests.fakes.mesh import MemoryMesh

MakeMesh = Callable[..., MemoryMesh]


@pytest.fixture
async def make_mesh() -> AsyncIterator[MakeMesh]:
    async with AsyncExitStack() as stack:

        def make(*nodes: str, **options: Any) -> MemoryMesh:
            mesh = MemoryMesh(*nodes, **options)
            stack.push_async_callback(mesh.close)
            return mesh

        yield make


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("toy") / "ca", "toy")


@pytest.fixture(scope="session")
def signer_of(authority: CertificateAuthority) -> Callable[[Place], NodeIdentity]:
    """Real identities."""
    return lru_cache(lambda place: NodeIdentity(place, authority.issue(place)))
