"""Moves that somebody asks for, and what an entry tells without running anything."""

from __future__ import annotations

import asyncio
import json

import pytest

from mesh.errors import (
    Cancelled,
    InvalidRequest,
    NoNodeNow,
    NotFound,
    PolicyDenied,
    StalePlan,
    UnknownNode,
)
from mesh.identity.principal import AccessRole
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from placement.policy.book import PolicyBook
from tests.fakes.mesh import (
    POLICY,
    TENANT,
    MemoryMesh,
    ask,
    asking,
    principal,
    request_of,
    sample_of,
    settle,
    until,
)
from tests.placement.entry.conftest import MakeMesh

LOCAL, CORE, SPLIT, OFFLOAD = (
    pb.PLAN_SHAPE_LOCAL,
    pb.PLAN_SHAPE_CORE,
    pb.PLAN_SHAPE_SPLIT,
    pb.PLAN_SHAPE_OFFLOAD,
)


async def reference(mesh: MemoryMesh, request: pb.GenerateRequest) -> list[int]:
    """The tokens that the toy model gives without any move."""
    return (await ask(mesh.door, request)).ids


@pytest.mark.parametrize(("shape", "source", "target"), [(LOCAL, "paris", "core-1"), (CORE, "core-1", "paris")])
@pytest.mark.parametrize("by", ["node", "tier"])
async def test_a_running_request_moves_both_ways(
    make_mesh: MakeMesh, shape: int, source: str, target: str, by: str
) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    request = request_of("move me along please " * 6, shape=shape, max_tokens=120)
    want = await reference(mesh, request)
    async with asking(mesh.door, request, tokens=8) as (answer, task):
        tier = "core" if target == "core-1" else "edge"
        where = {"node_id": target} if by == "node" else {"tier": tier}
        moved = await mesh.door.migrate(
            principal("ops", AccessRole.OPERATOR), admin.MigrateRequest(request_id=answer.request_id, **where)
        )
        assert (moved.from_node_id, moved.to_node_id) == (source, target)
        assert moved.kv_tokens > 0
        await task
    assert answer.ids == want
    assert [(m.from_node_id, m.to_node_id, m.cause, m.recomputed) for m in answer.migrations] == [
        (source, target, "operator", False)
    ]
    assert answer.by_node == [source] * answer.migrations[0].offset_tokens + [target] * (
        120 - answer.migrations[0].offset_tokens
    )
    assert sample_of(mesh.metrics, "kvmesh_request_moves_total", cause="operator", outcome="OK") == 1


@pytest.mark.parametrize(("shape", "source", "target"), [(LOCAL, "paris", "core-1"), (CORE, "core-1", "paris")])
@pytest.mark.parametrize("tactic", ["PRECOPY", "STOP_AND_COPY", "REPLAY"])
async def test_every_tactic_gives_the_same_tokens(
    make_mesh: MakeMesh, shape: int, source: str, target: str, tactic: str
) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    request = request_of("move me along please " * 6, shape=shape, max_tokens=120)
    want = await reference(mesh, request)
    async with asking(mesh.door, request, tokens=8) as (answer, task):
        move = admin.MigrateRequest(
            request_id=answer.request_id, node_id=target, tactic=getattr(admin, f"MOVE_TACTIC_{tactic}")
        )
        moved = await mesh.door.migrate(None, move)
        assert (moved.from_node_id, moved.to_node_id) == (source, target)
        assert bool(moved.kv_tokens) == (tactic != "REPLAY")
        await task
    assert answer.ids == want
    assert [(m.to_node_id, m.recomputed) for m in answer.migrations] == [(target, tactic == "REPLAY")]
    assert answer.by_node[-1] == target


async def test_from_site_to_site_a_relay_is_named_and_holds_nothing(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", "osaka", entry="placement-1", step_delay_s=0.001)
    request = request_of("follow me over there " * 6, node_id="paris", max_tokens=150)
    want = await reference(mesh, request)
    async with asking(mesh.door, request, tokens=8) as (answer, task):
        moved = await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, node_id="osaka"))
        assert moved.kv_tokens > 0
        await task
    assert answer.ids == want
    assert answer.finish is not None
    body = json.loads(answer.finish.receipt.record.body)
    assert body["relays"] == ["placement-1"]
    assert sorted(body["held_kv"]) == sorted(body["saw_prompt"]) == ["osaka", "paris"]
    assert [m["shape"] for m in body["migrations"]] == ["follow"]


