"""kvmesh logs: what is shown, what is withheld, what bounds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from mesh.cli.logs_command import parse, register, tail
from mesh.errors import InvalidRequest, NotFound


def entry(second: int, **fields: Any) -> str:
    line = {"event": "request_ended", "logger": "placement.entry", "level": "info", "node_id": "edge-paris"}
    return json.dumps({**line, "timestamp": f"2026-11-01T10:00:{second:02}Z", **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lines in (
        (
            "edge-paris",
            [
                entry(1, request_id="r1"),
                entry(3, level="warning", event="link_lost"),
                "llama.cpp: the prompt was: my secret",
            ],
        ),
        ("core-1", [entry(2, node_id="core-1", prompt="my secret", token_ids=[1, 2, 3])]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "process.log").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["logs", *arguments, "--folder", str(folder)])


def test_lines_of_all_processes_in_order_and_nothing_secret(folder: Path) -> None:
    shown = run(folder, "--json")
    assert shown.exit_code == 0, shown.output
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["timestamp"][-3:] for line in lines] == ["01Z", "02Z", "03Z"]
    assert lines[1]["prompt"] == "[withheld str]"
    assert lines[1]["token_ids"] == "[withheld list]"
    assert "secret" not in shown.output
    assert "1 lines that are not of kvmesh's log are withheld" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (("--level", "warning"), ["03"]),
        (("core-1",), ["02"]),
        (("--request", "r1"), ["01"]),
        (("--event", "link_lost"), ["03"]),
        (("--since", "2026-11-01T10:00:02+00:00"), ["02", "03"]),
        (("-n", "1"), ["03"]),
        (("--since", "1s"), []),
    ],
)
def test_what_is_asked_for(folder: Path, arguments: tuple[str, ...], seconds: list[str]) -> None:
    shown = run(folder, "--json", *arguments)
    assert [json.loads(line)["timestamp"][-3:-1] for line in shown.stdout.splitlines()] == seconds


def test_people_see_a_line(folder: Path) -> None:
    assert "2026-11-01T10:00:03Z warning edge-paris link_lost" in " ".join(run(folder).stdout.split())


@pytest.mark.parametrize("arguments", [("--level", "loud"), ("--since", "yesterday")])
def test_bad_wishes(folder: Path, arguments: tuple[str, ...]) -> None:
    assert isinstance(run(folder, *arguments).exception, InvalidRequest)


def test_a_folder_without_logs(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path).exception, NotFound)


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"".join(b"%06d\n" % i for i in range(1000)) + b"half a li")
    lines, offset = tail(file, 712)
    assert lines == [b"%06d" % i for i in range(900, 1000)]
    assert offset == 7000


@pytest.mark.parametrize("raw", [b"", b"text", b"[1]", b'{"a": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_lines_that_are_not_ours(raw: bytes) -> None:
    assert parse(raw) is None


def test_a_line_without_a_time_is_shown() -> None:
    assert parse(json.dumps({"event": "x", "logger": "mesh"}).encode()) == {"event": "x", "logger": "mesh"}
