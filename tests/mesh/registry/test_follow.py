"""Following: back-off, what is fatal, and that nothing is left running."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from structlog.testing import capture_logs

from mesh.errors import MeshError, NodeUnreachable, Overloaded, PolicyDenied, Unauthenticated
from mesh.registry.follow import Follower
from mesh.registry.threads import CallThread
from mesh.rpc.uplink.backoff import FullJitter


def follower(*scripts: list[int | Exception]) -> Follower[int]:
    """Each script is one connection: the states it yields, or the error that ends it; the last one then hangs."""
    left = list(scripts)

    async def source() -> AsyncGenerator[int, None]:
        for step in left.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step
            await asyncio.sleep(0.01)
        if not left:
            await asyncio.Event().wait()

    return Follower(source, name="test", backoff=FullJitter(random.Random(1), base_s=0.001, cap_s=0.01))


async def collect(states: AsyncGenerator[int, None], last: int) -> list[int]:
    seen: list[int] = []
    async with asyncio.timeout(20):
        async for state in states:
            seen.append(state)
            if state == last:
                return seen
    return seen


async def test_losses_that_waiting_mends() -> None:
    subject = follower(
        [1, NodeUnreachable("down")], [NodeUnreachable("down")], [Overloaded("busy")], [ValueError("a bug")], [], [2]
    )
    with capture_logs() as lines:
        assert await collect(subject.states(None), 2) == [1, 2]
    assert [line["event"] for line in lines] == ["registry_gone", "registry_following_failed_by_bug", "registry_back"]
    assert lines[1]["exc_info"]  # the bug is not hidden
    await subject.close()


@pytest.mark.parametrize("error", [PolicyDenied("no", rule="r"), Unauthenticated("who")])
async def test_losses_that_it_does_not(error: MeshError) -> None:
    subject = follower([1, error])
    for _ in range(2):  # now and for who comes later
        with pytest.raises(type(error)) as caught:
            await collect(subject.states(None), 2)
        assert caught.value.details == error.details
    await subject.close()


async def test_repeats_while_gone() -> None:
    subject = follower([7])
    async with aclosing(subject.states(0.01)) as states:
        assert [await anext(states) for _ in range(5)] == [7] * 5
    await subject.close()


async def test_watchers_share_one_connection_and_close_ends_all() -> None:
    subject = follower([1, 2])
    both = await asyncio.gather(collect(subject.states(None), 2), collect(subject.states(None), 2))
    assert [seen[-1] for seen in both] == [2, 2]
    waiting = asyncio.create_task(collect(subject.states(None), 99))
    await asyncio.sleep(0)
    await subject.close()
    assert await waiting == [2]
    assert await collect(subject.states(None), 99) == []


async def test_a_call_thread_keeps_order_and_drops_what_was_cancelled() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    thread = CallThread("test", at_end=lambda: loop.call_soon_threadsafe(ended.set) and None)
    seen: list[str] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    def slow() -> str:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
        seen.append("slow")
        return "slow"

    first = asyncio.create_task(thread.run(slow))
    await started.wait()
    second = asyncio.create_task(thread.run(lambda: seen.append("cancelled")))
    third = asyncio.create_task(thread.run(lambda: seen.append("third")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    go_on.set()
    assert await first == "slow"
    await third
    assert seen == ["slow", "third"]
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    thread.close()
    async with asyncio.timeout(10):
        await ended.wait()
