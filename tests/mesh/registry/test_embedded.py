"""The embedded registry's file and clock; what every registry does is in the conformance suite."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from mesh.errors import Internal, InvalidRequest, Overloaded, PayloadCorrupt
from mesh.identity import files
from mesh.registry import embedded
from mesh.registry.embedded import EmbeddedRegistry
from mesh.registry.types import Health
from tests.conformance.registry_suite import healths, node, until


def content(path: Path) -> bytes:
    return path.read_bytes()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def written(path: Path) -> tuple[int, int]:
    """Changes with each write."""
    return path.stat().st_mtime_ns, path.stat().st_ino


def damage(path: Path, raw: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(raw)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "registry.json"


async def test_a_restart_keeps_nodes_and_values_but_no_heartbeats(path: Path) -> None:
    first = EmbeddedRegistry(path)
    await first.start()
    await first.register(node())
    await first.heartbeat("core-1", ready=True)
    version = await first.put("policies/dev", b"yaml")
    await first.close()

    second = EmbeddedRegistry(path)
    await second.start()
    assert healths(await second.nodes()) == {"core-1": Health.CRITICAL}
    assert (await second.nodes()).nodes[0].registration == node()
    stored = await second.get("policies/dev")
    assert stored is not None
    assert (stored.value, stored.version) == (b"yaml", version)
    assert await second.put("policies/dev", b"new", expected_version=version) > version
    await second.heartbeat("core-1", ready=True)
    assert healths(await second.nodes()) == {"core-1": Health.PASSING}
    await second.close()
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700


async def test_a_clock_turned_by_hand_expires_nodes() -> None:
    now_s = 100.0
    registry = EmbeddedRegistry(None, clock=lambda: now_s)
    await registry.start()
    await registry.register(node(ttl_s=5.0))
    await registry.heartbeat("core-1", ready=True)
    async with aclosing(registry.watch()) as views:
        await until(views, lambda view: healths(view) == {"core-1": Health.PASSING})
        now_s += 4.9
        registry.expire()
        assert healths(await registry.nodes()) == {"core-1": Health.PASSING}
        now_s += 0.2
        registry.expire()
        await until(views, lambda view: healths(view) == {"core-1": Health.CRITICAL})
    await registry.close()


async def test_a_quiet_watch_repeats_with_a_fresh_time(short_repeat: None) -> None:
    registry = EmbeddedRegistry(None)
    await registry.start()
    async with aclosing(registry.watch()) as views:
        first, second = await anext(views), await anext(views)
    assert first.index == second.index
    assert first.heard_monotonic_s < second.heard_monotonic_s
    await registry.close()


async def test_a_damaged_file_is_refused_and_left_alone(path: Path) -> None:
    damage(path, b'{"format": 1, "half of')
    with pytest.raises(PayloadCorrupt, match="damaged"):
        await EmbeddedRegistry(path).start()
    assert content(path) == b'{"format": 1, "half of'
    os.unlink(path)
    registry = EmbeddedRegistry(path)  # the failed start let go of the lock
    await registry.start()
    await registry.close()


async def test_an_unreadable_file_is_refused(path: Path) -> None:
    damage(path / "a-folder-instead", b"")
    os.chmod(path.parent, 0o700)
    with pytest.raises(InvalidRequest, match="cannot read"):
        await EmbeddedRegistry(path).start()


async def test_a_second_process_is_refused(path: Path) -> None:
    first = EmbeddedRegistry(path)
    await first.start()
    with pytest.raises(InvalidRequest, match="in use by another process"):
        await EmbeddedRegistry(path).start()
    await first.close()


@pytest.mark.parametrize(
    ("code", "raised", "said"),
    [
        (errno.ENOSPC, Overloaded, "is full"),
        (errno.EDQUOT, Overloaded, "is full"),
        (errno.EIO, Internal, "cannot write"),
    ],
)
async def test_a_failed_write_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[Exception], said: str
) -> None:
    registry = EmbeddedRegistry(path)
    await registry.start()
    await registry.register(node())
    version = await registry.put("key", b"old")
    before = content(path)
    real = os.fsync

    def fails(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "fsync", fails)
    for change in (registry.put("key", b"new"), registry.delete("key"), registry.register(node("core-2"))):
        with pytest.raises(raised, match=said):
            await change
    monkeypatch.setattr(files.os, "fsync", real)
    assert content(path) == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["registry.json", "registry.json.lock"]
    assert list(healths(await registry.nodes())) == ["core-1"]
    assert await registry.put("key", b"new", expected_version=version) > version
    await registry.close()


async def test_a_cancelled_caller_leaves_memory_and_file_agreeing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = EmbeddedRegistry(path)
    await registry.start()
    entered, go_on = threading.Event(), threading.Event()
    real = files.write_private

    def slow(target: Path, data: bytes) -> None:
        entered.set()
        go_on.wait(10)
        real(target, data)

    monkeypatch.setattr(embedded, "write_private", slow)
    put = asyncio.create_task(registry.put("key", b"value"))
    await asyncio.to_thread(entered.wait, 10)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await registry.get("key") is None
    go_on.set()
    await registry.close()  # waits for the write
    stored = await registry.get("key")
    assert stored is not None
    again = EmbeddedRegistry(path)
    await again.start()
    assert await again.get("key") == stored
    await again.close()


async def test_registering_the_same_again_writes_nothing(path: Path) -> None:
    registry = EmbeddedRegistry(path)
    await registry.start()
    await registry.register(node())
    before = written(path)
    await registry.register(node())
    assert written(path) == before
    await registry.close()
