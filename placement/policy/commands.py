"""`kvmesh policy schema`: the JSON Schema of policy documents, for editors."""

from __future__ import annotations

import json
import sys

import typer

from mesh.cli.groups import group


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    group(app, "policy").command("schema")(schema)


def schema() -> None:
    """Print the JSON Schema of policy documents, for editors that check YAML.

    In VS Code: `# yaml-language-server: $schema=policy.schema.json` as the document's first line.
    """
    from placement.policy.document import json_schema  # pydantic takes its time

    json.dump(json_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
