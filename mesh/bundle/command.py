"""`kvmesh bundle create`: everything that an edge box needs, in one file that is carried there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mesh.bundle.create import BASELINE, BundleOrder, create
from mesh.errors import InvalidRequest
from mesh.model.catalogue import DEMO_MODEL, find_model

_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    bundle = typer.Typer(no_args_is_help=True, help="Installing an edge box without a network.")
    bundle.callback()(lambda: None)  # one command only, and still a group
    bundle.command("create")(create_command)
    app.add_typer(bundle, name="bundle")


def create_command(
    llama: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=WHEEL",
            help=f"A wheel of llama-cpp-python; repeat for several. {BASELINE}: runs on every x86-64-v2 CPU. Other "
            "names: made for the CPU in the build.json beside the wheel. deploy/llama_cpp/build_wheels.py makes both.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to put it.")] = Path("dist"),
    model: Annotated[str, typer.Option(help="Model to carry: the demo model's name, or ID=FILE.gguf.")] = DEMO_MODEL,
    no_model: Annotated[bool, typer.Option("--no-model", help="Carry none: the box has one.")] = False,
    python: Annotated[
        list[str] | None, typer.Option(metavar="3.N", help="Python versions of the boxes; repeatable.")
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take these wheels instead of asking a package index.")
    ] = None,
    sign_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign with this P-256 key (PEM)."),
    ] = None,
) -> None:
    """Make a bundle and its tar. On the box: unpack it and run ./install.sh."""
    console = Console(stderr=True, highlight=False)
    pairs = [_pair(text, "llama") for text in llama]
    model_id, model_path = ("", None) if no_model else _model(model)
    order = BundleOrder(
        out=out,
        llama=dict(pairs),
        python=tuple(python or [_HERE]),
        model_id=model_id,
        model_path=model_path,
        wheels=wheels,
        sign_key=sign_key,
    )
    made = create(order, lambda step: console.print(f"  {step}"))
    if sign_key is None:
        console.print("not signed: the checksums in it tell damage, not a change that somebody made on purpose")
    console.print(f"{made.stat().st_size / 1e6:.0f} MB")
    typer.echo(str(made))


def _pair(text: str, field: str) -> tuple[str, Path]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise InvalidRequest(f"--{field} is NAME=FILE, got {text[:100]!r}", field=field)
    return name, Path(value)


def _model(text: str) -> tuple[str, Path]:
    if "=" in text:
        return _pair(text, "model")
    return text, find_model(text)
