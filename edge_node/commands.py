"""`kvmesh edge`: one edge agent in the foreground."""

from __future__ import annotations

import asyncio

import typer

from edge_node.agent.process import serve
from mesh.cli.settings_command import add_settings_command
from mesh.settings import EdgeSettings


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    add_settings_command(
        app, "edge", EdgeSettings, lambda s: asyncio.run(serve(s)), "Run an edge agent (llama.cpp engine)."
    )
