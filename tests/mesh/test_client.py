from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh.client import Decision, Event, Finish, MeshClient, Migration, Tokens
from mesh.client_stream import StreamProgress
from mesh.client_sync import SyncMeshClient
from mesh.client_types import generate_request, tokenize_request
from mesh.errors import Internal, InvalidRequest, NodeUnreachable, NoNodeNow, NotFound, Overloaded, Unauthenticated
from mesh.node.engine import FinishReason
from mesh.v1 import inference_pb2
from tests.mesh.fake_entry import KEY, WORDS, FakeEntry, Link, answer, running

TEXT = "".join(WORDS) + "end"


@pytest.fixture
async def entry() -> FakeEntry:
    return FakeEntry()


@pytest.fixture
async def link(entry: FakeEntry) -> AsyncIterator[Link]:
    async with running(entry) as address, Link(address).running() as link:
        yield link


@pytest.fixture
async def mesh(link: Link) -> AsyncIterator[MeshClient]:
    async with MeshClient(link.address, KEY) as client:
        yield client


def _kinds(events: list[Event]) -> list[type]:
    return [type(e) for e in events]


async def test_events_of_a_generation(mesh: MeshClient) -> None:
    events = [e async for e in mesh.generate("hi", label="internal", max_tokens=8)]
    assert _kinds(events) == [Decision, *[Tokens] * 4, Migration, *[Tokens] * 4, Tokens, Finish]
    decision, finish = events[0], events[-1]
    assert isinstance(decision, Decision)
    assert isinstance(finish, Finish)
    assert (decision.request_id, decision.shape, decision.node_ids) == ("n:1", "split", ("core-0", "osaka-0"))
    assert finish.reason is FinishReason.STOP
    assert finish.usage.cached_tokens == 1
    assert finish.receipt.record.body == b"{}"


