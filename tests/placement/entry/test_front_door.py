"""The front door over a mesh in memory: shapes, failures on the way, policies that not every node has heard of."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import (
    Expired,
    InvalidRequest,
    StalePlan,
)
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb
from placement.policy.book import PolicyBook
from tests.fakes.mesh import (
    TENANT,
    MemoryMesh,
    ask,
    asking,
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


@pytest.mark.parametrize("shape", [LOCAL, CORE, SPLIT, OFFLOAD])
async def test_every_shape_gives_the_same_tokens_and_leaves_nothing(make_mesh: MakeMesh, shape: int) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    prompt = "a prompt of some length, so that there is something to move " * 3
    want = await reference(mesh, request_of(prompt, shape=LOCAL, max_tokens=60))
    answer = await ask(mesh.door, request_of(prompt, shape=shape, max_tokens=60))
    assert answer.ids == want
    assert answer.decision is not None
    assert answer.finish is not None
    assert answer.decision.plan.shape == shape
    assert answer.finish.reason == common.FINISH_REASON_LENGTH
    assert answer.finish.usage.completion_tokens == 60
    assert answer.finish.usage.prompt_tokens == len(prompt)
    moved = shape in (SPLIT, OFFLOAD)
    assert [m.cause for m in answer.migrations] == (["plan"] if moved else [])
    assert len(mesh.transfers) == (1 if moved else 0)
    assert set(answer.by_node) <= {"core-1", "paris"}
    await until(lambda: mesh.door.running == 0)
    for node in mesh.nodes.values():
        await settle(node)


async def test_metrics_count_each_request_once(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    await ask(mesh.door, request_of("hello", shape=LOCAL, max_tokens=5))
    with pytest.raises(InvalidRequest):
        await ask(mesh.door, request_of("hello", label="none"))
    mesh.nodes["paris"].refuse_runs = [InvalidRequest("no")]
    with pytest.raises(InvalidRequest):
        await ask(mesh.door, request_of("hello", shape=LOCAL))
    count = {
        (outcome, shape): sample_of(mesh.metrics, "kvmesh_requests_total", outcome=outcome, shape=shape)
        for outcome in ("OK", "INVALID_REQUEST")
        for shape in ("none", "local")
    }
    assert count == {
        ("OK", "local"): 1,
        ("OK", "none"): 0,
        ("INVALID_REQUEST", "none"): 1,
        ("INVALID_REQUEST", "local"): 1,
    }
    assert sample_of(mesh.metrics, "kvmesh_request_ttft_seconds_count", shape="local") == 1
    assert sample_of(mesh.metrics, "kvmesh_request_tokens_total", kind="generated") == 5


async def test_stop_strings_end_the_text_before_them(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    whole = await ask(mesh.door, request_of("abc", max_tokens=20))
    stop = whole.text[7:9]
    at = whole.text.index(stop)
    answer = await ask(mesh.door, request_of("abc", max_tokens=20, stop=[stop]))
    assert answer.text == whole.text[:at]
    assert answer.finish is not None
    assert answer.finish.stop_string == stop
    assert answer.finish.reason == common.FINISH_REASON_STOP


async def test_text_that_was_held_back_comes_before_the_finish(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    whole = await ask(mesh.door, request_of("abc", max_tokens=6))
    almost = whole.text[-1] + "!"  # its first character comes as the very last one
    answer = await ask(mesh.door, request_of("abc", max_tokens=6, stop=[almost]))
    assert answer.text == whole.text


async def test_a_node_that_dies_is_replaced_along_the_plan(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    want = await reference(mesh, request_of("once upon a time", shape=LOCAL, max_tokens=60))
    async with asking(mesh.door, request_of("once upon a time", max_tokens=60), tokens=10) as (answer, task):
        first = answer.by_node[0]
        other = {"core-1": "paris", "paris": "core-1"}[first]
        await mesh.nodes[first].kill()
        await task
        assert answer.ids == want
        assert answer.by_node[-1] == other
        assert [(m.cause, m.recomputed, m.from_node_id, m.to_node_id) for m in answer.migrations] == [
            ("fallback", True, first, other)
        ]
    assert sample_of(mesh.metrics, "kvmesh_request_moves_total", cause="fallback", outcome="OK") == 1


async def test_no_fallback_where_policy_allows_no_other_node(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(label="restricted", max_tokens=200), tokens=3) as (answer, task):
        await mesh.nodes["paris"].kill()
        with pytest.raises(Exception, match="paris is gone"):
            await task
        assert set(answer.by_node) == {"paris"}
    assert mesh.nodes["core-1"].orders == []


async def test_the_deadline_ends_a_request_and_frees_it(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.01)
    with pytest.raises(Expired):
        await ask(mesh.door, request_of(max_tokens=900, deadline_s=0.1))
    await settle(mesh.nodes["paris"])


async def test_a_run_that_a_node_ends_without_an_outcome_is_not_waited_for(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh("paris", entry="paris")

    async def nothing(order: object) -> object:
        return
        yield

    monkeypatch.setattr(mesh.nodes["paris"], "run", nothing)
    with pytest.raises(Exception, match="without an outcome"):
        await ask(mesh.door, request_of())


async def test_a_bug_in_a_port_is_an_internal_error(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh("paris", entry="paris")

    async def broken(order: object) -> object:
        raise KeyError("secret prompt")
        yield

    monkeypatch.setattr(mesh.nodes["paris"], "run", broken)
    with pytest.raises(Exception, match=r"running at paris failed: KeyError$"):
        await ask(mesh.door, request_of())


async def test_a_bug_in_the_entry_still_frees_the_node(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(max_tokens=500, shape=LOCAL), tokens=3) as (answer, task):
        live = mesh.door._live[answer.request_id]

        def broken(token_id: int) -> str:
            raise IndexError(token_id)

        monkeypatch.setattr(live._text, "push", broken)
        with pytest.raises(Exception, match="the entry failed: IndexError"):
            await task
    await until(lambda: mesh.door.running == 0)
    await settle(mesh.nodes["paris"])
    assert sample_of(mesh.metrics, "kvmesh_requests_total", outcome="INTERNAL", shape="local") == 1


async def test_a_node_that_has_not_heard_of_the_policy_yet_is_asked_again(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="placement-1")
    mesh.node_book = PolicyBook()

    async def news() -> None:
        await until(lambda: len(mesh.nodes["core-1"].orders) >= 2)
        mesh.node_book = None

    telling = asyncio.create_task(news())
    answer = await ask(mesh.door, request_of(label="public"))
    await telling
    assert len(answer.ids) == 12
    assert answer.migrations == []


async def test_kv_waits_for_a_policy_too(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    prompt = "long enough to be moved " * 5
    want = await reference(mesh, request_of(prompt, shape=LOCAL))
    mesh.node_book = PolicyBook.of([(TENANT, "version: 1\nrules: {internal: {sites: [nowhere]}}", 3)])

    async def news() -> None:
        await until(lambda: len(mesh.nodes["paris"].orders) >= 3)
        mesh.node_book = None

    telling = asyncio.create_task(news())
    answer = await ask(mesh.door, request_of(prompt, shape=SPLIT))
    await telling
    assert answer.ids == want


async def test_a_node_that_never_hears_of_the_policy_is_passed_over(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placement.entry.driver._STALE_PATIENCE_S", 0.05)
    monkeypatch.setattr("placement.entry.driver._STALE_PAUSE_S", 0.01)
    mesh = make_mesh("core-1", "core-2", entry="placement-1")
    mesh.nodes["core-1"].refuse_runs = [StalePlan("policy version 1 is not known here yet")] * 100
    mesh.nodes["core-2"].refuse_runs = [StalePlan("policy version 1 is not known here yet")]
    answer = await ask(mesh.door, request_of(label="public"))
    assert set(answer.by_node) == {"core-2"}


async def test_nobody_who_heard_is_a_stale_plan(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.entry.driver._STALE_PATIENCE_S", 0.0)
    mesh = make_mesh("core-1", entry="placement-1")
    mesh.node_book = PolicyBook()
    with pytest.raises(StalePlan, match="policy version 1 of tenant acme is not known here yet"):
        await ask(mesh.door, request_of(label="public"))
