"""A running request goes from one site to another: both dial out only, so placement carries what it cannot read."""

from __future__ import annotations

import json

import pytest

from mesh.errors import MeshError
from tests.e2e.running_mesh import RunningMesh, assert_complete, eventually, following

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
ANYWHERE = """\
version: 1
rules:
  public: {tiers: [core]}
  internal: {anywhere: true}
"""
PROMPT = "Once upon a time in a small village by the sea, there lived"


@pytest.mark.parametrize("entry", ["core", "paris"])
async def test_from_paris_to_osaka(whole: RunningMesh, entry: str) -> None:
    key = await whole.tenant(f"nomads-{entry}", ANYWHERE)
    client = await whole.client(key, entry)
    other = await whole.client(key, "osaka")
    for c in (client, other):
        await eventually(lambda c=c: _has_policy(c))  # type: ignore[misc]
    async with following(
        client, PROMPT, tokens=5, label="internal", shape="local", node_id="edge-paris", max_tokens=150
    ) as (
        stream,
        task,
    ):
        moved = await whole.admin.migrate(stream.request_id, node_id="edge-osaka")
        assert (moved.from_node_id, moved.to_node_id) == ("edge-paris", "edge-osaka")
        assert moved.kv_tokens > 0
        await task
    assert_complete(stream, 150)
    assert stream.nodes[0] == "edge-paris"
    assert stream.nodes[-1] == "edge-osaka"
    assert stream.finish is not None
    body = json.loads(stream.finish.receipt.record.body)
    assert body["relays"] == ["placement-1"]
    assert sorted(body["held_kv"]) == ["edge-osaka", "edge-paris"]
    assert [m["shape"] for m in body["migrations"]] == ["follow"]


async def _has_policy(client: object) -> bool:
    try:
        return (await client.explain("hello", label="internal")).decision.policy_version >= 1  # type: ignore[attr-defined, no-any-return]
    except MeshError:
        return False
