"""The guides: every `kvmesh` command in them exists with the options that it is given, every file named is there."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "deploy" / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def app() -> Any:
    """All commands of pyproject.toml, whatever is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    app = typer.Typer()
    for name in sorted(project["entry-points"]["kvmesh.commands"]):
        module, _, function = project["entry-points"]["kvmesh.commands"][name].split(" ")[0].partition(":")
        getattr(importlib.import_module(module), function)(app)
    return typer.main.get_command(app)


def commands(guide: Path) -> list[list[str]]:
    """The words behind `kvmesh` of every invocation, in blocks and in the running text."""
    text = guide.read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    lines = [line.partition("    #")[0] for line in blocks.splitlines()]
    lines += re.findall(r"`((?:kvmesh)[^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    found = [re.search(r"(?:^|[/\s])kvmesh ((?:ca|edge|site|[a-z]+)\b.*)", line) for line in lines]
    return [shlex.split(match[1]) for match in found if match is not None and not line_is_other(match.string)]


def line_is_other(line: str) -> bool:
    """`helm install kvmesh`, `kubectl -n kvmesh` and the like name kvmesh, but do not run it."""
    return bool(re.match(r"\s*(kubectl|helm|docker|install|systemctl|cp)\b", line))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_commands_exist_with_their_options(guide: Path, app: Any) -> None:
    found = commands(guide)
    assert found
    for words in found:
        command, rest = app, list(words)
        while getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"{guide.name}: kvmesh {' '.join(words)}"
            command = command.commands[rest.pop(0)]
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert given <= options | {"--help"}, f"{guide.name}: kvmesh {' '.join(words)}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_files_of_the_tree_are_there(guide: Path) -> None:
    named = set(re.findall(r"\b(deploy/[\w./-]+[\w-])", guide.read_text()))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_guides_say_what_was_not_tried() -> None:
    assert "Not tried" in (ROOT / "deploy" / "docs" / "platform-admin.md").read_text()
