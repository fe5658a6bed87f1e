"""Streams that are left, taken up again, aborted, drained; other tenants."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import (
    Cancelled,
    Draining,
    InvalidRequest,
    NotFound,
    Overloaded,
    PolicyDenied,
)
from mesh.identity.principal import AccessRole
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from placement.entry import front_door as front_door_module
from placement.entry.request_log import RequestLog, RequestStream
from tests.fakes.mesh import (
    Answer,
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


@pytest.mark.parametrize("shape", [LOCAL, CORE, SPLIT])
async def test_a_client_that_leaves_frees_everything(make_mesh: MakeMesh, shape: int) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of("to be left alone " * 4, shape=shape, max_tokens=500), tokens=2):
        assert mesh.door.running == 1
    await until(lambda: mesh.door.running == 0)
    for node in mesh.nodes.values():
        await settle(node)
    assert (
        sample_of(
            mesh.metrics, "kvmesh_requests_total", outcome="CANCELLED", shape=pb.PlanShape.Name(shape)[11:].lower()
        )
        == 1
    )


async def test_a_client_that_leaves_while_its_prompt_is_read_starts_nothing(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    task = asyncio.create_task(ask(mesh.door, request_of("x" * 20_000)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert mesh.door.running == 0
    assert mesh.nodes["paris"].orders == []


async def test_with_a_key_the_rest_comes_from_any_offset(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    request = request_of("go on", max_tokens=40, idempotency_key="k1")
    async with asking(mesh.door, request, tokens=7) as (first, _):
        pass
    seen = len(first.ids)
    assert mesh.door.running == 1
    request.resume_offset_tokens = seen
    rest = await ask(mesh.door, request)
    assert first.ids + rest.ids == (await reference(mesh, request_of("go on", max_tokens=40)))
    assert first.text + rest.text == "".join(chr(97 + i % 26) for i in first.ids + rest.ids)
    assert rest.request_id == first.request_id
    for offset in (0, 1, 39, 40):  # after its end too
        request.resume_offset_tokens = offset
        again = await ask(mesh.door, request)
        assert again.ids == (first.ids + rest.ids)[offset:]
        assert again.finish == rest.finish
    request.resume_offset_tokens = 41
    with pytest.raises(InvalidRequest, match="had 40 tokens"):
        await ask(mesh.door, request)
    assert len(mesh.nodes["paris"].orders) == 2


async def test_one_key_at_the_same_moment_is_one_request(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.entry.intake._INLINE_CHARS", 0)  # all is read off the event loop
    mesh = make_mesh("paris", entry="paris")
    request = request_of("abc", max_tokens=5, idempotency_key="twice")
    a, b = await asyncio.gather(ask(mesh.door, request), ask(mesh.door, request))
    assert a.request_id == b.request_id
    assert a.ids == b.ids
    assert len(mesh.nodes["paris"].orders) == 1


async def test_a_key_names_one_content_and_one_tenant(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    first = await ask(mesh.door, request_of("one", idempotency_key="k"))
    with pytest.raises(InvalidRequest, match="other contents") as caught:
        await ask(mesh.door, request_of("two", idempotency_key="k"))
    assert caught.value.details["field"] == "idempotency_key"
    other = await ask(mesh.door, request_of("two", idempotency_key="k", label="restricted"), principal("rival"))
    assert other.request_id != first.request_id


async def test_resuming_what_is_not_here_is_not_found(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    with pytest.raises(NotFound):
        await ask(mesh.door, request_of(idempotency_key="gone", resume_offset_tokens=3))
    with pytest.raises(InvalidRequest):  # an offset of what?
        await ask(mesh.door, request_of(resume_offset_tokens=3))


async def test_a_request_that_failed_is_done_again_for_its_key(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    mesh.nodes["paris"].refuse_runs = [Overloaded("full")]
    request = request_of("again", idempotency_key="k")
    with pytest.raises(Overloaded):
        await ask(mesh.door, request)
    assert len((await ask(mesh.door, request)).ids) == 12


async def test_who_has_tokens_of_a_failed_request_gets_its_error(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    request = request_of("fail late", max_tokens=500, idempotency_key="k")
    async with asking(mesh.door, request, tokens=5) as (answer, task):
        assert mesh.door.abort(principal(), answer.request_id)
        with pytest.raises(Cancelled):
            await task
    request.resume_offset_tokens = 2
    rest = Answer()
    with pytest.raises(Cancelled):
        await ask(mesh.door, request, into=rest)
    assert rest.ids == answer.ids[2:]


async def test_nobody_coming_back_ends_it(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door_module, "_GRACE_S", 0.02)
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(max_tokens=900, idempotency_key="k"), tokens=2):
        pass
    await until(lambda: mesh.door.running == 0)
    await settle(mesh.nodes["paris"])


async def test_two_readers_see_the_same_and_one_may_leave(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    request = request_of("both", max_tokens=60, idempotency_key="k")
    async with asking(mesh.door, request, tokens=3) as (_, first):
        async with asking(mesh.door, request, tokens=3):
            pass
        answer = await first
    assert len(answer.ids) == 60


async def test_without_a_namespace_nothing_is_started_or_kept(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris")
    allowed = [False]
    salt = mesh.deps.salt

    def checked(tenant: str, label: str, model: str) -> bytes:
        if not allowed[0]:
            raise PolicyDenied("no namespace", rule="tenant-known")
        return salt(tenant, label, model)

    object.__setattr__(mesh.deps, "salt", checked)
    request = request_of(idempotency_key="k")
    with pytest.raises(PolicyDenied):
        await ask(mesh.door, request)
    allowed[0] = True
    assert len((await ask(mesh.door, request)).ids) == 12


async def test_abort_ends_a_request_once(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(max_tokens=900), tokens=2) as (answer, task):
        assert mesh.door.abort(principal(), answer.request_id)
        with pytest.raises(Cancelled):
            await task
    await until(lambda: mesh.door.running == 0)
    assert not mesh.door.abort(principal(), answer.request_id)
    with pytest.raises(NotFound):
        mesh.door.abort(principal(), "paris:0")


async def test_another_tenant_s_request_is_not_found(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    rival, operator = principal("rival"), principal("ops", AccessRole.OPERATOR)
    async with asking(mesh.door, request_of(max_tokens=900), tokens=2) as (answer, task):
        with pytest.raises(NotFound):
            mesh.door.abort(rival, answer.request_id)
        with pytest.raises(NotFound):
            await mesh.door.migrate(rival, admin.MigrateRequest(request_id=answer.request_id, tier="core"))
        assert mesh.door.abort(operator, answer.request_id)
        with pytest.raises(Cancelled):
            await task


async def test_a_drain_lets_what_runs_end_and_takes_nothing_new(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(max_tokens=60), tokens=2) as (_, task):
        draining = asyncio.create_task(mesh.door.drain(30.0))
        await asyncio.sleep(0)
        assert mesh.door.draining
        with pytest.raises(Draining):
            await ask(mesh.door, request_of("late"))
        answer = await task
        await draining
    assert len(answer.ids) == 60


async def test_what_does_not_end_in_time_is_ended_with_draining(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.002)
    async with asking(mesh.door, request_of("slow " * 10, shape=LOCAL, max_tokens=900), tokens=2) as (answer, task):
        moving = asyncio.create_task(
            mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier="core"))
        )
        await until(lambda: len(mesh.nodes["paris"].orders) == 2)
        await mesh.door.drain(0.0)
        with pytest.raises(Draining):
            await task
        await asyncio.gather(moving, return_exceptions=True)
    for node in mesh.nodes.values():
        await settle(node)
    assert sample_of(mesh.metrics, "kvmesh_requests_total", outcome="DRAINING", shape="local") == 1


async def test_a_second_cancellation_does_not_leave_anything(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(max_tokens=900), tokens=2) as (answer, _):
        producer = mesh.door._producers[answer.request_id]
        producer.cancel()
        await asyncio.sleep(0)
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        await settle(mesh.nodes["paris"])
        await until(lambda: mesh.door.running == 0)


async def test_open_requests_are_bounded(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door_module, "MAX_OPEN_REQUESTS", 1)
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    async with asking(mesh.door, request_of(max_tokens=900), tokens=1):
        with pytest.raises(Overloaded, match="the most is 1"):
            await ask(mesh.door, request_of("more"))
    await until(lambda: mesh.door.running == 0)
    assert len((await ask(mesh.door, request_of("more"))).ids) == 12


async def test_the_grace_of_an_earlier_absence_ends_with_it(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    request = request_of(max_tokens=900, idempotency_key="k")
    for _ in range(3):
        async with asking(mesh.door, request, tokens=2):
            assert not mesh.door._alone  # somebody is here: no timer runs
        await until(lambda: len(mesh.door._alone) == 1)
    async with asking(mesh.door, request, tokens=2) as (answer, _):
        assert mesh.door.abort(principal(), answer.request_id)
        await until(lambda: mesh.door.running == 0)
    assert not mesh.door._alone


async def test_clients_that_left_hold_a_bounded_number_of_requests(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door_module, "MAX_ALONE_PER_TENANT", 2)
    mesh = make_mesh("paris", entry="paris", step_delay_s=0.001)
    for number in range(4):
        async with asking(mesh.door, request_of(f"p{number}", max_tokens=900, idempotency_key=f"k{number}"), tokens=1):
            pass
    await until(lambda: mesh.door.running == 2)
    await mesh.door.drain(0.0)


def test_an_ended_request_goes_by_the_clock() -> None:
    log = RequestLog(keep_s=10.0)
    stream = RequestStream("r", "acme", b"f", "k")
    log.add(stream, 0.0)
    stream.end(5.0)
    log.expire(14.0)
    assert log.find("acme", "k", b"f") is stream
    log.expire(15.1)
    assert log.find("acme", "k", b"f") is None