async def test_a_policy_may_forbid_relays(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", "osaka", entry="placement-1", step_delay_s=0.001)
    mesh.book = PolicyBook.of([(TENANT, POLICY + "relay: forbidden\n", 2)])
    async with asking(mesh.door, request_of("stay here " * 12, node_id="paris", max_tokens=200)) as (answer, _):
        with pytest.raises(PolicyDenied) as caught:
            await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, node_id="osaka"))
        assert caught.value.details["rule"] == "relay"


async def test_a_tactic_that_does_not_exist_is_refused(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of("stay " * 20, shape=LOCAL, max_tokens=200)) as (answer, _):
        move = admin.MigrateRequest(request_id=answer.request_id, node_id="core-1", tactic=99)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="tactic"):
            await mesh.door.migrate(None, move)


async def test_a_thin_link_replays_instead_of_shipping(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    mesh.goodput_bytes_per_s = 2000.0
    async with asking(mesh.door, request_of("thin " * 20, shape=LOCAL, max_tokens=200), tokens=8) as (answer, task):
        moved = await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, node_id="core-1"))
        assert moved.kv_wire_bytes == 0
        await task
    assert [m.recomputed for m in answer.migrations] == [True]


async def test_there_and_back(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    request = request_of("there and back again " * 4, shape=LOCAL, max_tokens=200)
    want = await reference(mesh, request)
    async with asking(mesh.door, request, tokens=5) as (answer, task):
        for tier in ("core", "edge", "core"):
            await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier=tier))
        await task
    assert answer.ids == want
    assert [m.to_node_id for m in answer.migrations] == ["core-1", "paris", "core-1"]


async def test_a_second_move_waits_for_the_first_to_end(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of("busy " * 20, shape=LOCAL, max_tokens=300), tokens=3) as (answer, task):
        move = admin.MigrateRequest(request_id=answer.request_id, tier="core")
        first = asyncio.create_task(mesh.door.migrate(None, move))
        await asyncio.sleep(0)
        with pytest.raises(StalePlan):
            await mesh.door.migrate(None, move)
        first.cancel()  # who asked leaves; the move goes on, and a second one is still refused
        await asyncio.gather(first, return_exceptions=True)
        if not answer.migrations:
            with pytest.raises(StalePlan):
                await mesh.door.migrate(None, move)
        await until(lambda: bool(answer.migrations))
        back = await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, node_id="paris"))
        assert (back.from_node_id, back.to_node_id) == ("core-1", "paris")
        await task
    assert [m.to_node_id for m in answer.migrations] == ["core-1", "paris"]


async def test_a_client_that_leaves_in_mid_move_frees_both_ends(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.002)
    async with asking(mesh.door, request_of("leave in the middle " * 8, shape=LOCAL, max_tokens=700), tokens=3) as (
        answer,
        _,
    ):
        move = admin.MigrateRequest(request_id=answer.request_id, tier="core")
        moving = asyncio.create_task(mesh.door.migrate(None, move))
        await until(lambda: len(mesh.nodes["paris"].orders) == 2)
    outcome = (await asyncio.gather(moving, return_exceptions=True))[0]
    assert isinstance(outcome, Cancelled | StalePlan | NotFound) or outcome.to_node_id == "core-1"
    await until(lambda: mesh.door.running == 0)
    for node in mesh.nodes.values():
        await settle(node)


async def test_a_target_that_dies_in_mid_move_leaves_the_request_where_it_was(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    request = request_of("stay where you are " * 8, shape=LOCAL, max_tokens=150)
    want = await reference(mesh, request)
    async with asking(mesh.door, request, tokens=3) as (answer, task):
        moving = asyncio.create_task(
            mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier="core"))
        )
        await until(lambda: len(mesh.nodes["paris"].orders) == 3)
        await mesh.nodes["core-1"].kill()
        await asyncio.gather(moving, return_exceptions=True)
        await task
    assert answer.ids == want
    assert answer.by_node[-1] == "paris"


