"""What systemd is told, on a real datagram socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mesh.errors import InvalidRequest
from mesh.settings import EdgeSettings, Systemd, load_settings
from mesh.systemd import ServiceManager, told_ready
from tests.fakes.fake_node import until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """systemd's side."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(manager: socket.socket) -> list[str]:
    told = []
    while True:
        try:
            told.append(manager.recv(4096).decode())
        except BlockingIOError:
            return told


def at(manager: socket.socket, watchdog_us: int = 0) -> Systemd:
    return Systemd(notify_socket=manager.getsockname(), watchdog_us=watchdog_us)


async def test_ready_beats_and_stopping(manager: socket.socket) -> None:
    told: list[str] = []
    with told_ready(at(manager, watchdog_us=4_000)):
        await until(lambda: told.extend(heard(manager)) or told.count("WATCHDOG=1") >= 3)
    told += heard(manager)
    assert told[0] == "READY=1"
    assert told[-1] == "STOPPING=1"


async def test_a_process_that_is_not_alive_is_not_kept_alive(manager: socket.socket) -> None:
    asked: list[bool] = []
    with told_ready(at(manager, watchdog_us=4_000), alive=lambda: asked.append(True) or False):
        await until(lambda: len(asked) >= 3)
    assert heard(manager) == ["READY=1", "STOPPING=1"]


async def test_without_a_watchdog_nothing_beats(manager: socket.socket) -> None:
    with told_ready(at(manager)) as service:
        await asyncio.wait_for(service.beat(lambda: True), 5.0)
    assert heard(manager) == ["READY=1", "STOPPING=1"]


def test_nobody_to_tell() -> None:
    service = ServiceManager(Systemd())
    assert not service.tell("READY=1")
    service.close()
    service.close()


def test_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0kvmesh-test-notify")
        service = ServiceManager(Systemd(notify_socket="@kvmesh-test-notify"))
        assert service.tell("READY=1", "STATUS=ok")
        service.close()
        assert listening.recv(100) == b"READY=1\nSTATUS=ok"


def test_a_manager_that_is_gone_does_not_end_the_process(tmp_path: Path) -> None:
    service = ServiceManager(Systemd(notify_socket=str(tmp_path / "gone")))
    with capture_logs() as logs:
        assert not service.tell("WATCHDOG=1")
    service.close()
    assert [line["event"] for line in logs] == ["service_manager_not_told"]


@pytest.mark.parametrize("value", ["relative/path", "/" + "x" * 200])
def test_a_socket_that_cannot_be_one_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(
        "identity: {folder: i}\nstate_folder: s\nplacement: {address: 127.0.0.1:1}\nmodel: {id: m, path: m.gguf}\n"
    )
    with pytest.raises(InvalidRequest, match=r"systemd\.notify_socket"):
        load_settings(EdgeSettings, file, {"systemd.notify_socket": value})
    assert load_settings(EdgeSettings, file, {"systemd.watchdog_us": "60000000"}).systemd.watchdog_us == 60_000_000
