"""`kvmesh`: the one command. Sub-commands come from the entry points `kvmesh.commands`.

Each entry point is a callable `register(app)`. One that names an extra (`"core_node.commands:register [core]"`) is
shown only where the packages of that extra are installed, so an edge box shows no core commands. A MeshError ends
as one line on stderr and exit code 1; wrong usage is 2.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Annotated, cast

import typer

from mesh import __version__
from mesh.cli.plugins import installed_entry_points
from mesh.errors import MeshError

COMMANDS = "kvmesh.commands"


def build_app(first_argument: str = "") -> typer.Typer:
    """The app with every command that this installation can run.

    An entry point that bears the name of its only command is loaded alone when that command is run: a node does
    not import what other commands need."""
    app = typer.Typer(
        name="kvmesh",
        help="Edge-cloud federated LLM inference: answered where the data may go and where it is fastest.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            typer.echo(f"kvmesh {__version__}")
            raise typer.Exit

    found = installed_entry_points(COMMANDS)
    for entry_point in [e for e in found if e.name == first_argument] or found:
        register = cast(Callable[[typer.Typer], None], entry_point.load())
        register(app)
    return app


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Never raises a MeshError."""
    try:
        build_app(arguments[0] if arguments else "")(args=arguments, prog_name="kvmesh")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except MeshError as exc:
        return _refuse(exc)
    except BaseExceptionGroup as group:
        error = _only_mesh_error(group)
        if error is None:
            raise
        return _refuse(error)
    return 0


def _refuse(error: MeshError) -> int:
    print(f"kvmesh: {one_line(error)}", file=sys.stderr)
    return 1


def one_line(error: MeshError) -> str:
    """An error as a person reads it: its message, and its reason word for a search."""
    return f"{' '.join(error.message.split())} [{error.reason}]"


def _only_mesh_error(group: BaseExceptionGroup[BaseException]) -> MeshError | None:
    """The MeshError of a group of which everything else is mere cancellation; None if it holds a bug."""
    ours, rest = group.split(MeshError)
    if rest is not None:
        _, rest = rest.split(asyncio.CancelledError)
    if ours is None or rest is not None:
        return None
    found: BaseException = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return cast(MeshError, found)


if __name__ == "__main__":
    main()
