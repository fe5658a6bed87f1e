"""The kvmesh command: how entry points become commands, and how errors end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from mesh.cli import main as cli
from mesh.cli import plugins
from mesh.cli.settings_command import add_settings_command
from mesh.errors import InvalidRequest, NodeUnreachable
from mesh.settings import EdgeSettings


class Entry:
    """An entry point that registers one command."""

    def __init__(self, name: str, run: object) -> None:
        self.name, self.loaded = name, False
        self._run = run

    def load(self) -> object:
        self.loaded = True

        def register(app: typer.Typer) -> None:
            app.command(self.name)(self._run)  # type: ignore[type-var]

        return register


def use(monkeypatch: pytest.MonkeyPatch, **commands: object) -> dict[str, Entry]:
    entries = {name: Entry(name, run) for name, run in commands.items()}
    # A second command, so that typer does not take the only one for the app itself.
    entries["other"] = Entry("other", lambda: None)
    monkeypatch.setattr(cli, "installed_entry_points", lambda group: list(entries.values()))
    return entries


def raise_it(error: BaseException) -> None:
    raise error


def test_a_mesh_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, go=lambda: raise_it(NodeUnreachable("nobody\n answers")))
    assert cli.run(["go"]) == 1
    assert capsys.readouterr().err == "kvmesh: nobody answers [NODE_UNREACHABLE]\n"


def test_a_mesh_error_in_a_task_group_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = ExceptionGroup("tasks", [InvalidRequest("bad")])
    use(monkeypatch, go=lambda: raise_it(BaseExceptionGroup("all", [inner, asyncio.CancelledError()])))
    assert cli.run(["go"]) == 1
    assert capsys.readouterr().err == "kvmesh: bad [INVALID_REQUEST]\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, go=lambda: raise_it(ExceptionGroup("x", [InvalidRequest("bad"), KeyError("bug")])))
    with pytest.raises(ExceptionGroup):
        cli.run(["go"])
    use(monkeypatch, go=lambda: raise_it(KeyError("bug")))
    with pytest.raises(KeyError):
        cli.run(["go"])


def test_wrong_usage_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert cli.run(["nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_exit_codes_of_commands_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, go=lambda: raise_it(typer.Exit(7)), fine=lambda: None)
    assert cli.run(["go"]) == 7
    assert cli.run(["fine"]) == 0


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, go=lambda: raise_it(KeyboardInterrupt()))
    assert cli.run(["go"]) == 130


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvmesh ")


def test_no_arguments_print_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert cli.run([]) == 2
    shown = capsys.readouterr()
    assert "other" in shown.out + shown.err


def test_a_command_that_bears_its_entry_points_name_is_loaded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = use(monkeypatch, go=lambda: None)
    cli.run(["go"])
    assert entries["go"].loaded
    assert not entries["other"].loaded


@pytest.mark.parametrize(
    ("requires", "shown"),
    [
        (['no-such-distribution-here==1; extra == "core"'], False),
        (['pytest>=1; extra == "core"'], True),
        (["pytest>=1; extra == 'core'", "no-such-distribution-here; extra == 'core'"], False),
        (['no-such-distribution-here; extra == "edge"', "pytest"], True),
        (None, True),
    ],
)
def test_entry_points_of_missing_extras_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, requires: list[str] | None, shown: bool
) -> None:
    entry = EntryPoint(name="core", value="x.y:z [core]", group="g")
    vars(entry)["dist"] = SimpleNamespace(requires=requires)
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [entry])
    assert bool(plugins.installed_entry_points("g")) is shown


def test_this_installation_declares_its_commands() -> None:
    entry_points = Distribution.from_name("kvmesh").entry_points
    names = {e.name for e in entry_points if e.group == "kvmesh.commands"}
    assert {"client", "bench", "doctor", "up", "demo", "placement", "core", "edge"} <= names


def test_help_loads_no_engine() -> None:
    code = (
        "import sys; from mesh.cli.main import build_app; build_app(); print({'torch', 'llama_cpp'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def settings_app(seen: list[EdgeSettings]) -> Entry:
    entry = Entry("edge", None)

    def load() -> object:
        return lambda app: add_settings_command(app, "edge", EdgeSettings, seen.append, "Run it.")

    entry.load = load  # type: ignore[method-assign]
    return entry


EDGE_FLAGS = "edge --identity.folder i --state_folder s --placement.address 127.0.0.1:1 --model.id m --model.path p"


def test_settings_become_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[EdgeSettings] = []
    entry = settings_app(seen)
    monkeypatch.setattr(cli, "installed_entry_points", lambda group: [entry, Entry("other", lambda: None)])
    assert cli.run([*EDGE_FLAGS.split(), "--engine.n_threads", "2"]) == 0
    assert seen[0].engine.n_threads == 2
    config = tmp_path / "edge.yaml"
    config.write_text("engine: {n_threads: 3, max_running: 4}\n")
    assert cli.run([*EDGE_FLAGS.split(), "--config", str(config), "--engine.n_threads", "1"]) == 0
    assert (seen[1].engine.n_threads, seen[1].engine.max_running) == (1, 4)


def test_bad_settings_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = settings_app([])
    monkeypatch.setattr(cli, "installed_entry_points", lambda group: [entry, Entry("other", lambda: None)])
    assert cli.run(["edge", "--engine.treads", "2"]) == 2
    assert "--engine.n_threads" in capsys.readouterr().err
    assert cli.run(["edge", "--config", "/nonexistent.yaml"]) == 1
    assert (
        capsys.readouterr().err
        == "kvmesh: cannot read /nonexistent.yaml: No such file or directory [INVALID_REQUEST]\n"
    )
    assert cli.run(["edge"]) == 1
    assert "identity is required" in capsys.readouterr().err
