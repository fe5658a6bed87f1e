"""Prefill at one core node, decode at another, through the whole entry: what is computed where, and every fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mesh.errors import NoCapableNode, Overloaded
from mesh.kv.slab import KvSlab
from mesh.node.engine import RunId
from mesh.node.port import KvOrder, RunOrder
from mesh.node.serving_role import ServingRole
from mesh.v1 import inference_pb2 as pb
from placement.policy.book import PolicyBook
from tests.fakes.mesh import TENANT, Answer, MemoryMesh, ask, asking, principal, request_of, until
from tests.placement.entry.conftest import MakeMesh

APART = pb.PLAN_SHAPE_DISAGGREGATED
PROMPT = "a long prompt that is prefilled in one place and goes on in another. " * 4
Roles = dict[str, str]


def apart(make_mesh: MakeMesh, roles: Roles, **options: Any) -> MemoryMesh:
    """A mesh whose core nodes ("core-p1" ...) have these roles, seen from the placement service."""
    mesh = make_mesh(*roles, entry="placement-1", **{"step_delay_s": 0.001, **options})
    for name, role in roles.items():
        mesh.nodes[name].host.set_role(ServingRole(role))
    return mesh


async def want(make_mesh: MakeMesh, request: pb.GenerateRequest) -> list[int]:
    """What one node alone gives."""
    anywhere = pb.GenerateRequest()
    anywhere.CopyFrom(request)
    anywhere.ClearField("placement")
    return (await ask(make_mesh("core-1", entry="placement-1").door, anywhere)).ids


def runs(mesh: MemoryMesh, name: str) -> list[RunOrder]:
    return [order for order in mesh.nodes[name].orders if isinstance(order, RunOrder)]


def legs(answer: Answer) -> list[tuple[str, str]]:
    assert answer.finish is not None
    found = [json.loads(leg.body) for leg in answer.finish.receipt.legs]
    return [(leg["node"], leg["kind"]) for leg in found]


PAIR = {"core-p1": "prefill", "core-d1": "decode"}
FOUR = {"core-p1": "prefill", "core-p2": "prefill", "core-d1": "decode", "core-d2": "decode"}


async def test_the_tokens_are_those_of_one_node_and_the_receipt_says_who_did_what(make_mesh: MakeMesh) -> None:
    mesh, request = apart(make_mesh, PAIR), request_of(PROMPT, max_tokens=20)
    answer = await ask(mesh.door, request)
    assert answer.ids == await want(make_mesh, request)
    assert answer.by_node == ["core-d1"] * 20
    assert answer.decision is not None
    plan = answer.decision.plan
    assert [(leg.kind, leg.node_id) for leg in plan.legs] == [
        ("prefill", "core-p1"),
        ("move_kv", "core-d1"),
        ("decode", "core-d1"),
    ]
    assert legs(answer) == [("core-p1", "prefill"), ("core-d1", "decode")]
    assert answer.finish is not None
    body = json.loads(answer.finish.receipt.record.body)
    assert (body["plan"]["shape"], sorted(body["held_kv"])) == ("disaggregated", ["core-d1", "core-p1"])
    assert [m.codec for m in answer.migrations] == ["raw"]  # the pools' own elements: nothing is lost


async def test_the_decode_node_computes_one_token_of_the_prompt(make_mesh: MakeMesh) -> None:
    mesh = apart(make_mesh, PAIR)
    await ask(mesh.door, request_of(PROMPT))
    (run,) = runs(mesh, "core-d1")
    assert run.kv_from is not None
    load = await mesh.nodes["core-d1"].engine.load()
    assert load.cached_tokens_total in (0, len(PROMPT) - 1)
    report = mesh.transfers[0][2]
    assert len(run.token_ids) - report.tokens == 1


async def test_a_follow_up_sends_what_is_new(make_mesh: MakeMesh) -> None:
    mesh = apart(make_mesh, PAIR)
    await ask(mesh.door, request_of(PROMPT))
    await ask(mesh.door, request_of(PROMPT + "and what came then? " * 4))
    first, second = (report for _, _, report in mesh.transfers)
    assert first.skipped_tokens == 0
    assert second.skipped_tokens >= len(PROMPT) // 16 * 16 - 16


async def test_explain_names_the_pair_and_why_others_are_not_in_it(make_mesh: MakeMesh) -> None:
    mesh = apart(make_mesh, PAIR)
    response = await mesh.door.explain(principal(), request_of(PROMPT, shape=APART))
    assert response.decision.plan.shape == APART
    assert {v.node_id: list(v.refused) for v in response.nodes}["core-p1"] == []
    mesh.nodes["core-p1"].host.set_role(ServingRole.DECODE)
    response = await mesh.door.explain(principal(), request_of(PROMPT))
    assert "role: " in {v.node_id: list(v.refused) for v in response.nodes}["core-p1"][0]


async def test_a_mesh_of_decode_nodes_refuses_clearly(make_mesh: MakeMesh) -> None:
    mesh = apart(make_mesh, {"core-d1": "decode", "core-d2": "decode"})
    with pytest.raises(NoCapableNode, match="2 prefill or decode only, and no node is there for the other half"):
        await ask(mesh.door, request_of(PROMPT))
    assert not runs(mesh, "core-d1")


async def test_without_a_prefill_node_one_that_does_both_is_used(make_mesh: MakeMesh) -> None:
    mesh = apart(make_mesh, {"core-1": "both", "core-d1": "decode"})
    request = request_of(PROMPT)
    assert (await ask(mesh.door, request)).ids == await want(make_mesh, request)
    request = request_of(PROMPT, shape=APART)
    assert (await ask(mesh.door, request)).by_node[0] == "core-d1"


@pytest.mark.parametrize("dies", ["core-d", "core-p"])
async def test_a_node_that_dies_while_kv_moves_is_gone_round(
    make_mesh: MakeMesh, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = apart(make_mesh, FOUR, step_delay_s=0.01)
    request = request_of(PROMPT, max_tokens=10)
    task = asyncio.create_task(ask(mesh.door, request))
    await until(lambda: any(node.host.statistics().transfers for node in mesh.nodes.values()))
    await asyncio.sleep(0.03)  # some chunks are over, some are not
    busy = [name for name, node in mesh.nodes.items() if node.host.statistics().transfers and name.startswith(dies)]
    node = mesh.nodes[busy[0]]
    if dies == "core-d":  # its transfer is a call of the entry's own task here: its engine goes, and it with it
        node.up = False
        mesh.network.hosts.pop(busy[0])
        await node.engine.close()
    else:
        await node.kill()
    answer = await task
    assert answer.ids == await want(make_mesh, request)
    assert busy[0] not in answer.by_node


async def test_a_prefill_node_that_dies_after_its_prefill_is_not_missed(make_mesh: MakeMesh) -> None:
    mesh, request = apart(make_mesh, PAIR), request_of(PROMPT, max_tokens=60)
    async with asking(mesh.door, request, tokens=2) as (answer, task):
        await mesh.nodes["core-p1"].kill()
        await task
    assert answer.ids == await want(make_mesh, request)
    assert set(answer.by_node) == {"core-d1"}


async def test_a_decode_node_that_dies_is_replaced_by_another_pair(make_mesh: MakeMesh) -> None:
    mesh, request = apart(make_mesh, FOUR), request_of(PROMPT, max_tokens=60)
    async with asking(mesh.door, request, tokens=5) as (answer, task):
        gone = answer.by_node[-1]
        await mesh.nodes[gone].kill()
        await task
    assert answer.ids == await want(make_mesh, request)
    assert set(answer.by_node) == {"core-d1", "core-d2"}
    other = ({"core-d1", "core-d2"} - {gone}).pop()
    assert runs(mesh, other)[-1].kv_from is not None  # it did not prefill: the rest came as KV too


async def test_a_transfer_that_is_refused_goes_another_way(make_mesh: MakeMesh) -> None:
    """The entry has a policy that a node has not heard of: the node's own border holds."""
    mesh = apart(make_mesh, {**PAIR, "core-1": "both"})
    mesh.nodes["core-d1"].refuse_runs = []
    strict = "version: 1\nrules: {internal: {anywhere: true}}\nkv_rules: {internal: {nodes: [core-1, core-p1]}}"
    mesh.node_book = PolicyBook.of([(TENANT, strict, 1)])
    request = request_of(PROMPT, shape=APART, node_id="core-d1")
    with pytest.raises(Exception, match="may not be at core-d1"):
        await ask(mesh.door, request)
    for node in mesh.nodes.values():
        assert node.engine.hold_ids == []


