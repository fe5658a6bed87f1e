"""A site that is cut off goes on under its last policy for as long as that says, and then says why it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mesh.errors import NoCapableNode, NoNodeNow
from mesh.telemetry.metrics import Metrics
from placement.entry.front_door import FrontDoor
from placement.entry.world import NEVER_S
from placement.policy.book import PolicyBook
from placement.policy.model import check_policy, parse_policy
from tests.fakes.mesh import POLICY, TENANT, MemoryMesh, ask, principal, request_of
from tests.placement.entry.conftest import MakeMesh


class Site:
    """The mesh in memory, seen from a site whose last word of it is `age_s` old."""

    def __init__(self, mesh: MemoryMesh, policy: str) -> None:
        mesh.book = PolicyBook.of([(TENANT, policy, 1)])
        self.age_s = 0.0
        metrics = Metrics(node_id="paris", role="edge")  # one door, one registry of figures
        self.door = FrontDoor(replace(mesh.deps, policy_age_s=lambda: self.age_s, metrics=metrics))


@pytest.mark.parametrize(("most", "age_s", "goes"), [
    ("", 1e9, True), ("offline_max_s: 60", 60.0, True), ("offline_max_s: 60", 60.5, False),
    ("offline_max_s: 0", 0.0, True), ("offline_max_s: 0", 1.0, False), ("offline_max_s: 60", float("inf"), False),
])  # fmt: skip
async def test_as_long_as_policy_says(make_mesh: MakeMesh, most: str, age_s: float, goes: bool) -> None:
    site = Site(make_mesh("paris", entry="paris"), f"{POLICY}\n{most}\n")
    site.age_s = age_s
    request = request_of("hello", max_tokens=4)
    if goes:
        assert len((await ask(site.door, request)).ids) == 4
        return
    with pytest.raises(NoNodeNow, match="has not heard from the mesh") as caught:
        await ask(site.door, request)
    assert caught.value.details["rule"] == "offline_max_s"


async def test_what_runs_goes_on_and_explain_says_why_nothing_new_does(make_mesh: MakeMesh) -> None:
    site = Site(make_mesh("paris", entry="paris", step_delay_s=0.005), f"{POLICY}\noffline_max_s: 60\n")
    running = asyncio.create_task(ask(site.door, request_of("hello", max_tokens=40)))
    await asyncio.sleep(0.05)
    site.age_s = 61.0
    explained = await site.door.explain(principal(), request_of("hello"))
    assert explained.refusal_reason == "NO_NODE_NOW"
    assert "offline" in explained.refusal or "alone" in explained.refusal
    assert len((await running).ids) == 40
    site.age_s = 0.0  # connected again
    assert (await ask(site.door, request_of("hello", max_tokens=4))).finish is not None


async def test_a_site_that_never_heard_of_the_mesh_does_not_say_never(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    request = request_of("hello", label="public")  # for the core only, of which nothing is known here
    with pytest.raises(NoCapableNode):
        await ask(mesh.door, request)
    mesh.snapshot_age_s = lambda: NEVER_S  # type: ignore[method-assign]
    with pytest.raises(NoNodeNow, match="not heard of the mesh since it started"):
        await ask(mesh.door, request)


@pytest.mark.parametrize("wrong", ["-1", "soon", ".inf", ".nan", "[1]"])
def test_what_is_no_time_is_refused(wrong: str) -> None:
    (problem,) = check_policy(f"{POLICY}\noffline_max_s: {wrong}\n")
    assert problem.path == "offline_max_s"


def test_a_policy_without_it_has_no_limit() -> None:
    assert parse_policy(POLICY, version=1).offline_max_s is None
