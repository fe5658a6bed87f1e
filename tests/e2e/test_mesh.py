"""A mesh of real processes, real model, real moves: what clients, tenants and operators see when all is well."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from mesh.errors import MeshError, NotFound, PolicyDenied, Unauthenticated
from mesh.identity.receipt import verify_receipt
from mesh.model.catalogue import DEMO_MODEL
from tests.e2e.running_mesh import LONG_PROMPT, POLICY, RunningMesh, assert_complete, follow, following

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


async def test_each_label_goes_where_it_may(whole: RunningMesh) -> None:
    ca_pem = whole.ready.ca_file.read_bytes()
    public = await follow(whole.core, "The capital of France is", label="public", max_tokens=4)
    restricted = await follow(whole.paris, "My secret number is", label="restricted", max_tokens=4)
    confidential = await follow(whole.paris, "The patient of room 4", label="confidential", max_tokens=4)
    for stream, node in ((public, "core-1"), (restricted, "edge-paris"), (confidential, "core-1")):
        assert_complete(stream, 4)
        assert stream.finish is not None
        body = verify_receipt(stream.finish.receipt, ca_pem).body
        assert set(body["tokens_by_node"]) == set(body["saw_prompt"]) == {node}
    with pytest.raises(PolicyDenied) as caught:
        await whole.paris.complete("x", label="restricted", shape="core", max_tokens=1)
    assert caught.value.details["rule"] == "rules.restricted"


async def test_a_split_goes_on_where_the_core_left_off(whole: RunningMesh) -> None:
    stream = await follow(whole.osaka, "Split: " + LONG_PROMPT, label="internal", max_tokens=8, shape="split")
    assert_complete(stream, 8)
    assert set(stream.nodes) == {"edge-osaka"}
    (move,) = stream.migrations
    assert (move.from_node_id, move.to_node_id, move.cause, move.recomputed) == ("core-1", "edge-osaka", "plan", False)
    assert move.kv_tokens > 400
    assert move.kv_wire_bytes > 1_000_000


async def test_an_operator_moves_a_request_there_and_back(whole: RunningMesh) -> None:
    operator = await whole.client((await whole.admin.issue_key("dev", role="operator")).api_key)
    prompt = "Once upon a time, in a lighthouse at the end of the world,"
    async with following(whole.paris, prompt, tokens=6, label="internal", shape="local", max_tokens=120) as (
        stream,
        task,
    ):
        # The operator asks placement, which tells the edge where the request entered.
        there = await operator.migrate(stream.request_id, tier="core")
        assert (there.from_node_id, there.to_node_id) == ("edge-paris", "core-1")
        back = await operator.migrate(stream.request_id, node_id="edge-paris")
        assert (back.from_node_id, back.to_node_id) == ("core-1", "edge-paris")
        assert back.kv_tokens > there.kv_tokens > 0
        await task
    assert_complete(stream, 120)
    assert [(m.to_node_id, m.cause, m.recomputed) for m in stream.migrations] == [
        ("core-1", "operator", False),
        ("edge-paris", "operator", False),
    ]
    first, second = (m.offset_tokens for m in stream.migrations)
    assert stream.nodes == ["edge-paris"] * first + ["core-1"] * (second - first) + ["edge-paris"] * (120 - second)
    with pytest.raises(NotFound):
        await operator.migrate(stream.request_id, tier="core")


async def test_a_move_that_policy_forbids_is_refused_and_the_request_goes_on(whole: RunningMesh) -> None:
    async with following(whole.paris, "Keep this here:", tokens=2, label="restricted", max_tokens=40) as (stream, task):
        for client in (whole.paris, whole.admin):
            with pytest.raises(PolicyDenied):
                await client.migrate(stream.request_id, tier="core")
        await task
    assert_complete(stream, 40)
    assert set(stream.nodes) == {"edge-paris"}


async def test_the_openai_client_with_token_ids(whole: RunningMesh) -> None:
    ids = await whole.core.tokenize("The capital of France is")
    for base in (whole.ready.core.http, whole.ready.edges["paris"].http):
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=whole.ready.api_key, max_retries=0) as client:
            answer = await client.completions.create(model=DEMO_MODEL, prompt=ids, max_tokens=3, temperature=0)
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 3)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=DEMO_MODEL, prompt=[10**6], max_tokens=3)
            assert caught.value.param == "tokens"
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="no-such-model", prompt="x", max_tokens=3)


async def test_two_tenants_see_nothing_of_each_other(whole: RunningMesh) -> None:
    rival_key = await whole.tenant("rival", POLICY)
    rival = await whole.client(rival_key, "paris")
    prompt = "A prompt that both of them have. " * 8
    async with following(whole.paris, prompt, tokens=1, label="restricted", max_tokens=30) as (stream, task):
        for call in (rival.abort(stream.request_id), rival.migrate(stream.request_id, tier="core")):
            with pytest.raises(NotFound):
                await call
        await task
    assert_complete(stream, 30)
    again = await follow(whole.paris, prompt, label="restricted", max_tokens=1)
    theirs = await follow(rival, prompt, label="restricted", max_tokens=1)
    other_label = await follow(whole.paris, prompt, label="internal", shape="local", max_tokens=1)
    cached = [s.finish.usage.cached_tokens for s in (again, theirs, other_label) if s.finish is not None]
    assert cached[0] > 16
    assert cached[1:] == [0, 0]
    # An idempotency key is its tenant's own.
    mine = await whole.paris.complete("One", label="restricted", max_tokens=2, idempotency_key="same")
    other = await rival.complete("Two", label="restricted", max_tokens=2, idempotency_key="same")
    assert mine.decision.request_id != other.decision.request_id


async def test_wrong_missing_and_revoked_keys(whole: RunningMesh) -> None:
    issued = await whole.admin.issue_key("dev")
    revoked = await whole.client(issued.api_key)
    await revoked.models()
    await whole.admin.revoke_key(issued.key_id)
    wrong = await whole.client("kvm_0000000000000000_" + "A" * 43, "paris")
    for client in (revoked, wrong):
        with pytest.raises(Unauthenticated):
            await client.models()
    with pytest.raises(PolicyDenied, match="needs the role admin"):
        await whole.core.put_policy("dev", POLICY)
    async with httpx.AsyncClient() as http:
        for base in (whole.ready.core.http, whole.ready.edges["osaka"].http):
            assert (await http.get(f"{base}/v1/models")).status_code == 401


async def test_a_request_right_after_its_policy_was_applied(whole: RunningMesh) -> None:
    key = await whole.tenant("hasty")
    clients = [await whole.client(key, entry) for entry in ("core", "paris", "osaka")]
    for round_ in range(3):
        await whole.admin.put_policy("hasty", POLICY + f"# round {round_}\n")
        streams = await asyncio.gather(
            follow(clients[0], "At once", label="public", max_tokens=1),
            follow(clients[1], "At once", label="internal", shape="core", max_tokens=1),
            follow(clients[2], "At once, " * 20, label="internal", shape="split", max_tokens=1),
        )
        for stream in streams:
            assert_complete(stream, 1)


@pytest.mark.parametrize(
    ("prompt", "options", "reason", "field"),
    [
        ("x", {"label": "none"}, "INVALID_REQUEST", "label"),
        ("x", {"model": "other"}, "UNKNOWN_MODEL", "model"),
        ("x", {"temperature": float("nan")}, "INVALID_REQUEST", "temperature"),
        ("x", {"top_p": 2.0}, "INVALID_REQUEST", "top_p"),
        ("", {}, "INVALID_REQUEST", "text"),
        ([10**6], {}, "INVALID_REQUEST", "tokens"),
        ("word " * 20_000, {}, "INVALID_REQUEST", "text"),
        ("x" * 5_000_000, {}, "INVALID_REQUEST", None),
        ("x", {"node_id": "core-9"}, "UNKNOWN_NODE", "placement.node_id"),
    ],
)
async def test_bad_input_is_refused_at_both_entries(
    whole: RunningMesh, prompt: object, options: dict[str, object], reason: str, field: str | None
) -> None:
    for client in (whole.core, whole.paris):
        with pytest.raises(MeshError) as caught:
            await client.complete(prompt, **options)  # type: ignore[arg-type]
        assert caught.value.reason == reason
        assert field is None or caught.value.details["field"] == field
