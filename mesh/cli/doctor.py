"""`kvmesh doctor`: is this machine fit, and what to do where it is not. One line each: ok, warn or fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from mesh.cli import machine_checks
from mesh.cli.checks import Check, Examined, Finding, Verdict
from mesh.cli.plugins import installed_entry_points
from mesh.errors import MeshError
from mesh.model.catalogue import demo_model_path

CHECKS = "kvmesh.checks"
_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("doctor")
    def doctor(
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
        model: Annotated[Path | None, typer.Option(help="GGUF file to test with; default: the demo model.")] = None,
        state: Annotated[Path, typer.Option(help="State folder that kvmesh up would use.")] = Path(".kvmesh"),
    ) -> None:
        """Check this machine and say in one line each what to do."""
        findings = examine(all_checks(), Examined(state_folder=state, model_path=model or _demo_model()))
        if as_json:
            typer.echo(json.dumps(report(findings)))
        else:
            _print(findings)
        if any(finding.verdict is Verdict.FAIL for _, finding in findings):
            raise typer.Exit(1)


def all_checks() -> list[Check]:
    """The machine's checks, then those of the installed packages."""
    checks = list(machine_checks.checks())
    for entry_point in installed_entry_points(CHECKS):
        of_package = cast(Callable[[], Sequence[Check]], entry_point.load())
        checks.extend(of_package())
    return checks


def examine(checks: Sequence[Check], examined: Examined) -> list[tuple[str, Finding]]:
    """Run every check; one that raises a MeshError counts as failed with its message."""
    findings = []
    for check in checks:
        try:
            finding = check.run(examined)
        except MeshError as exc:
            finding = Finding(verdict=Verdict.FAIL, says=exc.message)
        findings.append((check.name, finding))
    return findings


def report(findings: Sequence[tuple[str, Finding]]) -> dict[str, object]:
    """The findings as one JSON object."""
    rows = [asdict(finding) | {"name": name, "verdict": finding.verdict.value} for name, finding in findings]
    return {"ok": all(row["verdict"] != Verdict.FAIL.value for row in rows), "checks": rows}


def _demo_model() -> Path | None:
    try:
        return demo_model_path()
    except MeshError:  # the check "model" says so
        return None


def _print(findings: Sequence[tuple[str, Finding]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=4)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, finding in findings:
        colour = _COLOURS[finding.verdict]
        says = f"{finding.says}: {finding.remedy}" if finding.remedy else finding.says
        table.add_row(f"[{colour}]{finding.verdict.value}[/]", name, says)
    Console().print(table)
