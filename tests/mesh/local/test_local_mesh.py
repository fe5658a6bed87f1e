"""A local mesh of stand-in processes: started in order, ended in order, clear about what went wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, UnknownNode
from mesh.identity.ca import NodeCredentials
from mesh.local import local_mesh as local_mesh_module
from mesh.local.layout import KNOWN_SITES, LocalPlan
from mesh.local.local_mesh import LocalMesh
from mesh.local.up import up

FAKE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_node.py")))


def make_plan(folder: Path, **changes: object) -> LocalPlan:
    values: dict[str, object] = {
        "folder": folder / "mesh", "model_id": "m", "model_path": Path("/m.gguf"), "cores": 1,
        "sites": KNOWN_SITES[:1], "core_threads": 1, "edge_threads": 1, "core_device": "cpu", "core_dtype": "bf16",
    }  # fmt: skip
    return LocalPlan(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the stand-in placement, which answers no calls, is taken to see."""
    nodes = {"core-1", "edge-paris"}

    async def ready_nodes(address: str, admin_key: str) -> set[str]:
        assert (address, admin_key) == ("127.0.0.1:1001", "ka")
        return nodes

    monkeypatch.setattr(local_mesh_module, "ready_nodes", ready_nodes)
    return nodes


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_up_and_down(tmp_path: Path) -> None:
    told: list[str] = []
    plan = make_plan(tmp_path)
    async with LocalMesh.running(plan, told.append, FAKE) as (_, ready):
        record = ready.to_json()
        pids = list(ready.pids.values())
        assert all(alive(pid) for pid in pids)
    assert told == ["starting placement-1", "starting core-1", "starting edge-paris"]
    assert not any(alive(pid) for pid in pids)
    assert record.pop("pids").keys() == {"placement-1", "core-1", "edge-paris"}
    entry = {"grpc": "127.0.0.1:1001", "http": "http://127.0.0.1:1002"}
    assert record == {
        "event": "ready", **entry, "edges": {"paris": entry}, "api_key": "kt", "admin_key": "ka",
        "ca_file": str(plan.folder / "ca.pem"),
    }  # fmt: skip
    assert "kt" not in repr(ready)
    for name in ("placement-1", "core-1", "edge-paris"):
        assert (plan.folder_of(name) / "process.log").read_text() == "drained\n"


async def test_what_it_writes_is_private_and_names_each_node(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    async with LocalMesh.running(plan, lambda line: None, FAKE):
        pass
    assert plan.folder.stat().st_mode & 0o077 == 0
    for place in plan.places():
        credentials = NodeCredentials.load(plan.folder_of(place.node_id) / "identity")
        assert credentials.place == place


async def test_a_process_that_does_not_start_is_reported_and_the_others_end(tmp_path: Path) -> None:
    told: list[str] = []
    plan = make_plan(tmp_path)
    (plan.folder / "edge-paris").mkdir(parents=True)
    plan.folder.chmod(0o700)
    (plan.folder / "edge-paris").chmod(0o700)
    (plan.folder / "edge-paris" / "fail").touch()
    mesh = LocalMesh(plan, told.append, FAKE)
    with pytest.raises(NodeUnreachable, match="edge-paris ended with code 3"):
        await mesh.start()
    pids = [process.pid for process in mesh._processes.values()]
    await mesh.stop()
    await mesh.stop()
    assert "no such luck" in told[-1]
    assert not any(alive(pid) for pid in pids if pid is not None)


async def test_a_silent_process_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.local.process.READY_TIMEOUT_S", 0.2)
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    mesh = LocalMesh(make_plan(tmp_path), lambda line: None, sleeper)
    with pytest.raises(NodeUnreachable, match="not ready after"):
        await mesh.start()
    assert mesh._processes["placement-1"].pid is None
    await mesh.stop()


async def test_a_node_that_placement_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: set[str]
) -> None:
    monkeypatch.setattr(local_mesh_module, "_SEEN_TIMEOUT_S", 0.2)
    seen.remove("edge-paris")
    mesh = LocalMesh(make_plan(tmp_path), lambda line: None, FAKE)
    with pytest.raises(NodeUnreachable, match="placement did not see edge-paris"):
        await mesh.start()
    await mesh.stop()


async def test_a_process_deaf_to_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_mesh_module, "_DRAIN_TIMEOUT_S", 0.2)
    plan = make_plan(tmp_path)
    async with LocalMesh.running(plan, lambda line: None, FAKE) as (_, ready):
        (plan.folder_of("core-1") / "hang").touch()
    assert not alive(ready.pids["core-1"])


async def test_killed_nodes_are_expected_and_crashes_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    async with LocalMesh.running(make_plan(tmp_path), told.append, FAKE) as (mesh, ready):
        watching = asyncio.create_task(mesh.watch())
        await mesh.kill("core-1")
        with pytest.raises(UnknownNode, match="edge-tokyo"):
            await mesh.kill("edge-tokyo")
        assert len(told) == 3
        for name in ("placement-1", "edge-paris"):
            os.kill(ready.pids[name], signal.SIGKILL)
        await watching
    assert sum("ended with code -9" in line for line in told) == 2


async def test_one_mesh_per_folder(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    async with LocalMesh.running(plan, lambda line: None, FAKE):
        second = LocalMesh(plan, lambda line: None, FAKE)
        with pytest.raises(InvalidRequest, match="another mesh runs in"):
            await second.start()
        await second.stop()
    async with LocalMesh.running(plan, lambda line: None, FAKE):
        pass  # the lock is free again


async def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        mesh = LocalMesh(make_plan(tmp_path, grpc_port=port), lambda line: None, FAKE)
        with pytest.raises(InvalidRequest, match=f"port {port} is in use"):
            await mesh.start()
        await mesh.stop()


async def test_an_open_state_folder_is_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    plan.folder.mkdir(mode=0o755)
    plan.folder.chmod(0o755)
    (plan.folder / "x").touch()
    mesh = LocalMesh(plan, lambda line: None, FAKE)
    with pytest.raises(MeshError, match="chmod 700"):
        await mesh.start()
    await mesh.stop()


@pytest.mark.parametrize("text", [None, "{", "[]", '{"api_key": "k"}'])
async def test_missing_or_broken_keys(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "a" / "keys.json"
    file.parent.mkdir()
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"keys\.json does not hold the first keys"):
        local_mesh_module._read_keys(file)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_up_drains_on_a_signal_and_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    running = asyncio.create_task(up(make_plan(tmp_path), as_json=True, node_command=FAKE))
    file = tmp_path / "up.json"
    while not file.exists():
        assert not running.done()
        await asyncio.sleep(0.01)
    assert file.stat().st_mode & 0o777 == 0o600
    record = json.loads(file.read_text())
    os.kill(os.getpid(), number)
    assert await running == 0
    assert not file.exists()
    shown = capsys.readouterr()
    assert json.loads(shown.out) == record
    assert "draining" in shown.err
    assert not any(alive(pid) for pid in record["pids"].values())
