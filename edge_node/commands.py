"""`kvmesh edge`: one edge agent in the foreground; `kvmesh edge join`: make this box one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mesh.address import HostPort
from mesh.cli.settings_command import add_settings_group
from mesh.configfile import load_settings
from mesh.errors import InvalidRequest
from mesh.identity.enrolment import Token
from mesh.settings import EdgeSettings

_notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    edge = add_settings_group(app, "edge", EdgeSettings, _run, "Run an edge agent (llama.cpp engine).")
    edge.command("join")(join)


def join(
    mesh: Annotated[str, typer.Option("--mesh", metavar="HOST:PORT", help="Public gRPC listener of the mesh.")],
    model: Annotated[str, typer.Option(help="GGUF file to serve, or the demo model's name.")],
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Enrolment token (--token-file is safer on shared boxes).")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that holds the token; - reads standard input.")
    ] = None,
    model_id: Annotated[str, typer.Option(help="Name of the model; default: the mesh's first.")] = "",
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Where key, certificate, settings and state are kept.")
    ] = Path(".kvmesh/edge"),
    public: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the site's own clients reach gRPC.")] = (
        "127.0.0.1:7000"
    ),
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where they reach OpenAI-compatible HTTP.")] = (
        "127.0.0.1:7080"
    ),
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0: all CPUs that may be used.")] = 0,
    service: Annotated[bool, typer.Option("--service", help="Then start the systemd unit kvmesh-edge.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Then run the agent in the foreground.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Make this box a node of a mesh: key, certificate, settings, self-test."""
    from edge_node.agent.joining import JoinOptions, join_mesh, start_service  # not before it is run

    options = JoinOptions(
        mesh=HostPort.parse(mesh), token=Token.parse(_token(token, token_file)), folder=folder.absolute(), model=model,
        model_id=model_id, public=HostPort.parse(public), http=HostPort.parse(http), n_threads=threads,
        service=service,
    )  # fmt: skip
    report = asyncio.run(join_mesh(options, tell=lambda line: _notes.print(line)))
    if as_json:
        print(json.dumps(report.to_json(), sort_keys=True))
    if not report.ok:
        raise typer.Exit(1)
    if service:
        start_service()
        _notes.print("kvmesh-edge.service is running")
    elif run:
        _run(load_settings(EdgeSettings, report.config_file, {}))
    else:
        _notes.print(f"start it:  kvmesh edge --config {report.config_file}")


def _run(settings: EdgeSettings) -> None:
    from edge_node.agent.process import serve  # not before it is run: `kvmesh --help` must not load an engine

    asyncio.run(serve(settings))


def _token(token: str | None, token_file: Path | None) -> str:
    if (token is None) == (token_file is None):
        raise InvalidRequest("give --token or --token-file, one of them", field="token")
    if token is not None:
        return token
    assert token_file is not None
    try:
        return sys.stdin.readline() if str(token_file) == "-" else token_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {token_file}: {error}", field="token_file") from error
