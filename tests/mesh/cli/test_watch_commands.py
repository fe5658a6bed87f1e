"""sites, site show, top: as a user types them, against an entry over real gRPC."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from mesh.cli.groups import group
from mesh.cli.mesh_facts import sites_of
from mesh.cli.mesh_tables import age_words, top_view
from mesh.cli.watch_commands import register
from mesh.errors import NotFound
from mesh.v1 import admin_pb2
from tests.mesh.fake_entry import KEY, FakeEntry, running


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state file of a local mesh whose entry runs in a thread."""
    file = tmp_path_factory.mktemp("state") / "up.json"
    loop, ready = asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        async with running(FakeEntry()) as address:
            file.write_text(json.dumps({"grpc": address, "api_key": KEY, "admin_key": KEY}))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield file
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def run(state: Path, *arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, [*arguments, "--state", str(state)], env={"COLUMNS": "140"})


def test_sites(state: Path) -> None:
    shown = run(state, "sites")
    assert shown.exit_code == 0, shown.output
    assert "disconnected" in shown.output
    cloud, osaka = json.loads(run(state, "sites", "--json").output)
    assert (cloud["site"], cloud["state"], cloud["requests_here"], cloud["requests_entered"]) == (
        "cloud",
        "ready",
        1,
        0,
    )
    assert (osaka["site"], osaka["state"], osaka["requests_here"], osaka["requests_entered"]) == (
        "osaka", "disconnected", 0, 1,
    )  # fmt: skip


def test_one_site(state: Path) -> None:
    shown = run(state, "site", "show", "osaka")
    assert shown.exit_code == 0, shown.output
    assert "dials out" in shown.output
    assert "abc" in shown.output
    facts = json.loads(run(state, "site", "show", "cloud", "--json").output)
    assert [node["node_id"] for node in facts["node_views"]] == ["core-0"]
    assert facts["requests"][0]["kv_bytes"] == 34_000


def test_an_unknown_site_is_told_with_those_that_are_known(state: Path) -> None:
    failed = run(state, "site", "show", "atlantis")
    assert isinstance(failed.exception, NotFound)
    assert "known sites: cloud, osaka" in failed.exception.message


def test_top_once(state: Path) -> None:
    shown = run(state, "top", "--once")
    assert shown.exit_code == 0, shown.output
    for word in ("1 requests run", "core-0 ->", "30+4/64", "34.0 kB", "20.0", "requests of paris-0 are not shown"):
        assert word in shown.output
    look = json.loads(run(state, "top", "--once", "--json").output)
    assert look["requests"][0]["node_id"] == "core-0"
    assert look["silent_entry_node_ids"] == ["paris-0"]
    assert {node["node_id"] for node in look["nodes"]} == {"core-0", "osaka-0"}


def test_a_screen_that_is_too_small_says_what_it_leaves_out() -> None:
    requests = [admin_pb2.RunningRequest(request_id=f"n:{i}", age_s=100.0 - i) for i in range(7)]
    console = Console(width=140, record=True, file=io.StringIO())
    answer = admin_pb2.ListRequestsResponse(requests=requests)
    console.print(top_view(admin_pb2.Snapshot(registry_age_s=60.0), answer, most_requests=3))
    text = console.export_text()
    assert "4 younger requests are left out" in text
    assert "the registry was last heard 60 s ago" in text


def test_a_site_with_some_nodes_down() -> None:
    nodes = [
        admin_pb2.NodeView(node_id=f"c{i}", site="dc", tier="core", state=state, running=2, rtt_s=0.1 * (i + 1))
        for i, state in enumerate(["ready", "ready", "disconnected"])
    ]
    (site,) = sites_of(admin_pb2.Snapshot(nodes=nodes))
    assert (site.state, site.running) == ("2 of 3 ready", 4)
    assert site.rtt_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("age_s", "words"), [(0.44, "0.4 s"), (61, "61 s"), (600, "10 min"), (36_000, "10 h"), (1e9, "never")]
)
def test_ages(age_s: float, words: str) -> None:
    assert age_words(age_s) == words


def test_a_group_is_made_once() -> None:
    app = typer.Typer()
    assert group(app, "site") is group(app, "site")
    assert len(app.registered_groups) == 1
