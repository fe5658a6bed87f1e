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
    keys = {leaf.key.replace(".", "__"): leaf for leaf in leaves(settings_class)}

    def command(config: Path | None, **flags: str | None) -> None:
        overrides = {keys[parameter].key: text for parameter, text in flags.items() if text is not None}
        run(load_settings(settings_class, config, overrides))

    parameters = [
        _parameter("config", Path | None, typer.Option(None, "--config", metavar="FILE", help="YAML file of settings."))
    ]
    for parameter, leaf in keys.items():
        shown = f"{leaf.help} (default: {leaf.default})" if leaf.default else leaf.help
        option = typer.Option(None, f"--{leaf.key}", metavar="VALUE", help=shown, show_default=False)
        parameters.append(_parameter(parameter, str | None, option))
    # Typer reads a command's options from its signature.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, help=help_text)(command)


def _parameter(name: str, annotation: object, option: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