async def test_complete(mesh: MeshClient, entry: FakeEntry) -> None:
    whole = await mesh.complete([{"role": "user", "content": "hi"}], temperature=0.0, shape="split", site="osaka")
    assert whole.text == TEXT
    assert whole.ids == tuple(range(100, 108))
    assert whole.migrations[0].to_node_id == "core-0"
    request = entry.requests[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi")]
    assert request.sampling.HasField("temperature")
    assert request.placement.shape == inference_pb2.PLAN_SHAPE_SPLIT
    assert request.idempotency_key


@pytest.mark.parametrize("at", range(1, len(answer())))
async def test_a_stream_that_breaks_anywhere_loses_and_doubles_nothing(
    mesh: MeshClient, entry: FakeEntry, link: Link, at: int
) -> None:
    entry.wait_at = {at}
    whole = asyncio.create_task(mesh.complete("hi"))
    await entry.waiting.wait()
    link.cut()
    entry.go.set()
    done = await whole
    assert (done.text, done.ids) == (TEXT, tuple(range(100, 108)))
    assert len(done.migrations) == 1
    assert len({r.idempotency_key for r in entry.requests}) == 1
    assert not entry.aborted


async def test_a_link_that_is_down_for_a_while_is_waited_for(mesh: MeshClient, entry: FakeEntry, link: Link) -> None:
    entry.wait_at = {3}
    whole = asyncio.create_task(mesh.complete("hi"))
    await entry.waiting.wait()
    link.down = True
    link.cut()
    entry.go.set()
    await asyncio.sleep(0.3)
    assert not whole.done()
    link.down = False
    assert (await whole).text == TEXT


async def test_a_link_that_stays_down_is_given_up(entry: FakeEntry, link: Link) -> None:
    link.down = True
    async with MeshClient(link.address, KEY, reconnect_s=0.1) as mesh:
        with pytest.raises(NodeUnreachable, match=link.address):
            await mesh.complete("hi")


async def test_without_resume_a_broken_link_is_an_error(mesh: MeshClient, entry: FakeEntry, link: Link) -> None:
    entry.wait_at = {3}
    whole = asyncio.create_task(mesh.complete("hi", resume=False))
    await entry.waiting.wait()
    link.cut()
    with pytest.raises(NodeUnreachable):
        await whole
    assert not entry.requests[0].idempotency_key


async def test_the_entry_s_own_errors_are_not_tried_again(mesh: MeshClient, entry: FakeEntry) -> None:
    for error in (NoNodeNow("rule r: core-0 is down", rule="r"), NodeUnreachable("core-0"), Overloaded("full")):
        entry.errors = {2: error}
        with pytest.raises(type(error)) as caught:
            await mesh.complete("hi")
        assert caught.value.details.items() >= error.details.items()
    assert len(entry.requests) == 3
    assert not entry.aborted


async def test_a_wrong_key(link: Link) -> None:
    async with MeshClient(link.address, "wrong") as mesh:
        with pytest.raises(Unauthenticated):
            await mesh.complete("hi")
        with pytest.raises(Unauthenticated):
            await mesh.tokenize("hi")
        assert "wrong" not in repr(mesh)


async def test_leaving_the_iterator_ends_the_request(mesh: MeshClient, entry: FakeEntry) -> None:
    entry.wait_at = {3}
    events = mesh.generate("hi")
    async for event in events:
        if isinstance(event, Tokens):
            break
    await events.aclose()
    await asyncio.wait_for(entry.left.wait(), 5)
    assert entry.aborted == ["n:1"]


async def test_cancelling_ends_the_request(mesh: MeshClient, entry: FakeEntry) -> None:
    entry.wait_at = {3}
    begun = asyncio.Event()

    async def read() -> None:
        async for event in mesh.generate("hi"):
            if isinstance(event, Tokens):
                begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.wait_for(entry.left.wait(), 5)
    assert entry.aborted == ["n:1"]


async def test_a_caller_s_own_offset_is_where_it_starts(mesh: MeshClient, entry: FakeEntry) -> None:
    whole = await mesh.complete("hi", idempotency_key="mine", resume_offset_tokens=6)
    assert whole.ids == (106, 107)
    assert entry.requests[0].idempotency_key == "mine"


async def test_the_other_calls(mesh: MeshClient) -> None:
    assert await mesh.tokenize("four") == [4]
    assert [m.id for m in await mesh.models()] == ["tiny"]
    assert await mesh.abort("n:1")
    assert (await mesh.explain("hi")).decision.plan.candidates[0].decode_node_id == "osaka-0"
    assert (await mesh.explain("hi", label="secret")).refusal_reason == "POLICY_DENIED"
    assert [n.node_id for n in (await mesh.snapshot()).nodes] == ["core-0", "osaka-0"]
    assert (await mesh.migrate("n:1", node_id="core-0")).to_node_id == "core-0"
    assert (await mesh.migrate("n:1", tier="edge")).to_node_id == "best-edge"
    with pytest.raises(InvalidRequest, match="one of them"):
        await mesh.migrate("n:1")


async def test_policies(mesh: MeshClient) -> None:
    assert await mesh.put_policy("dev", "a: 1") == 1
    assert await mesh.put_policy("dev", "a: 2", expected_version=1) == 2
    assert (await mesh.get_policy("dev")).yaml == "a: 2"
    assert [p.tenant for p in await mesh.list_policies()] == ["dev"]
    assert (await mesh.validate_policy("bad"))[0].line == 3
    await mesh.delete_policy("dev")
    with pytest.raises(NotFound):
        await mesh.get_policy("dev")


async def test_tenants(mesh: MeshClient) -> None:
    await mesh.create_tenant("acme")
    assert (await mesh.issue_key("acme", role="operator")).api_key == "km_secret"
    await mesh.revoke_key("k1")
    assert [(k.role, k.revoked) for k in (await mesh.list_tenants())[0].keys] == [("operator", True)]


async def test_plain_text_to_another_machine_and_a_missing_ca_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="loopback"):
        MeshClient("mesh.example:7000", KEY)
    with pytest.raises(InvalidRequest, match="cannot read the CA file"):
        MeshClient("127.0.0.1:7000", KEY, ca_file="/nonexistent/ca.pem")


