"""`kvmesh logs`: what the processes of this machine logged, as a person reads it.

Reads the log files of a local mesh, or the journal of the systemd units. Bounded: only the end of each file, at most so
many lines. Lines pass the same filter as when they were written (mesh.telemetry.log), so a field that may hold a
user's data is withheld here too; lines that are not of kvmesh (an interpreter's last words, a library's) are counted,
not shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from mesh.errors import InvalidRequest, NotFound
from mesh.telemetry.log import keep_safe_fields

MAX_READ_BYTES: Final = 8 * 1024 * 1024  # of the end of each file
MAX_LINES: Final = 100_000
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_STYLES: Final = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
_HEAD: Final = ("timestamp", "level", "node_id", "event", "logger")
_FOLLOW_EVERY_S: Final = 0.5
_SPANS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines to show; None and "": all."""

    level: str = "debug"
    since: datetime | None = None
    node_id: str = ""
    request_id: str = ""
    event: str = ""

    def takes(self, line: dict[str, Any]) -> bool:
        """Whether the line is wanted. One without a readable time or level is."""
        level = str(line.get("level", "critical"))
        if level in _LEVELS and _LEVELS.index(level) < _LEVELS.index(self.level):
            return False
        at = _time_of(line)
        if self.since is not None and at is not None and at < self.since:
            return False
        wanted = (("node_id", self.node_id), ("request_id", self.request_id), ("event", self.event))
        return all(not value or line.get(name) == value for name, value in wanted)


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    app.command("logs")(logs)


def logs(
    node: Annotated[str, typer.Argument(metavar="[NODE]", help="Only this node.")] = "",
    level: Annotated[str, typer.Option(help="Least severity: debug, info, warning or error.")] = "info",
    since: Annotated[str, typer.Option(metavar="WHEN", help="10m, 2h, 1d, or an ISO time.")] = "",
    request: Annotated[str, typer.Option(metavar="ID", help="Only lines of this request.")] = "",
    event: Annotated[str, typer.Option(help="Only this event, e.g. request_ended.")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=MAX_LINES, help="Most lines: the newest.")] = 200,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines until Ctrl-C.")] = False,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="A local mesh's folder.")] = Path(".kvmesh/mesh"),
    journal: Annotated[bool, typer.Option("--journal", help="The systemd units' journal instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """The structured log of the processes on this machine. It never holds prompts."""
    if level not in _LEVELS:
        raise InvalidRequest(f"unknown level {level[:20]!r}: one of {', '.join(_LEVELS[:-1])}", field="level")
    wanted = Wanted(level=level, since=_since(since), node_id=node, request_id=request, event=event)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    source = _journal_lines(follow) if journal else _file_lines(folder, follow)
    kept: deque[dict[str, Any]] = deque(maxlen=lines)
    foreign, live = 0, False
    try:
        for raw in source:
            if raw is None:  # what was there is read; from here on lines come as they are written
                _show_all(console, _in_order(kept), as_json=as_json)
                kept.clear()
                live = True
                continue
            line = parse(raw)
            foreign += line is None
            if line is not None and wanted.takes(line):
                if live:
                    _show(console, line, as_json=as_json)
                else:
                    kept.append(line)
    except KeyboardInterrupt:
        pass
    _show_all(console, _in_order(kept), as_json=as_json)
    if foreign:
        Console(stderr=True).print(f"{foreign} lines that are not of kvmesh's log are withheld", style="dim")


def parse(raw: bytes) -> dict[str, Any] | None:
    """A line of the structured log with unsafe fields withheld; None if it is not one."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or "event" not in line or "logger" not in line:
        return None
    return dict(keep_safe_fields(None, "", line))


def tail(path: Path, most_bytes: int = MAX_READ_BYTES) -> tuple[list[bytes], int]:
    """The whole lines at the end of a file, and the offset behind them."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - most_bytes)
        file.seek(start)
        data = file.read(most_bytes)
    end = data.rfind(b"\n") + 1
    found = data[:end].split(b"\n")[:-1]
    return (found[1:] if start else found), start + end


def _file_lines(folder: Path, follow: bool) -> Iterator[bytes | None]:
    files = sorted(folder.glob("*/process.log"))
    if not files:
        raise NotFound(
            f"no log in {folder}: run this where `kvmesh up` ran, give --folder, or --journal for systemd units",
            field="folder",
        )
    offsets = {}
    for file in files:
        found, offsets[file] = tail(file)
        yield from found
    yield None
    while follow:
        time.sleep(_FOLLOW_EVERY_S)
        for file in files:
            size = file.stat().st_size
            if size < offsets[file]:  # the process was started anew
                offsets[file] = 0
            with file.open("rb") as opened:
                opened.seek(offsets[file])
                data = opened.read(MAX_READ_BYTES)
            end = data.rfind(b"\n") + 1
            offsets[file] += end
            yield from data[:end].split(b"\n")[:-1]


def _journal_lines(follow: bool) -> Iterator[bytes | None]:
    command = ["journalctl", "--output=cat", "--no-pager", f"--lines={MAX_LINES}", "--unit=kvmesh-*"]
    try:
        process = subprocess.Popen([*command, *(["--follow"] if follow else [])], stdout=subprocess.PIPE)
    except OSError as error:
        raise NotFound(f"journalctl does not run ({error.strerror}): is this a machine with systemd?") from error
    assert process.stdout is not None
    if follow:
        yield None  # the journal gives the old lines first, in order
    try:
        yield from (line.rstrip(b"\n") for line in process.stdout)
    finally:
        process.terminate()
        process.wait()


def _in_order(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(lines, key=lambda line: str(line.get("timestamp", "")))


def _show_all(console: Console, lines: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    for line in lines:
        _show(console, line, as_json=as_json)


def _show(console: Console, line: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print(json.dumps(line))
        return
    level = str(line.get("level", ""))
    facts = " ".join(f"{name}={value}" for name, value in line.items() if name not in (*_HEAD, "exception"))
    text = Text(f"{line.get('timestamp', '')} {level:7} {line.get('node_id', '')} ", style=_STYLES.get(level, ""))
    text.append(f"{line['event']}", style="bold")
    text.append(f" {facts}" if facts else "")
    console.print(text)
    if line.get("exception"):
        console.print(str(line["exception"]).rstrip())


def _time_of(line: dict[str, Any]) -> datetime | None:
    try:
        at = datetime.fromisoformat(str(line.get("timestamp")))
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _since(text: str) -> datetime | None:
    if not text:
        return None
    if text[-1] in _SPANS and text[:-1].isdecimal() and len(text) < 10:
        return datetime.now(UTC) - timedelta(seconds=int(text[:-1]) * _SPANS[text[-1]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidRequest(f"--since takes 10m, 2h, 1d or an ISO time, got {text[:40]!r}", field="since") from exc
    return at if at.tzinfo else at.astimezone()
