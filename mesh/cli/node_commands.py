"""`kvmesh node ...`: what an operator changes at a node while it runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from mesh.cli.client_connection import Connection, connected
from mesh.cli.client_output import message_json, print_json

_out = Console(highlight=False, markup=False)


def register(app: typer.Typer) -> None:
    """Add all of them."""
    node = typer.Typer(no_args_is_help=True, help="Nodes of the mesh.")
    node.command("role")(connected(admin=True)(role))
    app.add_typer(node, name="node")


def role(
    connection: Connection,
    node: Annotated[str, typer.Argument(metavar="NODE", help="A core node.")],
    wanted: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Change which half of a request a core node does, until it is started anew. Running requests go on."""
    with connection.open() as mesh:
        changed = mesh.set_node_role(node, wanted)
    if as_json:
        print_json({"node": node, "role": wanted, **message_json(changed)})
        return
    _out.print(f"{node} has the role {wanted} now, it was {changed.previous_role}")
