"""What every Registry must do, as tests. A concrete test class gives the fixture `harness`.

Time to live is real here, short, and only ever waited for: no test asserts how long something took.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import pytest

from mesh.errors import InvalidRequest, NodeUnreachable, NotFound, RevisionMismatch
from mesh.registry.types import MAX_VALUE_BYTES, Health, NodesView, Registration, Registry

T = TypeVar("T")
PATIENCE_S = 30.0


class Harness(Protocol):
    """One registry and a way to it."""

    async def connect(self, node_id: str) -> Registry:
        """A started client that may act for `node_id`; the harness closes it."""
        ...


class OutageHarness(Harness, Protocol):
    """One that can be taken away. `durable`: it comes back with what it had."""

    durable: bool

    async def stop(self) -> None: ...

    async def start(self) -> None: ...


def node(node_id: str = "core-1", **changes: Any) -> Registration:
    registration = Registration(
        node_id=node_id, address="192.0.2.7:50051", meta={"site": "dc-1", "tier": "core"}, ttl_s=60.0
    )
    return replace(registration, **changes)


async def until(states: AsyncIterator[T], wanted: Callable[[T], bool]) -> T:
    """The first state that is as wanted; leaves the watch open."""
    async with asyncio.timeout(PATIENCE_S):
        async for state in states:
            if wanted(state):
                return state
    raise AssertionError("the watch ended")


async def eventually(get: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            state = await get()
            if wanted(state):
                return state
            await asyncio.sleep(0.02)


def healths(view: NodesView) -> dict[str, Health]:
    return {each.registration.node_id: each.health for each in view.nodes}


PASSING, CRITICAL = Health.PASSING, Health.CRITICAL

BAD_REGISTRATIONS: tuple[dict[str, Any], ...] = (
    {"node_id": ""},
    {"node_id": "a/b"},
    {"address": "no-port"},
    {"address": "host:port"},
    {"health_address": "127.0.0.1"},
    {"ttl_s": 0.0},
    {"ttl_s": float("nan")},
    {"meta": {"": "x"}},
    {"meta": {"a b": "x"}},
    {"meta": {"k" * 129: "x"}},
    {"meta": {"consul-x": "x"}},
    {"meta": {"k": "é" * 257}},
    {"meta": {f"k{i}": "" for i in range(65)}},
)


class RegistryConformance:
    """Nodes, values and watches."""

    async def test_registration_reads_back_and_starts_critical(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        assert (await registry.nodes()).nodes == ()
        await registry.register(node())
        (listed,) = (await registry.nodes()).nodes
        assert listed.registration == node()
        assert listed.health is CRITICAL

    async def test_health_follows_readiness(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        await registry.register(node())
        for ready, health in ((True, PASSING), (False, CRITICAL), (True, PASSING)):
            await registry.heartbeat("core-1", ready=ready)
            await eventually(registry.nodes, lambda view, health=health: healths(view) == {"core-1": health})

    async def test_registering_again_keeps_health_and_takes_changes(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        await registry.register(node())
        await registry.heartbeat("core-1", ready=True)
        await eventually(registry.nodes, lambda view: healths(view) == {"core-1": PASSING})
        await registry.register(node())
        assert healths(await registry.nodes()) == {"core-1": PASSING}
        moved = node(address="[2001:db8::1]:50051", meta={"site": "dc-2"})
        await registry.register(moved)
        (listed,) = (await registry.nodes()).nodes
        assert (listed.registration, listed.health) == (moved, PASSING)

    async def test_a_node_without_address_or_meta(self, harness: Harness) -> None:
        registry = await harness.connect("edge-1")
        await registry.register(node("edge-1", address="", meta={}))
        assert (await registry.nodes()).nodes[0].registration == node("edge-1", address="", meta={})

    async def test_heartbeat_of_an_unknown_node(self, harness: Harness) -> None:
        registry = await harness.connect("core-9")
        for ready in (True, False):
            with pytest.raises(NotFound, match="core-9"):
                await registry.heartbeat("core-9", ready=ready)

    async def test_leaving(self, harness: Harness) -> None:
        one, two = await harness.connect("core-1"), await harness.connect("core-2")
        await one.register(node("core-1"))
        await two.register(node("core-2"))
        await one.deregister("core-1")
        await one.deregister("core-1")
        await eventually(two.nodes, lambda view: list(healths(view)) == ["core-2"])
        with pytest.raises(NotFound):
            await one.heartbeat("core-1", ready=True)
        await one.register(node("core-1"))
        await eventually(two.nodes, lambda view: healths(view) == {"core-1": CRITICAL, "core-2": CRITICAL})

    async def test_a_silent_node_turns_critical_and_stays_listed(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        async with aclosing(registry.watch()) as views:
            await registry.register(node(ttl_s=0.5))
            await registry.heartbeat("core-1", ready=True)
            await until(views, lambda view: healths(view) == {"core-1": PASSING})
            await until(views, lambda view: healths(view) == {"core-1": CRITICAL})
            await registry.heartbeat("core-1", ready=True)
            await until(views, lambda view: healths(view) == {"core-1": PASSING})

    async def test_watchers_see_joins_and_leaves_in_order(self, harness: Harness) -> None:
        one, two = await harness.connect("core-1"), await harness.connect("core-2")
        async with aclosing(one.watch()) as first, aclosing(two.watch()) as second:
            before = await until(first, lambda view: view.nodes == ())
            await two.register(node("core-2"))
            await one.register(node("core-1"))
            for views in (first, second):
                view = await until(views, lambda view: len(view.nodes) == 2)
                assert [each.registration.node_id for each in view.nodes] == ["core-1", "core-2"]
                assert view.index > before.index
                assert view.heard_monotonic_s >= before.heard_monotonic_s
            await two.deregister("core-2")
            for views in (first, second):
                await until(views, lambda view: list(healths(view)) == ["core-1"])

    async def test_bad_registrations_are_refused(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        for changes in BAD_REGISTRATIONS:
            with pytest.raises(InvalidRequest):
                await registry.register(node(**changes))
        assert (await registry.nodes()).nodes == ()

    async def test_the_most_meta(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        full = node(meta={f"{i:02}{'k' * 126}": "é✓" * 102 for i in range(64)})
        await registry.register(full)
        assert (await registry.nodes()).nodes[0].registration == full

    async def test_values(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        assert await registry.get("policies/dev") is None
        first = await registry.put("policies/dev", b"one")
        stored = await registry.get("policies/dev")
        assert stored is not None
        assert (stored.key, stored.value, stored.version) == ("policies/dev", b"one", first)
        second = await registry.put("policies/dev", b"two")
        same = await registry.put("policies/dev", b"two")
        assert first < second < same
        await registry.delete("policies/dev")
        await registry.delete("policies/dev")
        assert await registry.get("policies/dev") is None
        assert await registry.put("policies/dev", b"three") > same

    async def test_compare_and_set(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        first = await registry.put("key", b"one", expected_version=0)
        for wrong in (0, first + 1):
            with pytest.raises(RevisionMismatch, match="key"):
                await registry.put("key", b"lost", expected_version=wrong)
        second = await registry.put("key", b"two", expected_version=first)
        with pytest.raises(RevisionMismatch):
            await registry.put("key", b"lost", expected_version=first)
        with pytest.raises(RevisionMismatch):
            await registry.put("other", b"lost", expected_version=second)
        stored = await registry.get("key")
        assert stored is not None
        assert (stored.value, stored.version) == (b"two", second)
        assert await registry.get("other") is None

    async def test_one_of_many_writers_wins(self, harness: Harness) -> None:
        registries = [await harness.connect(f"core-{i}") for i in range(4)]
        outcomes = await asyncio.gather(
            *(each.put("key", bytes([i]), expected_version=0) for i, each in enumerate(registries)),
            return_exceptions=True,
        )
        (winner,) = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, int)]
        assert all(isinstance(outcome, int | RevisionMismatch) for outcome in outcomes)
        stored = await registries[0].get("key")
        assert stored is not None
        assert (stored.value, stored.version) == (bytes([winner]), outcomes[winner])

    @pytest.mark.parametrize("value", [b"", b"\x00\xff" * 100, bytes(MAX_VALUE_BYTES)], ids=["empty", "binary", "max"])
    async def test_values_are_bytes_up_to_the_limit(self, harness: Harness, value: bytes) -> None:
        registry = await harness.connect("core-1")
        version = await registry.put("key", value, expected_version=0)
        stored = await registry.get("key")
        assert stored is not None
        assert (stored.value, stored.version) == (value, version)

    async def test_bad_values_and_keys_are_refused(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        with pytest.raises(InvalidRequest, match="at most"):
            await registry.put("key", bytes(MAX_VALUE_BYTES + 1))
        assert await registry.get("key") is None
        for key in ("", "/a", "a/", "a//b", "../a", "a/../b", "a b", "ä", "a?b", "k" * 257):
            for call in (registry.get(key), registry.put(key, b""), registry.delete(key)):
                with pytest.raises(InvalidRequest):
                    await call
        for prefix in ("/", "..", "a?", "ä"):
            with pytest.raises(InvalidRequest):
                await registry.list_values(prefix)
            with pytest.raises(InvalidRequest):
                await until(registry.watch_values(prefix), lambda _: True)

    async def test_listing_by_prefix(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        for key in ("policies/b", "policies/a", "policies/a.b", "policies-old/a", "tenants"):
            await registry.put(key, key.encode())
        listed = await registry.list_values("policies/")
        assert [(each.key, each.value) for each in listed] == [
            (key, key.encode()) for key in ("policies/a", "policies/a.b", "policies/b")
        ]
        assert [each.key for each in await registry.list_values("policies/a")] == ["policies/a", "policies/a.b"]
        assert len(await registry.list_values("")) == 5
        assert await registry.list_values("nothing/") == ()
        stored = await registry.get("policies/a")
        assert stored == listed[0]

    async def test_watching_values(self, harness: Harness) -> None:
        writer, reader = await harness.connect("core-1"), await harness.connect("core-2")
        async with aclosing(reader.watch_values("policies/")) as states:
            assert await until(states, lambda _: True) == ()
            await writer.put("tenants", b"not under the prefix")
            version = await writer.put("policies/a", b"1")
            (value,) = await until(states, lambda values: len(values) == 1)
            assert (value.key, value.value, value.version) == ("policies/a", b"1", version)
            await writer.put("policies/a", b"2")
            await until(states, lambda values: [each.value for each in values] == [b"2"])
            await writer.delete("policies/a")
            await until(states, lambda values: values == ())

    async def test_close_ends_watches(self, harness: Harness) -> None:
        registry = await harness.connect("core-1")
        views, values = registry.watch(), registry.watch_values("")
        await until(views, lambda _: True)
        await until(values, lambda _: True)
        await registry.close()
        async with asyncio.timeout(PATIENCE_S):
            assert [state async for state in views] == []
            assert [state async for state in values] == []


class OutageConformance(RegistryConformance):
    """The same for a registry that is elsewhere, and what happens while it is gone."""

    async def test_a_registry_that_is_gone_leaves_its_last_view(
        self, harness: OutageHarness, short_repeat: None
    ) -> None:
        registry = await harness.connect("core-1")
        await registry.register(node())
        await registry.heartbeat("core-1", ready=True)
        await registry.put("policies/a", b"1")
        async with aclosing(registry.watch()) as views, aclosing(registry.watch_values("policies/")) as values:
            await until(views, lambda view: healths(view) == {"core-1": PASSING})
            await until(values, lambda state: len(state) == 1)
            await harness.stop()
            last = await anext(views)
            while (again := await anext(views)).heard_monotonic_s > last.heard_monotonic_s:
                last = again  # what was on its way when it stopped
            for _ in range(3):
                assert await anext(views) == last
            calls = [
                registry.register(node()),
                registry.heartbeat("core-1", ready=True),
                registry.deregister("core-1"),
                registry.nodes(),
                registry.get("policies/a"),
                registry.put("policies/a", b"lost"),
                registry.delete("policies/a"),
                registry.list_values(""),
            ]
            for call in calls:
                with pytest.raises(NodeUnreachable):
                    await call
            await harness.start()
            back = await until(views, lambda view: view.heard_monotonic_s > last.heard_monotonic_s)
            if harness.durable:
                assert healths(back) == {"core-1": CRITICAL}
                await registry.heartbeat("core-1", ready=True)
            else:
                await until(values, lambda state: state == ())
                with pytest.raises(NotFound):
                    await registry.heartbeat("core-1", ready=True)
                await registry.register(node())
                await registry.heartbeat("core-1", ready=True)
            await until(views, lambda view: healths(view) == {"core-1": PASSING})
            await registry.put("policies/a", b"2")
            await until(values, lambda state: [each.value for each in state] == [b"2"])

    async def test_a_watch_may_start_before_the_registry_does(self, harness: OutageHarness) -> None:
        await harness.stop()
        registry = await harness.connect("core-1")
        async with aclosing(registry.watch()) as views:
            first = asyncio.ensure_future(anext(views))
            with pytest.raises(NodeUnreachable):
                await registry.nodes()
            assert not first.done()
            await harness.start()
            async with asyncio.timeout(PATIENCE_S):
                assert (await first).nodes == ()
