"""Command groups that more than one package adds commands to.

An entry point of `kvmesh.commands` must not bear such a group's name: it would be loaded alone and hide the others'
commands (see mesh.cli.main).
"""

from __future__ import annotations

from typing import Final

import typer

_HELP: Final = {"site": "Sites of the mesh.", "policy": "Placement policies of tenants."}


def group(app: typer.Typer, name: str) -> typer.Typer:
    """The sub-app `name` of `app`, made if nobody did before."""
    for registered in app.registered_groups:
        if registered.name == name and registered.typer_instance is not None:
            return registered.typer_instance
    made = typer.Typer(no_args_is_help=True, help=_HELP[name])
    app.add_typer(made, name=name)
    return made
