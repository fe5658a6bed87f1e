"""`kvmesh kvtc calibrate MODEL`: make a model's kvtc artifact; `kvmesh kvtc show FILE`: what it offers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from core_node.kvtc.texts import Text, built_in, from_files
from mesh.kv.kvtc.artifact import Artifact, read_artifact
from mesh.kv.kvtc.shelf import path_beside
from mesh.model.description import describe

if TYPE_CHECKING:  # torch takes seconds to import: only calibration itself does
    from core_node.kvtc.calibrate import Calibration


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    group = typer.Typer(no_args_is_help=True, help="Transform coding of KV: calibrate a model, look at an artifact.")
    group.command("calibrate")(calibrate_command)
    group.command("show")(show_command)
    app.add_typer(group, name="kvtc")


def calibrate_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file or Hugging Face folder.")],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text like your users'; again for more. Joins the built-in."),
    ] = None,
    only_text: Annotated[bool, typer.Option("--only-text", help="Leave the built-in texts out.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: beside the model.")] = None,
    fit_windows: Annotated[int, typer.Option("--windows", min=4, help="Windows of 1,024 tokens to learn of.")] = 16,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: one per core.")] = 0,
) -> None:
    """Make the artifact of MODEL: minutes on two cores for a small model, the same file for the same input."""
    given = from_files(text or ())
    texts = given if only_text and given else (*given, *built_in())
    made = run_with_bar(model, texts, fit_windows, threads)
    target = out or path_beside(model)
    write_artifact(target, made.data)
    console = Console()
    console.print(table_of(made.artifact))
    console.print(f"{target} ({len(made.data) / 1e6:.1f} MB, digest {made.artifact.digest[:16]})")


def show_command(file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Settings of an artifact, with what each was measured to lose."""
    artifact = read_artifact(file)
    console = Console()
    console.print(table_of(artifact))
    rank_k, rank_v = artifact.ranks
    console.print(f"{artifact.geometry.architecture}, ranks {rank_k} and {rank_v}, digest {artifact.digest[:16]}")
    console.print(artifact.notes)


def run_with_bar(model: Path, texts: tuple[Text, ...], fit_windows: int, threads: int) -> Calibration:
    """Calibrate with a progress bar on stderr."""
    import torch
    from threadpoolctl import threadpool_limits

    from core_node.kvtc.calibrate import Plan, calibrate

    if threads:
        torch.set_num_threads(threads)
    plan = Plan(fit_windows=fit_windows, held_out_windows=min(12, max(4, fit_windows // 4)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading")

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        with threadpool_limits(threads or None):  # numpy's products
            return calibrate(describe(model), texts, plan, progress)


def write_artifact(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def table_of(artifact: Artifact) -> Table:
    """Every setting and kind of text."""
    table = Table(title="Settings", title_justify="left")
    for column in ("setting", "text", "ratio", "perplexity", "± (1 s.e.)", "divergence"):
        table.add_column(column, justify="right")
    for setting in artifact.settings:
        for q in setting.quality:
            table.add_row(
                setting.name, q.text, f"{q.coded_ratio:.1f}x", f"{q.loss_ratio:+.2%}", f"{q.loss_stderr_ratio:.2%}",
                f"{q.divergence_ratio:.2%}",
            )  # fmt: skip
    return table