@pytest.mark.parametrize("to", ["decode", "both"])
async def test_roles_change_under_load_and_nothing_is_lost(make_mesh: MakeMesh, to: str) -> None:
    mesh = apart(make_mesh, {**FOUR, "core-1": "both"}, step_delay_s=0.001)
    requests = [request_of(f"{n}: {PROMPT}", max_tokens=30) for n in range(8)]
    wanted = [await want(make_mesh, request) for request in requests]
    tasks = [asyncio.create_task(ask(mesh.door, request)) for request in requests[:4]]
    await until(lambda: sum(node.host.statistics().running for node in mesh.nodes.values()) >= 2)
    mesh.nodes["core-p1"].host.set_role(ServingRole(to))
    mesh.nodes["core-d1"].host.set_role(ServingRole.PREFILL)
    tasks += [asyncio.create_task(ask(mesh.door, request)) for request in requests[4:]]
    await asyncio.sleep(0.02)
    mesh.nodes["core-d1"].host.set_role(ServingRole.DECODE)
    assert [answer.ids for answer in await asyncio.gather(*tasks)] == wanted


async def test_a_plan_that_a_new_role_overtook_falls_back(make_mesh: MakeMesh) -> None:
    mesh = apart(make_mesh, {**PAIR, "core-1": "both"})
    request = request_of(PROMPT, shape=APART, node_id="core-d1")
    port = mesh.nodes["core-d1"]
    moved = port.move_kv

    async def changed(order: KvOrder) -> Any:
        mesh.nodes["core-p1"].host.set_role(ServingRole.DECODE)  # after the decision, before the prefill
        return await moved(order)

    port.move_kv = changed  # type: ignore[method-assign]
    answer = await ask(mesh.door, request)
    assert answer.ids == await want(make_mesh, request)
    assert legs(answer)[0][0] == "core-1"


async def test_a_slow_decode_node_bounds_the_prefill_node_and_loses_nothing(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = apart(make_mesh, PAIR)
    source, target = mesh.nodes["core-p1"], mesh.nodes["core-d1"]
    write, most = target.engine.write_kv, 0

    async def slow(run_id: RunId, slab: KvSlab) -> None:
        nonlocal most
        most = max(most, (await source.engine.load()).kv_used_tokens)
        await asyncio.sleep(0.02)
        await write(run_id, slab)

    monkeypatch.setattr(target.engine, "write_kv", slow)
    requests = [request_of(f"{n:02}{PROMPT}", max_tokens=8) for n in range(24)]  # 280 tokens each, the pool has 4096
    done = await asyncio.gather(*(ask(mesh.door, r) for r in requests), return_exceptions=True)
    refused = [d for d in done if isinstance(d, BaseException)]
    assert all(isinstance(error, Overloaded) for error in refused)
    assert len(refused) <= 8
    for request, answer in zip(requests, done, strict=True):
        if isinstance(answer, Answer):
            assert answer.ids == await want(make_mesh, request)
    assert 0 < most <= 4096
