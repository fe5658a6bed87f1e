"""A running request moves between two core nodes of `kvmesh up --core 2`: nothing lost, nothing changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.client import MeshClient
from mesh.client_types import Decision, Migration, Tokens
from tests.e2e.test_kvmesh_up import TIMEOUT_S, Up

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]
N_TOKENS = 200
PROMPT = "Once upon a time in a small village by the sea,"


def test_core_to_core(tmp_path: Path) -> None:
    up = Up(tmp_path, "--core", "2", "--edge", "")
    try:
        asyncio.run(moved(up))
    finally:
        assert up.stop() == 0


async def moved(up: Up) -> None:
    async with MeshClient(up.ready["grpc"], up.ready["api_key"]) as client:
        plain = await client.complete(PROMPT, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
        ids: list[int] = []
        migrations: list[Migration] = []
        moving: asyncio.Task[object] | None = None
        request_id = ""
        async for event in client.generate(PROMPT, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True):
            match event:
                case Decision():
                    request_id = event.request_id
                case Tokens():
                    assert event.offset_tokens == len(ids)
                    ids += event.ids
                    if moving is None and len(ids) > 20:
                        other = "core-2" if event.node_id == "core-1" else "core-1"
                        moving = asyncio.create_task(client.migrate(request_id, node_id=other))
                case Migration():
                    migrations.append(event)
        assert moving is not None
        await moving
        assert [(m.recomputed, m.codec) for m in migrations] == [(False, "raw")]
        assert {migrations[0].from_node_id, migrations[0].to_node_id} == {"core-1", "core-2"}
        assert ids == list(plain.ids)  # like engines, KV without loss: the very same tokens
