"""Makes `kvmesh NAME --config FILE [--dotted.key VALUE ...]` out of a settings class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import typer

from mesh.configfile import GroupT, leaves, load_settings


def add_settings_command(
    app: typer.Typer, name: str, settings_class: type[GroupT], run: Callable[[GroupT], None], help_text: str
) -> None:
    """Add a command whose options are every leaf of `settings_class`; `run` gets the checked settings.

    `run` blocks until the process is done. load_settings' InvalidRequest goes to the caller of the app."""
    app.command(name, help=help_text)(_command(settings_class, run))


def add_settings_group(
    app: typer.Typer, name: str, settings_class: type[GroupT], run: Callable[[GroupT], None], help_text: str
) -> typer.Typer:
    """As `add_settings_command`, for a command that has others below it: returns the group that they go to."""
    group = typer.Typer(invoke_without_command=True, help=help_text)
    group.callback(help=help_text)(_command(settings_class, run, below=True))
    app.add_typer(group, name=name)
    return group


def _command(
    settings_class: type[GroupT], run: Callable[[GroupT], None], *, below: bool = False
) -> Callable[..., None]:
    """The function that typer makes a command of. `below`: nothing is done where a command below it was given."""
    keys = {leaf.key.replace(".", "__"): leaf for leaf in leaves(settings_class)}

    def command(config: Path | None, context: typer.Context | None = None, **flags: str | None) -> None:
        if context is not None and context.invoked_subcommand is not None:
            return
        overrides = {keys[parameter].key: text for parameter, text in flags.items() if text is not None}
        run(load_settings(settings_class, config, overrides))

    parameters = [
        _parameter("config", Path | None, typer.Option(None, "--config", metavar="FILE", help="YAML file of settings."))
    ]
    if below:
        parameters.append(_parameter("context", typer.Context, inspect.Parameter.empty))
    for parameter, leaf in keys.items():
        shown = f"{leaf.help} (default: {leaf.default})" if leaf.default else leaf.help
        option = typer.Option(None, f"--{leaf.key}", metavar="VALUE", help=shown, show_default=False)
        parameters.append(_parameter(parameter, str | None, option))
    # Typer reads a command's options from its signature.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(name: str, annotation: object, option: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
