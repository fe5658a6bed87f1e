"""`kvmesh bench NAME [--KEY VALUE ...] [--json FILE]`: run one benchmark, show its table, write its result.

Every setting of a benchmark is also a flag (`--peers vllm` is `--set peers=vllm`). Benchmarks are found by the entry
points `kvmesh.benches`, each an object of the Bench protocol. Exit code 0 means that it ran, whatever it found.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mesh.bench.report import Machine, print_result, to_json, write
from mesh.bench.types import Bench, BenchContext, BenchResult, Cell
from mesh.cli.plugins import installed_entry_points
from mesh.errors import InvalidRequest, NotFound

BENCHES = "kvmesh.benches"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def bench(
        context: typer.Context,
        name: Annotated[str | None, typer.Argument(help="Which benchmark.")] = None,
        json_file: Annotated[
            Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
        ] = None,
        settings: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")
        ] = None,
        list_all: Annotated[bool, typer.Option("--list", help="The benchmarks, their questions and settings.")] = False,
    ) -> None:
        """Measure something of the mesh; `--list` shows what. Each setting is also a flag, `--KEY VALUE`."""
        found = benches()
        if list_all or name is None:
            _print_list(found)
            return
        chosen = choose(found, name)
        values = with_settings(chosen, [*(settings or []), *flags(context.args)])
        result = run(chosen, values)
        print_result(Console(), chosen, result)
        if json_file is not None:
            write(json_file, to_json(chosen, values, result, Machine.here()))


def benches() -> dict[str, Bench]:
    """Every benchmark of this installation by name."""
    loaded = [cast(Bench, entry_point.load()) for entry_point in installed_entry_points(BENCHES)]
    return {bench.name: bench for bench in loaded}


def choose(found: Mapping[str, Bench], name: str) -> Bench:
    """The benchmark of that name. Raises NotFound with the nearest."""
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean {near[0]}?" if near else "kvmesh bench --list shows all"
    raise NotFound(f"there is no benchmark {name!r}; {hint}")


def flags(words: Sequence[str]) -> list[str]:
    """`--some-key VALUE` and `--some-key=VALUE` as texts `some_key=VALUE`. Raises InvalidRequest for words between."""
    changes, left = [], list(words)
    while left:
        word = left.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key or not (equals or left):
            raise InvalidRequest(f"settings are given as --KEY VALUE or --set KEY=VALUE, got {word!r}", field="set")
        changes.append(f"{key.replace('-', '_')}={value if equals else left.pop(0)}")
    return changes


def with_settings(bench: Bench, changes: list[str]) -> dict[str, Cell]:
    """The benchmark's defaults with KEY=VALUE texts over them. Raises InvalidRequest for unknown keys and values of
    another type."""
    values = dict(bench.defaults)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in values:
            known = ", ".join(f"{k}={v}" for k, v in bench.defaults.items())
            raise InvalidRequest(f"{bench.name} takes --set KEY=VALUE with {known}; got {change!r}", field="set")
        values[key] = _typed(key, text, values[key])
    return values


def run(bench: Bench, settings: Mapping[str, Cell]) -> BenchResult:
    """Run it with a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(bench.name, total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        async def measure() -> BenchResult:
            return await bench.run(BenchContext(settings=settings, progress=progress))

        return asyncio.run(measure())


def _typed(key: str, text: str, default: Cell) -> Cell:
    if isinstance(default, str):
        return text
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float)}
    if type(value) not in kinds[type(default)]:
        raise InvalidRequest(f"{key} must be a {type(default).__name__}, got {text!r}", field="set")
    return float(value) if isinstance(default, float) else cast(Cell, value)


def _print_list(found: Mapping[str, Bench]) -> None:
    table = Table(box=None)
    for column in ("bench", "question", "settings"):
        table.add_column(column)
    for bench in found.values():
        table.add_row(bench.name, bench.question, ", ".join(f"{k}={v}" for k, v in bench.defaults.items()))
    Console().print(table)
