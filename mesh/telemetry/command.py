"""`kvmesh telemetry export`: what sites measured, also while they were cut off, for a Prometheus of yours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mesh.errors import NotFound
from mesh.telemetry.history import open_metrics


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    telemetry = typer.Typer(no_args_is_help=True, help="What nodes measured.")
    telemetry.callback()(lambda: None)  # one command only, and still a group
    telemetry.command("export")(export)
    app.add_typer(telemetry, name="telemetry")


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Placement's STATE_FOLDER/telemetry.")],
) -> None:
    """Print every sample as OpenMetrics with its own time; `promtool tsdb create-blocks-from openmetrics` takes it."""
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}", field="folder")
    for line in open_metrics(folder):
        typer.echo(line)