async def test_a_move_is_held_to_the_policy(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", "lyon", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(label="restricted", max_tokens=900), tokens=2) as (answer, task):
        for target in ({"tier": "core"}, {"node_id": "core-1"}, {"node_id": "lyon"}):
            with pytest.raises(PolicyDenied, match="restricted"):
                await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, **target))
        assert not task.done()
    assert mesh.nodes["core-1"].orders == mesh.nodes["lyon"].orders == []


async def test_a_move_is_held_to_the_policy_of_kv(make_mesh: MakeMesh) -> None:
    policy = POLICY + "kv_rules:\n  internal: {tiers: [edge]}\n"
    mesh = make_mesh("core-1", "paris", entry="paris", policy=policy, step_delay_s=0.001)
    async with asking(mesh.door, request_of(shape=LOCAL, max_tokens=900), tokens=2) as (answer, _):
        with pytest.raises(PolicyDenied, match="KV with label internal") as caught:
            await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier="core"))
        assert caught.value.details["rule"] == "kv_rules.internal"


@pytest.mark.parametrize(
    ("target", "error", "field"),
    [
        ({"node_id": "nowhere"}, NotFound, "node_id"),
        ({"tier": "moon"}, InvalidRequest, "tier"),
        ({}, InvalidRequest, "tier"),
        ({"node_id": "paris"}, InvalidRequest, "node_id"),
        ({"tier": "edge"}, InvalidRequest, "tier"),
    ],
)
async def test_bad_targets_of_a_move(
    make_mesh: MakeMesh, target: dict[str, str], error: type[Exception], field: str
) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(shape=LOCAL, max_tokens=900), tokens=2) as (answer, _):
        with pytest.raises(error) as caught:
            await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, **target))
        assert caught.value.details["field"] == field  # type: ignore[attr-defined]


async def test_a_move_to_a_node_that_is_down_names_it(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(shape=LOCAL, max_tokens=900), tokens=2) as (answer, _):
        await mesh.nodes["core-1"].kill()
        with pytest.raises(NoNodeNow) as caught:
            await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier="core"))
        assert caught.value.details["node"] == "core-1"


async def test_an_ended_request_does_not_move(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    answer = await ask(mesh.door, request_of())
    with pytest.raises(NotFound, match="has ended"):
        await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier="core"))


async def test_explain_runs_nothing_and_says_why(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    told = await mesh.door.explain(principal(), request_of(label="public"))
    assert told.decision.plan.rule == "rules.public"
    assert told.decision.request_id == ""
    refused = {v.node_id: list(v.refused) for v in told.nodes}
    assert refused["core-1"] == []
    assert any("label" in reason for reason in refused["paris"])
    await mesh.nodes["core-1"].kill()
    told = await mesh.door.explain(principal(), request_of(label="public"))
    assert told.refusal_reason == "NO_NODE_NOW"
    assert "core-1" in told.refusal
    with pytest.raises(UnknownNode):
        await mesh.door.explain(principal(), request_of(node_id="nowhere"))
    assert mesh.nodes["paris"].orders == []


async def test_models_are_those_that_the_tenant_may_use(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    (model,) = mesh.door.models(principal())
    assert (model.id, model.max_context_tokens, list(model.node_ids)) == ("toy", 1024, ["core-1", "paris"])
    mesh.book = PolicyBook.of([(TENANT, "version: 1\nmodels: {allowed: [other]}", 2)])
    assert mesh.door.models(principal()) == []
    with pytest.raises(PolicyDenied):
        await ask(mesh.door, request_of(model="toy"))


async def test_tokenize(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    told = await mesh.door.tokenize(principal(), pb.TokenizeRequest(text="ab"))
    assert list(told.tokens.ids) == [100, 101]
    with pytest.raises(InvalidRequest):
        await mesh.door.tokenize(principal(), pb.TokenizeRequest())
