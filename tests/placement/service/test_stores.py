"""Policies and tenants over the embedded registry: versions, races, damaged and lost values, several services."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh import process
from mesh.errors import (
    AlreadyExists,
    InvalidRequest,
    NodeUnreachable,
    NotFound,
    Overloaded,
    PayloadCorrupt,
    RevisionMismatch,
)
from mesh.identity.principal import AccessRole
from mesh.identity.tenants import TenantDirectory, issue_key, new_tenant
from mesh.registry.types import Value
from placement.policy.model import parse_policy
from placement.policy.rules import Policy
from placement.service.stores import POLICY_PREFIX, TENANTS_KEY, PolicyReader, PolicyStore, StoredPolicy, TenantStore
from tests.fakes.mesh import until
from tests.placement.service.registries import MoodyRegistry

ONE = "version: 1\npriority: 1"
TWO = "version: 1\npriority: 2"


async def test_documents_are_parsed_off_the_event_loop(policies: PolicyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[int]()

    def parse(text: str, *, version: int) -> Policy:
        threads.add(threading.get_ident())
        return parse_policy(text, version=version)

    monkeypatch.setattr("placement.service.stores.parse_policy", parse)
    monkeypatch.setattr("placement.policy.book.parse_policy", parse)
    assert await policies.put("acme", ONE, None) == 1
    assert policies.book.lookup("acme").version == 1
    assert threads
    assert threading.get_ident() not in threads


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
async def changes() -> Counter:
    return Counter()


@pytest.fixture
async def policies(registry: MoodyRegistry, changes: Counter) -> AsyncIterator[PolicyStore]:
    store = PolicyStore(registry, changes)
    await store.start()
    yield store
    await store.close()


@pytest.fixture
async def tenants(registry: MoodyRegistry, changes: Counter) -> AsyncIterator[TenantStore]:
    store = TenantStore(registry, changes)
    await store.start()
    yield store
    await store.close()


def priority(store: PolicyReader, tenant: str = "acme") -> int:
    return store.book.lookup(tenant).policy.priority


# Policies


async def test_versions_count_from_one_and_never_repeat(policies: PolicyStore, changes: Counter) -> None:
    assert await policies.put("acme", ONE, None) == 1
    assert (await policies.put("acme", TWO, 1), priority(policies)) == (2, 2)
    await policies.delete("acme")
    assert policies.book.lookup("acme").version == 0
    with pytest.raises(NotFound):
        policies.get("acme")
    with pytest.raises(NotFound):
        await policies.delete("acme")
    assert await policies.put("acme", ONE, None) == 4
    assert (policies.get("acme").yaml, policies.get("acme").version) == (ONE, 4)
    assert changes.count == 4


@pytest.mark.parametrize("expected", [0, 2, 99])
async def test_another_version_than_expected(policies: PolicyStore, expected: int) -> None:
    await policies.put("acme", ONE, 0)
    with pytest.raises(RevisionMismatch, match="is at version 1"):
        await policies.put("acme", TWO, expected)
    assert priority(policies) == 1


@pytest.mark.parametrize(
    "yaml", ["", "version: 1\nx: 2", "version: 1\nrules: {moon: {anywhere: true}}", "a: [", "x" * 300_000]
)
async def test_a_bad_document_changes_nothing(policies: PolicyStore, changes: Counter, yaml: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await policies.put("acme", yaml, None)
    assert caught.value.details["field"] == "policy"
    assert changes.count == 0
    assert policies.stored == ()


async def test_two_services_at_once_lose_nothing(registry: MoodyRegistry, policies: PolicyStore) -> None:
    other = PolicyStore(registry, lambda: None)
    await other.start()
    versions = await asyncio.gather(*(store.put("acme", ONE, None) for store in (policies, other) for _ in range(3)))
    assert sorted(versions) == [1, 2, 3, 4, 5, 6]
    await until(lambda: other.book.lookup("acme").version == policies.book.lookup("acme").version == 6)
    await other.close()


async def test_of_two_that_expect_the_same_version_one_wins(registry: MoodyRegistry, policies: PolicyStore) -> None:
    other = PolicyStore(registry, lambda: None)
    await other.start()
    outcomes = await asyncio.gather(policies.put("acme", ONE, 0), other.put("acme", TWO, 0), return_exceptions=True)
    assert sorted(type(o).__name__ for o in outcomes) == ["RevisionMismatch", "int"]
    await other.close()


async def test_a_reader_follows(registry: MoodyRegistry, policies: PolicyStore) -> None:
    reader = PolicyReader(registry, lambda: None)
    await reader.start()
    await policies.put("acme", TWO, None)
    await until(lambda: priority(reader) == 2)
    await policies.delete("acme")
    await until(lambda: reader.book.lookup("acme").version == 0)
    await reader.close()


DAMAGED = [
    b"", b"junk", b"[]", b"null", b'{"version": 1}', b'{"version": 0, "yaml": "version: 1"}',
    b'{"version": "1", "yaml": null}', b'{"version": 2, "yaml": 7}',
    b'{"version": 2, "yaml": "version: 9"}', b"\xff\xfe",
]  # fmt: skip


@pytest.mark.parametrize("raw", DAMAGED)
async def test_a_damaged_value_keeps_the_last_good_one_and_can_be_replaced(
    registry: MoodyRegistry, policies: PolicyStore, raw: bytes
) -> None:
    await policies.put("acme", TWO, None)
    await policies.put("other", ONE, None)
    await registry.put(POLICY_PREFIX + "acme", raw)
    await registry.put(POLICY_PREFIX + "last", b'{"version": 1, "yaml": "version: 1"}')
    await until(lambda: policies.book.lookup("last").version == 1)
    assert priority(policies) == 2
    assert [s.tenant for s in policies.stored] == ["acme", "last", "other"]
    assert await policies.put("acme", ONE, None) > 1
    assert priority(policies) == 1


async def test_a_damaged_value_at_the_start_is_no_policy(registry: MoodyRegistry) -> None:
    await registry.put(POLICY_PREFIX + "acme", b"junk")
    reader = PolicyReader(registry, lambda: None)
    await reader.start()
    assert reader.book.lookup("acme").version == 0
    await reader.close()


async def test_a_registry_that_lost_its_data_loosens_nothing(registry: MoodyRegistry, policies: PolicyStore) -> None:
    await policies.put("acme", ONE, None)
    await policies.put("acme", TWO, None)
    await registry.lose_everything()
    await registry.put(POLICY_PREFIX + "other", b'{"version": 1, "yaml": "version: 1"}')
    await until(lambda: policies.book.lookup("other").version == 1)
    assert priority(policies) == 2
    assert [s.tenant for s in policies.stored] == ["acme", "other"]
    assert await policies.put("acme", ONE, None) == 3


@pytest.mark.parametrize("trouble", [NodeUnreachable("gone"), Overloaded("the disk is full")])
async def test_trouble_of_the_registry_is_the_caller_s_and_changes_nothing(
    registry: MoodyRegistry, policies: PolicyStore, trouble: Overloaded
) -> None:
    await policies.put("acme", ONE, None)
    registry.trouble = trouble
    with pytest.raises(type(trouble)):
        await policies.put("acme", TWO, None)
    registry.trouble = None
    assert priority(policies) == 1
    assert await policies.put("acme", TWO, None) == 2


async def test_a_registry_that_is_not_there_at_the_start(registry: MoodyRegistry) -> None:
    registry.trouble = NodeUnreachable("gone")
    for store in (PolicyReader(registry, lambda: None), TenantStore(registry, lambda: None)):
        with pytest.raises(NodeUnreachable):
            await store.start()
        await store.close()


def test_a_stored_policy_survives_json() -> None:
    for yaml in (ONE, None):
        entry = StoredPolicy(tenant="acme", yaml=yaml, version=7)
        assert StoredPolicy.from_value(Value(key="policies/acme", value=entry.to_json(), version=1)) == entry


# Tenants


async def test_tenants_and_keys(tenants: TenantStore, changes: Counter) -> None:
    await tenants.change(lambda d: d.with_tenant(new_tenant("acme")))
    key, record = issue_key("acme", AccessRole.TENANT, created_unix_s=1)
    await tenants.change(lambda d: d.with_key(record))
    assert tenants.directory.authenticate(f"Bearer {key}").tenant == "acme"
    assert changes.count == 2
    with pytest.raises(AlreadyExists):
        await tenants.change(lambda d: d.with_tenant(new_tenant("acme")))
    assert changes.count == 2


async def test_changes_of_two_services_are_both_kept(registry: MoodyRegistry, tenants: TenantStore) -> None:
    other = TenantStore(registry, lambda: None)
    await other.start()
    names = [f"t{n}" for n in range(6)]
    records = [new_tenant(name) for name in names]
    await asyncio.gather(
        *((tenants, other)[n % 2].change(lambda d, r=r: d.with_tenant(r)) for n, r in enumerate(records))  # type: ignore[misc]
    )
    await until(lambda: all(len(s.directory.tenants) == 6 for s in (tenants, other)))
    await other.close()


async def test_a_directory_that_keeps_changing_is_given_up(registry: MoodyRegistry, tenants: TenantStore) -> None:
    def edit(directory: TenantDirectory) -> TenantDirectory:
        registry._state = registry._state.with_value(TENANTS_KEY, directory.to_json(), None)  # somebody is faster
        return directory.with_tenant(new_tenant("acme"))

    with pytest.raises(RevisionMismatch, match="keeps changing"):
        await tenants.change(edit)


async def test_a_damaged_directory_keeps_the_last_good_one(registry: MoodyRegistry, tenants: TenantStore) -> None:
    await tenants.change(lambda d: d.with_tenant(new_tenant("acme")))
    await registry.put(TENANTS_KEY, b"junk")
    await asyncio.sleep(0.01)
    assert [t.tenant for t in tenants.directory.tenants] == ["acme"]
    with pytest.raises(PayloadCorrupt):
        await tenants.change(lambda d: d.with_tenant(new_tenant("other")))
    await registry.put(TENANTS_KEY, TenantDirectory().with_tenant(new_tenant("new")).to_json())
    await until(lambda: [t.tenant for t in tenants.directory.tenants] == ["new"])
    await registry.delete(TENANTS_KEY)
    await asyncio.sleep(0.01)
    assert [t.tenant for t in tenants.directory.tenants] == ["new"]


async def test_a_damaged_directory_stops_the_start(registry: MoodyRegistry) -> None:
    await registry.put(TENANTS_KEY, b"junk")
    with pytest.raises(PayloadCorrupt):
        await TenantStore(registry, lambda: None).start()


@pytest.mark.parametrize("follower", ["policies", "tenants"])
async def test_following_goes_on_after_an_error(
    registry: MoodyRegistry,
    policies: PolicyStore,
    tenants: TenantStore,
    monkeypatch: pytest.MonkeyPatch,
    follower: str,
) -> None:
    monkeypatch.setattr(process, "_RESUME_AFTER_S", 0.01)
    store: Any = policies if follower == "policies" else tenants
    real, failed = store._use, asyncio.Event()

    def broken_once(values: object) -> Any:
        if not failed.is_set():
            failed.set()
            raise TypeError("a bug")
        return real(values)

    monkeypatch.setattr(store, "_use", broken_once)
    await registry.put(POLICY_PREFIX + "acme", StoredPolicy(tenant="acme", yaml=ONE, version=1).to_json())
    await registry.put(TENANTS_KEY, TenantDirectory().with_tenant(new_tenant("acme")).to_json())
    await failed.wait()
    await until(lambda: priority(policies) == 1 and tenants.directory != TenantDirectory())
