"""`kvmesh backup | restore`: the placement side of a mesh in one locked file."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mesh.errors import InvalidRequest
from mesh.settings import PlacementSettings, load_settings
from placement.backup.contents import Summary
from placement.backup.sealed import Secret

Archive = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="The file.")]
Config = Annotated[Path, typer.Option("--config", metavar="FILE", help="Settings of the placement service.")]
Ca = Annotated[Path | None, typer.Option("--ca", metavar="FOLDER", help="Folder of the mesh's authority.")]
More = Annotated[
    list[str] | None,
    typer.Option("--more", metavar="NAME=FOLDER", help="Another folder, e.g. the audit log of a site; may repeat."),
]
Passphrase = Annotated[
    Path | None, typer.Option("--passphrase-file", metavar="FILE", help="What is in it locks the archive.")
]
Key = Annotated[Path | None, typer.Option("--key-file", metavar="FILE", help="Or this file, of 32 bytes or more.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    app.command("backup")(backup_command)
    app.command("restore")(restore_command)


def backup_command(
    archive: Archive, config: Config, ca: Ca = None, more: More = None,
    passphrase_file: Passphrase = None, key_file: Key = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Keep authority, identity, policies, tenants and audit of the placement side in one locked file.

    The placement service may run meanwhile."""
    from placement.backup.run import backup  # not before it is run

    settings, secret = load_settings(PlacementSettings, config, {}), Secret.read(passphrase_file, key_file)
    _show(asyncio.run(backup(settings, archive, secret, ca=ca, more=_named(more))), "kept", as_json=as_json)
    if ca is None:
        Console(stderr=True).print("without --ca: the authority's key is not in it", style="yellow")


def restore_command(
    archive: Archive, config: Config, ca: Ca = None, more: More = None,
    passphrase_file: Passphrase = None, key_file: Key = None,
    check_only: Annotated[bool, typer.Option("--check", help="Only read it all and hold it to its digests.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Put a backup back, with the placement service stopped: into empty folders only, nothing is written over."""
    from placement.backup.run import check, restore

    settings, secret = load_settings(PlacementSettings, config, {}), Secret.read(passphrase_file, key_file)
    if check_only:
        _show(check(archive, secret), "whole", as_json=as_json)
        return
    _show(asyncio.run(restore(settings, archive, secret, ca=ca, more=_named(more))), "restored", as_json=as_json)


def _named(more: list[str] | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in more or ():
        name, sign, folder = text.partition("=")
        if not sign or not folder or name in found:
            raise InvalidRequest(f"--more is NAME=FOLDER, each name once, got {text[:80]!r}", field="--more")
        found[name] = Path(folder)
    return found


def _show(summary: Summary, word: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    made = datetime.fromtimestamp(summary.made_unix_s, UTC).isoformat(timespec="seconds")
    values = f" and {summary.values} values of the registry" if summary.values else ""
    Console(highlight=False).print(
        f"{word}: mesh {summary.mesh} as of {made}, {summary.files} files ({summary.size_bytes:,} bytes) of "
        f"{', '.join(summary.folders)}{values}"
    )
