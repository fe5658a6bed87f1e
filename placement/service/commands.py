"""`kvmesh placement`: the placement service in the foreground."""

from __future__ import annotations

import asyncio

import typer

from mesh.cli.settings_command import add_settings_command
from mesh.settings import PlacementSettings
from placement.service.process import serve


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    add_settings_command(
        app, "placement", PlacementSettings, lambda s: asyncio.run(serve(s)), "Run the placement service."
    )
