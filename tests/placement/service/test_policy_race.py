"""Two admins at two placement services on one registry: one order of versions for all, none lost, none twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mesh.errors import RevisionMismatch
from mesh.identity.tenants import new_tenant
from mesh.registry.consul import ConsulRegistry
from mesh.registry.embedded import EmbeddedRegistry
from mesh.registry.types import Registry
from placement.service.stores import PolicyStore, TenantStore
from tests.consul_fixture import consul_agent as consul_agent
from tests.fakes.mesh import until

ROUNDS = 4


@pytest.fixture(params=["embedded", pytest.param("consul", marks=pytest.mark.consul)])
async def registries(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Registry, Registry]]:
    """As each of the two services sees it."""
    made: list[Registry]
    if request.param == "embedded":
        shared = EmbeddedRegistry(None)
        made = [shared, shared]
    else:
        address = request.getfixturevalue("consul_agent").address
        made = [ConsulRegistry(address), ConsulRegistry(address)]
    for registry in dict.fromkeys(made):
        await registry.start()
    yield made[0], made[1]
    for registry in dict.fromkeys(made):
        await registry.close()


async def test_of_two_admins_who_saw_the_same_version_one_wins(registries: tuple[Registry, Registry]) -> None:
    stores = [PolicyStore(registry, lambda: None) for registry in registries]
    for store in stores:
        await store.start()
    for version in range(ROUNDS):
        outcomes = await asyncio.gather(
            *(
                store.put("acme", f"version: 1\npriority: {10 * version + i}", version, by=f"admin-{i}")
                for i, store in enumerate(stores)
            ),
            return_exceptions=True,
        )
        assert sorted(map(type, outcomes), key=str) == sorted([int, RevisionMismatch], key=str), outcomes
        assert version + 1 in outcomes
    for store in stores:
        await until(lambda store=store: bool(store.stored) and store.stored[0].version == ROUNDS)
    assert stores[0].stored == stores[1].stored
    histories = [await store.history("acme") for store in stores]
    assert histories[0] == histories[1]
    assert [s.version for s in histories[0]] == list(range(ROUNDS, 0, -1))
    for store in stores:
        await store.close()


async def test_without_an_expected_version_both_are_stored_one_after_the_other(
    registries: tuple[Registry, Registry],
) -> None:
    stores = [PolicyStore(registry, lambda: None) for registry in registries]
    for store in stores:
        await store.start()
    versions = await asyncio.gather(*(stores[i % 2].put("acme", f"version: 1\npriority: {i}", None) for i in range(6)))
    assert sorted(versions) == [1, 2, 3, 4, 5, 6]
    kept = {s.version: s.yaml for s in await stores[0].history("acme")}
    assert kept == {version: f"version: 1\npriority: {i}" for i, version in enumerate(versions)}
    for store in stores:
        await store.close()


async def test_tenants_of_both_are_there(registries: tuple[Registry, Registry]) -> None:
    stores = [TenantStore(registry, lambda: None) for registry in registries]
    for store in stores:
        await store.start()
    records = [new_tenant(f"tenant-{i}") for i in range(6)]
    await asyncio.gather(
        *(stores[i % 2].change(lambda d, r=record: d.with_tenant(r)) for i, record in enumerate(records))
    )
    for store in stores:
        await until(lambda store=store: len(store.directory.tenants) == 6)
    assert stores[0].directory == stores[1].directory
    assert stores[0].directory.revision == 6
    for store in stores:
        await store.close()
