"""`kvmesh edge`: one edge agent in the foreground."""

from __future__ import annotations

import asyncio

import typer

from mesh.cli.settings_command import add_settings_command
from mesh.settings import EdgeSettings


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    add_settings_command(app, "edge", EdgeSettings, _run, "Run an edge agent (llama.cpp engine).")


def _run(settings: EdgeSettings) -> None:
    from edge_node.agent.process import serve  # not before it is run: `kvmesh --help` must not load an engine

    asyncio.run(serve(settings))
