from __future__ import annotations

import asyncio

import pytest

from mesh.errors import LeaseLost
from mesh.rpc.uplink.outbox import Outbox


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_queue_is_first_in_first_out() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=100)
    for message in "abc":
        await outbox.put(message, 10)
    assert [await outbox.get() for _ in range(3)] == ["a", "b", "c"]


async def test_urgent_goes_first_then_the_latest_of_each_slot() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=100)
    await outbox.put("order", 10)
    outbox.put_latest("config", "config 1")
    outbox.put_latest("snapshot", "snapshot 1")
    outbox.put_latest("config", "config 2")
    outbox.put_urgent("cancel")
    assert [await outbox.get() for _ in range(4)] == ["cancel", "config 2", "snapshot 1", "order"]


async def test_put_waits_for_room_and_keeps_its_turn() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=20)
    await outbox.put("a", 15)
    late = [asyncio.create_task(outbox.put(message, size)) for message, size in (("b", 15), ("c", 1))]
    await settle()
    assert outbox.waiting == 2  # c would fit, but b was first
    assert outbox.queued_bytes == 15
    assert await outbox.get() == "a"
    await asyncio.gather(*late)
    assert [await outbox.get(), await outbox.get()] == ["b", "c"]
    assert outbox.queued_bytes == 0


async def test_one_message_above_the_bound_passes_alone() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    await outbox.put("large", 1000)
    late = asyncio.create_task(outbox.put("small", 1))
    await settle()
    assert not late.done()
    assert await outbox.get() == "large"
    await late
    assert await outbox.get() == "small"


async def test_a_cancelled_put_leaves_nothing_behind() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    await outbox.put("a", 10)
    gone, after = asyncio.create_task(outbox.put("b", 10)), asyncio.create_task(outbox.put("c", 10))
    await settle()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert await outbox.get() == "a"
    await after
    assert await outbox.get() == "c"


async def test_discard_takes_back_and_makes_room() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    await outbox.put("a", 10, key=1)
    late = asyncio.create_task(outbox.put("b", 10, key=2))
    await settle()
    assert outbox.discard(1) == 1
    await late
    assert outbox.discard(1) == 0
    assert await outbox.get() == "b"


async def test_get_waits_for_any_lane() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    for put in (lambda: outbox.put_urgent("u"), lambda: outbox.put_latest("s", "l")):
        reader = asyncio.create_task(outbox.get())
        await settle()
        assert not reader.done()
        put()
        assert await reader in ("u", "l")


async def test_finish_drains_then_ends() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    await outbox.put("a", 1)
    outbox.finish()
    assert await outbox.get() == "a"
    assert await outbox.get() is None


async def test_close_fails_all_that_wait_and_all_that_come() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    await outbox.put("a", 10)
    late = asyncio.create_task(outbox.put("b", 10))
    await settle()
    outbox.close(LeaseLost("over"))
    outbox.put_urgent("c")
    outbox.put_latest("s", "d")
    for waiting in (late, outbox.get(), outbox.put("e", 1)):
        with pytest.raises(LeaseLost, match="over"):
            await waiting
    assert outbox.queued_bytes == 0


async def test_close_wakes_a_reader() -> None:
    outbox: Outbox[str] = Outbox(max_bytes=10)
    reader = asyncio.create_task(outbox.get())
    await settle()
    outbox.close(LeaseLost("over"))
    with pytest.raises(LeaseLost):
        await reader
