"""`kvmesh core`: one core node in the foreground."""

from __future__ import annotations

import asyncio

import typer

from core_node.service import serve
from mesh.cli.settings_command import add_settings_command
from mesh.settings import CoreSettings


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    add_settings_command(app, "core", CoreSettings, lambda s: asyncio.run(serve(s)), "Run a core node (torch engine).")