async def test_the_sync_face(link: Link, entry: FakeEntry) -> None:
    def talk() -> list[Any]:
        with SyncMeshClient(link.address, KEY) as mesh:
            events = list(mesh.generate("hi"))
            return [
                "".join(e.text for e in events if isinstance(e, Tokens)), mesh.complete("hi").text,
                mesh.tokenize("four"), mesh.models()[0].id, mesh.abort("n:1"), mesh.explain("hi").snapshot_age_s,
                mesh.snapshot().version, mesh.migrate("n:1", tier="core").kv_tokens, mesh.put_policy("t", "x"),
                mesh.get_policy("t").version, len(mesh.list_policies()), mesh.delete_policy("t"),
                mesh.validate_policy("ok"), mesh.create_tenant("t"), mesh.issue_key("t").key_id,
                mesh.revoke_key("k1"), mesh.list_tenants()[0].tenant,
            ]  # fmt: skip

    assert await asyncio.to_thread(talk) == [
        TEXT, TEXT, [4], "tiny", True, 0.5, 7, 9, 1, 1, 1, None, [], None, "k1", None, "t",
    ]  # fmt: skip


async def test_the_sync_face_raises_and_leaves_as_the_async_one(link: Link, entry: FakeEntry) -> None:
    entry.wait_at = {3}

    def leave() -> None:
        mesh = SyncMeshClient(link.address, KEY)
        for event in mesh.generate("hi"):
            if isinstance(event, Tokens):
                break
        with pytest.raises(InvalidRequest, match="one of them"):
            mesh.migrate("x")
        mesh.close()
        mesh.close()

    await asyncio.to_thread(leave)
    assert entry.aborted == ["n:1"]
    with pytest.raises(InvalidRequest, match="loopback"):
        await asyncio.to_thread(SyncMeshClient, "mesh.example:7000", KEY)


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2)])
def test_a_prompt_of_token_ids(prompt: Any) -> None:
    assert list(generate_request(prompt, {}).tokens.ids) == [1, 2]
    with pytest.raises(InvalidRequest, match="already"):
        tokenize_request(prompt, "tiny")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**32], {}, "prompt"),
        ([1, "a"], {}, "prompt"),
        ([{"role": "user"}], {}, "prompt"),
        ([{"role": "user", "content": 1}], {}, "content"),
        ("a\ud800", {}, "text"),
        ("hi", {"max_tokens": -1}, "max_tokens"),
        ("hi", {"max_tokens": "many"}, "max_tokens"),
        ("hi", {"temperature": "hot"}, "temperature"),
        ("hi", {"stop": [1]}, "stop"),
        ("hi", {"shape": "spilt"}, "shape"),
        ("hi", {"labels": "x"}, "labels"),
        ("hi", {"attributes": {"team": 1}}, "attributes"),
        ("hi", {"attributes": {1: "team"}}, "attributes"),
        ("hi", {"continues": 1}, "continues"),
    ],
)
def test_bad_values_are_refused_by_name(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, options)
    assert caught.value.details["field"] == field


def test_attributes_and_a_conversation_go_along() -> None:
    request = generate_request("hi", {"attributes": {"team": "x"}, "continues": "kmc1.abc"})
    assert (dict(request.attributes), request.continues) == ({"team": "x"}, "kmc1.abc")


def test_one_stop_string_may_be_given_bare() -> None:
    assert list(generate_request("hi", {"stop": "###"}).sampling.stop) == ["###"]


@pytest.mark.parametrize("offset", [1, 3])
def test_a_gap_or_a_repetition_in_the_stream_is_an_error(offset: int) -> None:
    progress = StreamProgress(offset_tokens=2)
    with pytest.raises(Internal, match="was expected"):
        progress.take(inference_pb2.GenerateResponse(tokens=inference_pb2.TokenDelta(offset_tokens=offset, ids=[1])))


def test_an_event_of_a_newer_entry_is_passed_over() -> None:
    assert StreamProgress().take(inference_pb2.GenerateResponse()) is None
