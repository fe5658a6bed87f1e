"""The rim of the processes: state folder, readiness, signals, tasks that die."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mesh.errors import InvalidRequest, Overloaded, Unauthenticated
from mesh.identity import files
from mesh.identity.ca import CertificateAuthority
from mesh.node.host import NodeHost
from mesh.node.load_watch import LoadWatch
from mesh.process import (
    READY_FILE,
    announce_ready,
    background,
    check_certificate,
    prepare_state_folder,
    raise_descriptor_limit,
    stop_signal,
)
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import CORE, FakeGuard, FakeSigner, until
from tests.fakes.mesh import place_of


def test_the_state_folder_is_private_and_forgets_an_old_readiness(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    prepare_state_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / READY_FILE).write_text("{}")
    prepare_state_folder(folder)
    assert not (folder / READY_FILE).exists()


def test_a_state_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    (folder / "x").touch()
    with pytest.raises(InvalidRequest, match="chmod 700"):
        prepare_state_folder(folder)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, 4096),
        (1024, 1_048_576, 65_536),
        (1024, resource.RLIM_INFINITY, 65_536),
        (4096, 4096, None),
        (100_000, 1_048_576, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_descriptor_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int | None
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    assert raise_descriptor_limit() == (soft if wanted is None else wanted)
    assert made == ([] if wanted is None else [(wanted, hard)])


def test_a_descriptor_limit_that_may_not_be_raised_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with capture_logs() as logs:
        assert raise_descriptor_limit() == 1024
    assert [line["event"] for line in logs] == ["descriptor_limit_not_raised"]


def test_readiness_is_said_in_the_file_and_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announce_ready(tmp_path, node_id="n", grpc="a:1")
    said = {"event": "ready", "node_id": "n", "grpc": "a:1"}
    assert json.loads((tmp_path / READY_FILE).read_text()) == json.loads(capsys.readouterr().out) == said
    assert (tmp_path / READY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_no_readiness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(Overloaded, match="is full"):
        announce_ready(tmp_path, node_id="n")
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_asks_the_second_is_the_system_s(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    waiting = asyncio.create_task(stop_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        await waiting
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_background_task_that_dies_says_so() -> None:
    async def dies() -> None:
        raise ZeroDivisionError

    with capture_logs() as logs:
        task = background(dies(), "watcher")
        await asyncio.wait((task,))
        quiet = background(asyncio.sleep(60), "quiet")
        quiet.cancel()
        await asyncio.gather(quiet, return_exceptions=True)
        await asyncio.sleep(0)
    assert [(line["event"], line["name"]) for line in logs] == [("background_task_died", "watcher")]


async def test_the_load_watch_outlives_an_engine_that_restarts() -> None:
    engine = FakeEngine()
    host = NodeHost(engine, FakeSigner(CORE), FakeGuard(), CORE)
    seen: list[object] = []
    watch = LoadWatch(host, 0.001, seen.append)
    await watch.start()
    assert watch.latest is seen[0]
    load, failures = engine.load, 0

    async def down() -> object:
        nonlocal failures
        failures += 1
        raise Overloaded("restarting")

    engine.load = down  # type: ignore[method-assign, assignment]
    await until(lambda: failures >= 3)
    engine.load = load  # type: ignore[method-assign]
    count = len(seen)
    await until(lambda: len(seen) > count)
    await watch.close()
    await host.close()


def test_an_own_certificate_that_is_not_valid(tmp_path: Path) -> None:
    authority = CertificateAuthority.create_or_load(tmp_path / "ca", "toy")
    check_certificate(authority.issue(place_of("core-1")))
    month = timedelta(days=30)
    for now in (datetime.now(UTC) - month, datetime.now(UTC) + month):
        credentials = authority.issue(place_of("core-1"), lifetime=timedelta(days=1), now=now)
        with pytest.raises(Unauthenticated, match=r"the node's certificate is valid from .* issue a new one"):
            check_certificate(credentials)
    stranger = CertificateAuthority.create_or_load(tmp_path / "other", "toy")
    mixed = replace(authority.issue(place_of("core-1")), ca_pem=stranger.ca_pem)
    with pytest.raises(Unauthenticated, match="not issued by this mesh's authority"):
        check_certificate(mixed)
