"""`kvmesh core`: one core node in the foreground."""

from __future__ import annotations

import asyncio

import typer

from mesh.cli.settings_command import add_settings_command
from mesh.settings import CoreSettings


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    add_settings_command(app, "core", CoreSettings, _run, "Run a core node (torch engine).")


def _run(settings: CoreSettings) -> None:
    from core_node.service import serve  # not before it is run: `kvmesh --help` must not load an engine

    asyncio.run(serve(settings))
