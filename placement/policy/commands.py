"""`kvmesh policy schema` and `kvmesh policy explain`: documents for editors, and for people. Neither asks a mesh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mesh.cli.groups import group
from mesh.errors import InvalidRequest


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    group(app, "policy").command("schema")(schema)
    group(app, "policy").command("explain")(explain)


def schema() -> None:
    """Print the JSON Schema of policy documents, for editors that check YAML.

    In VS Code: `# yaml-language-server: $schema=policy.schema.json` as the document's first line.
    """
    from placement.policy.document import json_schema  # pydantic takes its time

    json.dump(json_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")


def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML policy; - reads standard input.")],
) -> None:
    """Say in plain sentences what a policy document means."""
    from placement.policy.aloud import read_aloud
    from placement.policy.model import parse_policy

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"cannot read {file}: {exc}", field="file") from exc
    for sentence in read_aloud(parse_policy(text, version=1)):
        print(sentence)
