"""Rate limits, fair shares, refusals' receipts and continuations through a whole front door over fake engines."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesh.errors import Internal, InvalidRequest, MeshError, NoNodeNow, Overloaded, PolicyDenied
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb
from placement.decide.types import Plan
from placement.entry import continuation
from placement.entry.fair_queue import Ticket
from placement.entry.gate import Gate, window_of
from placement.entry.intake import Accepted
from placement.entry.orders import Work
from placement.policy.book import PolicyBook
from tests.fakes.mesh import POLICY, TENANT, MemoryMesh, ask, principal, request_of, sample_of, toy_model, until
from tests.placement.entry.conftest import MakeMesh


def body_of(receipt: common.Receipt) -> dict[str, Any]:
    found = json.loads(receipt.record.body)
    assert isinstance(found, dict)
    return found


async def refused(mesh: MemoryMesh, request: pb.GenerateRequest, kind: type[MeshError]) -> MeshError:
    with pytest.raises(kind) as caught:
        await ask(mesh.door, request)
    return caught.value


async def test_over_its_rate_a_tenant_is_told_when_to_come_back(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + "limits: {requests_per_minute: 12}\n")
    await ask(mesh.door, request_of())
    await ask(mesh.door, request_of())
    error = await refused(mesh, request_of(), Overloaded)
    assert error.details["rule"] == "limits.requests_per_minute"
    assert 0.0 < float(error.details["retry_after_s"]) <= 5.0
    body = body_of(mesh.receipts.kept[-1])
    assert (body["outcome"], body["rule"]) == ("OVERLOADED", "limits.requests_per_minute")
    assert body["request_id"] == error.details["request_id"]
    assert sample_of(mesh.metrics, "kvmesh_requests_total", outcome="OVERLOADED", shape="none") == 1.0


async def test_tokens_that_were_not_generated_are_given_back(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + "limits: {tokens_per_minute: 1200}\n")  # 200 at once
    # The first letter generated ends it: 8 of 107 tokens are used, so ten of these cost 80 and not 1,070.
    letter = (await ask(mesh.door, request_of())).text[0]
    for _ in range(10):
        await until(lambda: mesh.door.running == 0)
        await ask(mesh.door, request_of(max_tokens=100, stop=[letter]))
    await refused(mesh, request_of(max_tokens=800), Overloaded)


async def test_each_refusal_leaves_a_receipt_without_the_prompt(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    await refused(mesh, request_of("my secret words", label="nonsense"), InvalidRequest)
    await refused(mesh, request_of("my secret words", label="restricted", node_id="core-1"), MeshError)
    first, second = (body_of(r) for r in mesh.receipts.kept)
    assert first["outcome"] == "INVALID_REQUEST"
    assert first["refused_because"] == {"field": "label"}
    assert first["label"] == {"claimed": "nonsense", "effective": ""}
    assert second["label"] == {"claimed": "restricted", "effective": "restricted"}
    assert second["saw_prompt"] == second["held_kv"] == {}
    assert second["policy_version"] == 1
    assert "secret" not in json.dumps([first, second])


async def test_a_flood_of_refusals_is_counted_and_not_written_out(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1")
    for _ in range(130):
        await refused(mesh, request_of(label="nonsense"), InvalidRequest)
    listed = [body_of(r) for r in mesh.receipts.kept]
    assert 100 <= len(listed) <= 110
    mesh.door._refusals._buckets.clear()
    await refused(mesh, request_of(label="nonsense"), InvalidRequest)
    assert sum(1 + body_of(r)["unlisted_before"] for r in mesh.receipts.kept) == 131


async def test_a_refusal_whose_receipt_cannot_be_kept_is_still_that_refusal(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1")

    async def fail(receipt: common.Receipt) -> None:
        raise Overloaded("the disk is full")

    mesh.receipts.append_receipt = fail  # type: ignore[method-assign]
    await refused(mesh, request_of(label="nonsense"), InvalidRequest)


async def test_a_conversation_keeps_its_label(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    first = await ask(mesh.door, request_of("turn one", label="restricted"))
    assert first.decision is not None
    token = first.decision.continuation
    second = await ask(mesh.door, request_of("turn two", label="public", continues=token))
    assert second.decision is not None
    assert second.decision.label == "restricted"
    assert second.decision.continued_label == "restricted"
    assert set(second.by_node) == {"paris"}
    assert body_of(mesh.receipts.kept[-1])["label"] == {
        "claimed": "public", "effective": "restricted", "continued": "restricted",
    }  # fmt: skip
    # Equal words without it are a new conversation, whatever is cached.
    again = await ask(mesh.door, request_of("turn one", label="public"))
    assert again.decision is not None
    assert again.decision.label == "public"


async def test_a_continuation_cannot_be_forged_lowered_or_borrowed(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1")
    salt = mesh.deps.salt
    good = continuation.issue(salt, tenant=TENANT, label="confidential", model="toy")
    assert continuation.label_of(salt, good, tenant=TENANT) == "confidential"
    others = continuation.issue(salt, tenant="other", label="public", model="toy")
    torn = bytes(32) + b'{"tenant": "%s", "label": "\\ud800", "model": "toy"}' % TENANT.encode()
    half = "kmc1." + base64.urlsafe_b64encode(torn).decode()
    for bad in (
        half,
        others,
        good[:-4],
        good + "AAAA",
        "kmc1.",
        "x" * 10,
        "kmc1." + "A" * 2_000,
        good.replace("1", "2", 1),
    ):
        error = await refused(mesh, request_of(continues=bad), InvalidRequest)
        assert error.details["field"] == "continues"


async def test_a_label_that_the_policy_no_longer_knows_counts_as_the_top(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris")
    old = continuation.issue(mesh.deps.salt, tenant=TENANT, label="secret-of-old", model="toy")
    answer = await ask(mesh.door, request_of(label="public", continues=old))
    assert answer.decision is not None
    assert answer.decision.label == "restricted"


async def test_conditions_raise_and_refuse(make_mesh: MakeMesh) -> None:
    policy = (
        POLICY
        + """\
