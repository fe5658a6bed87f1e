"""`kvmesh placement`: the placement service in the foreground."""

from __future__ import annotations

import asyncio

import typer

from mesh.cli.settings_command import add_settings_command
from mesh.settings import PlacementSettings


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    add_settings_command(app, "placement", PlacementSettings, _run, "Run the placement service.")


def _run(settings: PlacementSettings) -> None:
    from placement.service.process import serve  # not before it is run: `kvmesh --help` must not load an engine

    asyncio.run(serve(settings))
