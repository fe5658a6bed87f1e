"""Processes that die, drain and come back under running requests: one outcome each, no token lost or twice."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from mesh.errors import Code, Draining, MeshError, NodeUnreachable
from tests.e2e.running_mesh import (
    LONG_PROMPT,
    RunningMesh,
    assert_complete,
    children_of,
    eventually,
    follow,
    following,
    works,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]


def llama_of(mesh: RunningMesh, node_id: str) -> int:
    pid = mesh.process(node_id).pid
    assert pid is not None
    (child,) = children_of(pid)
    return child


async def test_llama_cpp_dies_under_requests(whole: RunningMesh) -> None:
    # One may go on at the core, the other may not leave its site.
    async with (
        following(whole.paris, "Count: one, two,", tokens=3, label="internal", max_tokens=60) as (free, free_task),
        following(whole.paris, "My secret is", tokens=3, label="restricted", max_tokens=60) as (bound, bound_task),
    ):
        assert free.nodes[0] == bound.nodes[0] == "edge-paris"
        os.kill(llama_of(whole, "edge-paris"), signal.SIGKILL)
        await asyncio.gather(free_task, bound_task)
    assert_complete(free, 60)
    assert free.nodes[-1] == "core-1"
    last = free.migrations[-1]
    assert (last.cause, last.recomputed, last.from_node_id) == ("fallback", True, "edge-paris")
    assert bound.outcomes == 1
    assert isinstance(bound.error, NodeUnreachable)
    assert set(bound.nodes) == {"edge-paris"}
    await eventually(lambda: works(whole.paris.complete("Back?", label="restricted", max_tokens=1)))
    assert whole.process("edge-paris").pid is not None


async def test_the_core_dies_in_a_split_and_under_a_request_that_moved_there(whole: RunningMesh) -> None:
    prompt = "Kill: " + LONG_PROMPT
    async with (
        following(whole.osaka, prompt, tokens=0, label="internal", max_tokens=6) as (split, split_task),
        following(whole.paris, "Once upon a time", tokens=4, label="internal", shape=None, max_tokens=80) as (
            moved,
            moved_task,
        ),
    ):
        assert split.decision is not None
        assert split.decision.shape == "split"
        assert moved.nodes[0] == "edge-paris"
        moving = asyncio.create_task(whole.paris.migrate(moved.request_id, tier="core"))
        await eventually(lambda: _is(bool(moved.migrations) or moving.done()))
        await whole.kill("core-1")
        await asyncio.gather(moving, split_task, moved_task, return_exceptions=True)
    assert_complete(split, 6)
    assert split.nodes[-1] == "edge-osaka"
    assert_complete(moved, 80)
    assert moved.nodes[-1] == "edge-paris"
    await whole.until_gone("core-1")
    with pytest.raises(MeshError) as caught:
        await whole.core.complete("x", label="public", max_tokens=1)
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.details["rule"] == "rules.public"
    assert caught.value.details["node"] == "core-1"
    assert_complete(await follow(whole.paris, "Still here?", label="internal", max_tokens=2), 2)
    await whole.start("core-1")
    assert_complete(await follow(whole.core, "And now?", label="public", max_tokens=2), 2)


async def _is(value: bool) -> bool:
    return value


async def test_placement_dies_and_comes_back(whole: RunningMesh) -> None:
    policy = await whole.admin.get_policy("dev")
    async with following(whole.paris, "While it is away,", tokens=2, label="restricted", max_tokens=40) as (
        stream,
        task,
    ):
        await whole.kill("placement-1")
        await task
    assert_complete(stream, 40)  # what runs at a site does not notice
    own = await follow(whole.paris, "My secret is", label="restricted", max_tokens=3)
    assert_complete(own, 3)
    by_core = await follow(whole.osaka, "The core answers", label="internal", shape="core", max_tokens=3)
    assert_complete(by_core, 3)  # a site goes on using a core that answers it
    assert set(by_core.nodes) == {"core-1"}
    split = await follow(whole.osaka, "Away: " + LONG_PROMPT, label="internal", shape="split", max_tokens=3)
    assert_complete(split, 3)
    with pytest.raises(MeshError):
        await whole.core.complete("x", label="public", max_tokens=1, resume=False)

    await whole.start("placement-1")
    assert await whole.admin.get_policy("dev") == policy
    for client, label in ((whole.core, "public"), (whole.paris, "restricted"), (whole.osaka, "confidential")):
        assert_complete(await follow(client, "Again", label=label, max_tokens=2), 2)
    async with following(whole.paris, "Move on", tokens=2, label="internal", shape="local", max_tokens=60) as (
        stream,
        task,
    ):
        assert (await whole.admin.migrate(stream.request_id, tier="core")).to_node_id == "core-1"
        await task
    assert_complete(stream, 60)


async def test_an_edge_drains(whole: RunningMesh) -> None:
    async with following(whole.osaka, "To the end,", tokens=2, label="restricted", max_tokens=60) as (stream, task):
        ending = asyncio.create_task(whole.terminate("edge-osaka"))
        await eventually(lambda: _refuses(whole))
        assert not task.done() or stream.finish is not None
        await task
        assert await ending == 0
    assert_complete(stream, 60)
    await whole.until_gone("edge-osaka")
    await whole.start("edge-osaka")
    assert_complete(await follow(whole.osaka, "Back again", label="restricted", max_tokens=2), 2)


async def _refuses(mesh: RunningMesh) -> bool:
    try:
        await mesh.osaka.complete("New", label="restricted", max_tokens=1, resume=False)
    except (Draining, NodeUnreachable):
        return True
    return False


async def test_a_core_node_drains(whole: RunningMesh) -> None:
    async with following(whole.core, "Let me finish:", tokens=2, label="public", max_tokens=20) as (stream, task):
        ending = asyncio.create_task(whole.terminate("core-1"))
        await task
        assert await ending == 0
    assert_complete(stream, 20)
    assert set(stream.nodes) == {"core-1"}
    await whole.until_gone("core-1")
    await whole.start("core-1")


async def test_placement_drains(whole: RunningMesh) -> None:
    async with following(whole.core, "Me too:", tokens=2, label="public", max_tokens=20) as (stream, task):
        ending = asyncio.create_task(whole.terminate("placement-1"))
        await task
        assert await ending == 0
    assert_complete(stream, 20)
    await whole.start("placement-1")