conditions:
  - {when: '"team" in attributes && attributes.team == "payroll"', raise_to: restricted}
  - {when: 'prompt_tokens > 100', deny: use the batch queue}
  - {when: 'has(attributes.broken) && attributes.other == "x"', raise_to: internal}
"""
    )
    mesh = make_mesh("core-1", "paris", entry="paris", policy=policy)
    plain = await ask(mesh.door, request_of(label="public"))
    request = request_of(label="public")
    request.attributes["team"] = "payroll"
    raised = await ask(mesh.door, request)
    assert plain.decision is not None
    assert raised.decision is not None
    assert (plain.decision.label, raised.decision.label) == ("public", "restricted")
    assert list(raised.decision.conditions) == ["conditions[0]"]
    error = await refused(mesh, request_of("long " * 30), PolicyDenied)
    assert error.details["rule"] == "conditions[1]"
    assert "batch queue" in error.message
    request = request_of()
    request.attributes["broken"] = "yes"
    assert (await refused(mesh, request, PolicyDenied)).details["rule"] == "conditions[2]"


async def test_too_many_attributes_are_refused(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1")
    for attributes in ({str(i): "" for i in range(17)}, {"n" * 257: ""}, {"": "x"}, {"name": "v" * 257}):
        request = request_of()
        request.attributes.update(attributes)
        assert (await refused(mesh, request, InvalidRequest)).details["field"] == "attributes"


async def test_an_expired_policy_refuses_everything(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + 'expires: "2020-01-01"\n')
    assert (await refused(mesh, request_of(), PolicyDenied)).details["rule"] == "expires"
    mesh.book = PolicyBook.of([(TENANT, POLICY + 'expires: "2999-01-01T00:00:00Z"\n', 2)])
    await ask(mesh.door, request_of())


async def test_a_permitted_model_answers_where_the_one_asked_for_cannot(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + "models: {downgrade: {large: [absent, toy]}}\n")
    mesh.deps.models["large"] = toy_model(model_id="large")  # type: ignore[index]
    answer = await ask(mesh.door, request_of(model="large"))
    assert answer.decision is not None
    assert answer.decision.model == "toy"
    assert body_of(mesh.receipts.kept[-1])["model"] == "toy"
    mesh.book = PolicyBook.of([(TENANT, POLICY, 2)])
    with pytest.raises((NoNodeNow, MeshError)):
        await ask(mesh.door, request_of(model="large"))


async def test_the_policys_targets_hold_where_a_request_states_none(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + "targets: {ttft_s: 2.5, deadline_s: 20}\n")
    decisions = mesh.door._decisions
    plain = (await decisions.accept(principal(), request_of())).placement
    own = (await decisions.accept(principal(), request_of(ttft_s=1.0, deadline_s=60.0))).placement
    sooner = (await decisions.accept(principal(), request_of(deadline_s=5.0))).placement
    assert (plain.ttft_s, plain.tpot_s, plain.deadline_s) == (2.5, None, 20.0)
    assert (own.ttft_s, own.deadline_s, sooner.deadline_s) == (1.0, 20.0, 5.0)


def test_the_window_follows_what_nodes_compute() -> None:
    mesh = MemoryMesh("core-1", "core-2", entry="core-1")
    assert window_of(mesh.snapshot()) == 16
    idle = mesh.snapshot()
    mesh.nodes["core-2"].up = False
    assert window_of(mesh.snapshot()) == 8
    roomy = replace(idle, kv_free_tokens=np.array([20_480, 10**6]))
    assert window_of(roomy) == 20 + 64
    busy = replace(idle, running=np.array([12, 200]), waiting=np.array([0, 3]))
    assert window_of(busy) == (12 + 12) + (200 + 8)


async def test_the_gate_serves_a_quiet_tenant_in_between() -> None:
    mesh = MemoryMesh("core-1", entry="core-1")  # room for 8
    gate, order = Gate(mesh.snapshot), list[str]()

    async def one(tenant: str) -> None:
        await gate.enter(Ticket(tenant=tenant, band=0, weight=1.0, cost_tokens=100.0))
        order.append(tenant)
        await asyncio.sleep(0.0)
        gate.leave()

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(one("flood"))
        await asyncio.sleep(0)
        group.create_task(one("quiet"))
    assert len(order) == 101
    assert order.index("quiet") < 30
    assert gate.waiting == 0


async def test_who_waits_too_long_is_told_and_leaves_no_trace() -> None:
    mesh = MemoryMesh("core-1", entry="core-1")
    gate = Gate(mesh.snapshot)

    def ticket() -> Ticket:
        return Ticket(tenant="a", band=0, weight=1.0, cost_tokens=1.0)

    for _ in range(8):
        await gate.enter(ticket())
    with pytest.raises(Overloaded) as caught:
        await gate.enter(ticket(), max_wait_s=0.01)
    assert caught.value.details["rule"] == "fair-share"
    assert float(caught.value.details["retry_after_s"]) >= 1.0
    waits = asyncio.create_task(gate.enter(ticket()))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert gate.waiting == 0
    gate.leave()
    await gate.enter(ticket(), max_wait_s=5.0)


async def test_a_turn_that_comes_as_the_wait_ends_is_taken() -> None:
    mesh = MemoryMesh("core-1", entry="core-1")
    gate = Gate(mesh.snapshot)

    def ticket() -> Ticket:
        return Ticket(tenant="a", band=0, weight=1.0, cost_tokens=1.0)

    for _ in range(8):
        await gate.enter(ticket())
    waits = asyncio.create_task(gate.enter(ticket(), max_wait_s=0.01))
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251 - a busy machine: the timer is due in the same round of the loop
    asyncio.get_running_loop().call_soon(gate.leave)
    await waits
    assert (gate._inside, gate.waiting) == (8, 0)


@pytest.mark.parametrize("where", ["accept", "plan_or_downgrade", "work", "continuation"])
async def test_a_bug_leaves_an_outcome_a_receipt_and_a_free_slot(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + "limits: {tokens_per_minute: 6000}\n")

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(mesh.door._decisions, where, broken)
        error = await refused(mesh, request_of(), Internal)
    body = body_of(mesh.receipts.kept[-1])
    assert (body["outcome"], body["request_id"]) == ("INTERNAL", error.details["request_id"])
    assert sample_of(mesh.metrics, "kvmesh_requests_total", outcome="INTERNAL", shape="none") == 1.0
    assert mesh.door._admission._gate._inside == 0
    assert not mesh.door._admitted
    await ask(mesh.door, request_of())


async def test_a_smaller_model_has_what_is_left_of_the_deadline(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh("core-1", entry="core-1", policy=POLICY + "models: {downgrade: {large: [toy]}}\n")
    mesh.deps.models["large"] = toy_model(model_id="large")  # type: ignore[index]
    decisions, request = mesh.door._decisions, request_of(model="large", deadline_s=600.0)
    accepted = await decisions.accept(principal(), request)
    waited = replace(accepted, placement=replace(accepted.placement, deadline_s=590.0))
    found, _ = await decisions.plan_or_downgrade(waited, request)
    assert (found.model.model_id, found.placement.deadline_s) == ("toy", 590.0)


async def test_waiting_is_part_of_the_deadline(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh("core-1", entry="core-1")
    seen = list[float | None]()
    real = mesh.door._decisions.work

    def work(request_id: str, accepted: Accepted, plan: Plan, traceparent: str) -> Work:
        seen.append(accepted.placement.deadline_s)
        return real(request_id, accepted, plan, traceparent)

    async def waits(*args: object, **kwargs: object) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(mesh.door._decisions, "work", work)
    monkeypatch.setattr(mesh.door._admission._gate, "enter", waits)
    monkeypatch.setattr(mesh.door._admission._gate, "leave", lambda: None)
    await ask(mesh.door, request_of(deadline_s=600.0))
    await ask(mesh.door, request_of())
    assert seen[0] is not None
    assert 0.0 < seen[0] <= 600.0 - 0.05
    assert seen[1] is None
