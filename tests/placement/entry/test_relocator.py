"""Requests that leave nodes that drain, are overloaded or far away now; and those that may not."""

from __future__ import annotations

import asyncio

import pytest

from mesh.v1 import inference_pb2 as pb
from placement.entry.relocator import Relocator
from tests.fakes.mesh import MemoryMesh, ask, asking, request_of, sample_of, until
from tests.placement.entry.conftest import MakeMesh


def three(make_mesh: MakeMesh) -> MemoryMesh:
    mesh = make_mesh("core-1", "core-2", "paris", entry="placement-1", step_delay_s=0.001)
    mesh.speeds["core-1"] = (1e6, 1e5)
    return mesh


@pytest.mark.parametrize("cause", ["drain", "overload", "link"])
async def test_a_request_leaves_and_loses_nothing(make_mesh: MakeMesh, cause: str) -> None:
    mesh = three(make_mesh)
    relocator = Relocator(mesh.door, mesh)
    request = request_of("somewhere else please " * 8, max_tokens=150, label="confidential")
    want = (await ask(mesh.door, request)).ids
    async with asking(mesh.door, request, tokens=5) as (answer, task):
        assert answer.by_node[0] == "core-1"
        assert relocator.look() == 0
        node = mesh.nodes["core-1"]
        if cause == "drain":
            node.draining = True
        elif cause == "overload":
            node.waiting = 9
        else:
            node.rtt_s = 2.0
        assert relocator.look() == 1
        assert relocator.look() == 0, "it is on its way"
        await until(lambda: bool(answer.migrations))
        await task
    assert answer.ids == want
    assert [(m.from_node_id, m.to_node_id, m.cause) for m in answer.migrations] == [("core-1", "core-2", cause)]
    assert sample_of(mesh.metrics, "kvmesh_request_moves_total", cause=cause, outcome="OK") == 1
    await relocator.close()


async def test_policy_is_asked_as_ever(make_mesh: MakeMesh) -> None:
    """`restricted` may be at the entry's own site only: it stays, whatever its node goes through."""
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    relocator = Relocator(mesh.door, mesh)
    async with asking(mesh.door, request_of("mine " * 20, label="restricted", max_tokens=100)) as (answer, task):
        mesh.nodes["paris"].draining = True
        assert relocator.look() == 1
        await task
    assert answer.migrations == []
    assert set(answer.by_node) == {"paris"}
    await relocator.close()


async def test_a_wish_is_kept(make_mesh: MakeMesh) -> None:
    mesh = three(make_mesh)
    relocator = Relocator(mesh.door, mesh)
    wish = {"node_id": "core-1", "shape": pb.PLAN_SHAPE_CORE}
    async with asking(mesh.door, request_of("here " * 20, max_tokens=100, **wish)) as (answer, task):
        mesh.nodes["core-1"].draining = True
        assert relocator.look() == 1
        await task
    assert answer.migrations == []
    await relocator.close()


async def test_nobody_goes_where_it_is_no_better(make_mesh: MakeMesh) -> None:
    mesh = three(make_mesh)
    relocator = Relocator(mesh.door, mesh)
    request = request_of("busy " * 20, max_tokens=100, label="confidential")
    async with asking(mesh.door, request) as (answer, task):
        for name in ("core-1", "core-2"):
            mesh.nodes[name].waiting = 9
        assert relocator.look() == 1
        await task
    assert answer.migrations == []
    await relocator.close()


async def test_it_looks_by_itself(make_mesh: MakeMesh) -> None:
    mesh = three(make_mesh)
    relocator = Relocator(mesh.door, mesh, period_s=0.01)
    relocator.start()
    async with asking(mesh.door, request_of("go on " * 20, max_tokens=200, label="confidential")) as (answer, task):
        mesh.nodes["core-1"].draining = True
        await task
    assert [m.cause for m in answer.migrations] == ["drain"]
    await relocator.close()
    await asyncio.sleep(0)
