"""`kvmesh up` and `kvmesh demo` on the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from mesh.address import HostPort
from mesh.cli.machine_checks import cpu_flags
from mesh.local.layout import LocalPlan, core_dtype, share_threads, sites_of
from mesh.machine import usable_threads
from mesh.model.catalogue import DEMO_MODEL, find_model

STATE = Path(".kvmesh")

Cores = Annotated[int, typer.Option("--core", min=0, help="Number of core nodes.")]
Edges = Annotated[str, typer.Option("--edge", metavar="SITE,...", help="Edge sites, or NAME:REGION:JURISDICTION.")]
State = Annotated[Path, typer.Option("--state", metavar="DIR", help="State folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Model = Annotated[str, typer.Option("--model", help="Model: the demo model's name, or a GGUF file.")]
Device = Annotated[str, typer.Option("--device", help="Device of the core nodes: cpu, cuda or cuda:N.")]
CoreThreads = Annotated[int, typer.Option(min=0, help="Compute threads of a core node; 0: shared out.")]
EdgeThreads = Annotated[int, typer.Option(min=0, help="Compute threads of an edge; 0: shared out.")]
GrpcPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the core entry's gRPC; 0: a free one.")]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the core entry's HTTP; 0: a free one.")]
Consul = Annotated[str, typer.Option(metavar="HOST:PORT", help="Use this Consul agent as the registry.")]


def register_up(app: typer.Typer) -> None:
    """Add `kvmesh up`."""

    @app.command("up")
    def up_command(
        core: Cores = 1,
        edge: Edges = "paris,osaka",
        as_json: AsJson = False,
        state: State = STATE,
        model: Model = DEMO_MODEL,
        device: Device = "cpu",
        core_threads: CoreThreads = 0,
        edge_threads: EdgeThreads = 0,
        grpc_port: GrpcPort = 0,
        http_port: HttpPort = 0,
        consul: Consul = "",
    ) -> None:
        """Run a whole mesh on this machine in the foreground; Ctrl-C drains and stops it."""
        from mesh.local.up import up

        plan = make_plan(
            core=core, edge=edge, state=state, model=model, device=device, core_threads=core_threads,
            edge_threads=edge_threads, grpc_port=grpc_port, http_port=http_port, consul=consul,
        )  # fmt: skip
        raise typer.Exit(asyncio.run(up(plan, as_json=as_json)))


def register_demo(app: typer.Typer) -> None:
    """Add `kvmesh demo`."""

    @app.command("demo")
    def demo_command(as_json: AsJson = False, device: Device = "cpu", state: State = STATE / "demo") -> None:
        """A six-step tour on a mesh of its own: a core node and two sites, real model, real moves."""
        from mesh.local.demo import demo

        plan = make_plan(core=1, edge="paris,osaka", state=state, model=DEMO_MODEL, device=device)
        raise typer.Exit(asyncio.run(demo(plan, as_json=as_json)))


def make_plan(
    *,
    core: int,
    edge: str,
    state: Path,
    model: str,
    device: str,
    core_threads: int = 0,
    edge_threads: int = 0,
    grpc_port: int = 0,
    http_port: int = 0,
    consul: str = "",
) -> LocalPlan:
    """The plan of a local mesh for this machine. Raises InvalidRequest and UnknownModel."""
    sites = sites_of(edge)
    threads = share_threads(usable_threads(), core, len(sites))
    model_path = find_model(model)
    return LocalPlan(
        folder=state.absolute() / "mesh",
        model_id=model if model == DEMO_MODEL else model_path.stem,
        model_path=model_path.absolute(),
        cores=core,
        sites=tuple(sites),
        core_threads=core_threads or threads.core,
        edge_threads=edge_threads or threads.edge,
        core_device=device,
        core_dtype=core_dtype(device, cpu_flags()),
        grpc_port=grpc_port,
        http_port=http_port,
        consul=HostPort.parse(consul) if consul else None,
    )
