"""A benchmark's result as JSON and as a table, with the machine that it ran on."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mesh import __version__
from mesh.bench.types import Bench, BenchResult, Cell

_ENGINES = ("torch", "llama-cpp-python", "grpcio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts of the machine that a number depends on."""

    cpu: str
    cores: int
    system: str
    python: str
    packages: Mapping[str, str]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            cpu=_cpu_model(),
            cores=cores,
            system=platform.platform(),
            python=platform.python_version(),
            packages={name: found for name in _ENGINES if (found := _version(name))},
        )


def to_json(bench: Bench, settings: Mapping[str, Cell], result: BenchResult, machine: Machine) -> str:
    """The result as one JSON object; NaN and infinities become null."""
    return json.dumps(
        {
            "bench": bench.name,
            "version": __version__,
            "machine": {
                "cpu": machine.cpu,
                "cores": machine.cores,
                "system": machine.system,
                "python": machine.python,
                "packages": dict(machine.packages),
            },
            "settings": dict(settings),
            "rows": [{column: _finite(value) for column, value in row.items()} for row in result.rows],
            "goals": [
                {"name": g.name, "value": _finite(g.value), "goal": g.goal, "direction": g.direction.value, "ok": g.ok}
                for g in result.goals
            ],
            "notes": list(result.notes),
        },
        allow_nan=False,
        indent=1,
    )


def render(bench: Bench, result: BenchResult, width: int) -> Group:
    """The result for a terminal of that width: rows, in several tables if their columns need it, then goals."""
    columns = tuple(result.rows[0]) if result.rows else ()
    tables = []
    for n, shown in enumerate(_fitting(columns, result.rows, width)):
        table = Table(title=bench.question if n == 0 else None, title_justify="left")
        for column in shown:
            table.add_column(column, justify="right")
        for row in result.rows:
            table.add_row(*(_cell(row[column]) for column in shown))
        tables.append(table)
    goals = Table(box=None, show_header=False)
    for goal in result.goals:
        verdict = Text("reached", style="green") if goal.ok else Text("missed", style="yellow")
        goals.add_row(
            goal.name, _cell(goal.value), f"{goal.direction.value.replace('_', ' ')} {_cell(goal.goal)}", verdict
        )
    return Group(*tables, goals, *result.notes)


def _fitting(columns: Sequence[str], rows: Sequence[Mapping[str, Cell]], width: int) -> list[list[str]]:
    """The columns of each table. The leading ones that hold texts name a row and are repeated in every table."""
    n_names = next((n for n, c in enumerate(columns) if not all(isinstance(row[c], str) for row in rows)), 0)
    names, left = list(columns[:n_names]), list(columns[n_names:])
    size = {c: max(len(c), *(len(_cell(row[c])) for row in rows)) + 3 for c in columns}
    tables = [list(names)]
    room = width - 1 - sum(size[c] for c in names)
    free = room
    for column in left:
        if size[column] > free and len(tables[-1]) > n_names:
            tables.append(list(names))
            free = room
        tables[-1].append(column)
        free -= size[column]
    return tables


def write(path: Path, text: str) -> None:
    """Write a report whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(path)


def print_result(console: Console, bench: Bench, result: BenchResult) -> None:
    """Show the result."""
    console.print(render(bench, result, console.width))


def _cell(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 or not math.isfinite(value) else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _finite(value: Cell) -> Cell:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
