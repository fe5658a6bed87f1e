"""Membership: joined, kept alive, registered again when the registry forgot, patient when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mesh.errors import Expired, Internal, MeshError, NodeUnreachable, Overloaded
from mesh.registry.types import Health, Registration
from placement.service import membership as membership_module
from placement.service.membership import Membership
from tests.fakes.mesh import until, until_true
from tests.placement.service.registries import MoodyRegistry

NODE = Registration(node_id="core-1", address="127.0.0.1:1", ttl_s=0.3)


@pytest.fixture
async def membership(registry: MoodyRegistry, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Membership]:
    monkeypatch.setattr(membership_module, "_RETRY_S", 0.02)
    made = Membership(registry, NODE)
    yield made
    await made.leave()


async def health(registry: MoodyRegistry) -> Health | None:
    nodes = (await registry.nodes()).nodes
    return nodes[0].health if nodes else None


async def until_health(registry: MoodyRegistry, wanted: Health) -> None:
    async def is_so() -> bool:
        return await health(registry) is wanted

    await until_true(is_so)


async def test_it_joins_beats_and_leaves(registry: MoodyRegistry, membership: Membership) -> None:
    await membership.join()
    assert await health(registry) is Health.PASSING
    await asyncio.sleep(0.5)
    assert await health(registry) is Health.PASSING
    assert registry.calls.count("heartbeat") >= 3
    await membership.leave()
    assert await health(registry) is None


async def test_other_facts_are_told_at_once_and_the_node_stays_ready(
    registry: MoodyRegistry, membership: Membership
) -> None:
    await membership.join()
    other = replace(NODE, meta={"serving-role": "decode"})
    membership.change(other)

    async def told() -> bool:
        return (await registry.nodes()).nodes[0].registration == other

    await until_true(told)
    assert await health(registry) is Health.PASSING


async def test_readiness_is_told_at_once(registry: MoodyRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Membership(registry, Registration(node_id="core-1", address="a:1", ttl_s=60.0))
    await slow.join()
    slow.set_ready(False)
    await until_health(registry, Health.CRITICAL)
    slow.set_ready(True)
    await until_health(registry, Health.PASSING)
    await slow.leave()


async def test_a_registry_that_forgot_the_node_gets_it_again(registry: MoodyRegistry, membership: Membership) -> None:
    await membership.join()
    await registry.lose_everything()
    await until_health(registry, Health.PASSING)


@pytest.mark.parametrize("trouble", [NodeUnreachable("x"), Expired("x"), Overloaded("x"), Internal("x")])
async def test_trouble_of_any_kind_is_outlived(
    registry: MoodyRegistry, membership: Membership, trouble: MeshError
) -> None:
    await membership.join()
    registry.trouble = trouble
    beats = len(registry.calls)
    await until(lambda: len(registry.calls) > beats + 3)
    await registry.lose_everything()
    registry.trouble = None
    await until_health(registry, Health.PASSING)


async def test_registering_again_may_fail_too(
    registry: MoodyRegistry, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    await membership.join()
    register, tries = registry.register, 0

    async def full(registration: Registration) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise Overloaded("the disk is full")
        await register(registration)

    monkeypatch.setattr(registry, "register", full)
    await registry.lose_everything()
    await until(lambda: tries >= 4)


async def test_leaving_without_a_registry(registry: MoodyRegistry, membership: Membership) -> None:
    await membership.join()
    registry.trouble = NodeUnreachable("gone")
    await membership.leave()


async def test_joining_without_a_registry_is_an_error(registry: MoodyRegistry, membership: Membership) -> None:
    registry.trouble = NodeUnreachable("gone")
    with pytest.raises(NodeUnreachable):
        await membership.join()


async def test_a_bug_in_the_registry_client_does_not_silence_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[str] = []

    class Buggy:
        async def register(self, registration: object) -> None:
            return

        async def deregister(self, node_id: str) -> None:
            return

        async def heartbeat(self, node_id: str, *, ready: bool) -> None:
            beats.append(node_id)
            if len(beats) == 2:
                raise ZeroDivisionError("a bug")

    monkeypatch.setattr(membership_module, "_RETRY_S", 0.01)
    registration = replace(NODE, ttl_s=0.03)
    member = Membership(Buggy(), registration)  # type: ignore[arg-type]
    await member.join()
    async with asyncio.timeout(5):
        while len(beats) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await member.leave()
