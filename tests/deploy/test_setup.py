"""The set-up script's decisions: what counts as the same build, which torch, when there is nothing to do."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "setup"
MODULES = ("steps", "llama_wheel", "torch_choice", "setup")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The scripts as modules; they import each other by bare names, as a script's folder is on its path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def build(scripts: dict[str, Any]) -> Any:
    return scripts["llama_wheel"].Build(
        version="1",
        cmake_options="-DX=1",
        header_sha256="aa",
        compiler="g++ 12",
        machine="x86_64",
        cpu_flags="avx2 amx",
    )


@pytest.mark.parametrize("field", ["version", "cmake_options", "header_sha256", "compiler", "machine", "cpu_flags"])
def test_everything_that_goes_into_a_wheel_changes_its_folder(build: Any, field: str) -> None:
    facts = build.facts()
    assert type(build)(**facts).folder == build.folder
    assert type(build)(**(facts | {field: "other"})).folder != build.folder


def test_this_machines_build_is_the_same_each_time(scripts: dict[str, Any]) -> None:
    this_build = scripts["llama_wheel"].this_build
    assert this_build("0.3.36") == this_build("0.3.36")


def test_a_machine_without_a_compiler_is_told(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(scripts["steps"].SetupFailed, match="no C\\+\\+ compiler"):
        scripts["llama_wheel"].this_build("1")


def test_a_broken_off_build_leaves_nothing_behind(
    scripts: dict[str, Any], build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = scripts["llama_wheel"]
    monkeypatch.setattr(wheel, "CACHE", tmp_path / "wheels")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[1/2] compiling'\necho broken >&2\nexit 7\n")
    python.chmod(0o755)
    with pytest.raises(scripts["steps"].SetupFailed, match="ended with 7") as info:
        wheel.build_wheel(build, python, tmp_path / "log", scripts["steps"].Show())
    assert "broken" in str(info.value)
    assert list((tmp_path / "wheels").iterdir()) == []
    assert "[1/2] compiling" in (tmp_path / "log").read_text()


def test_a_finished_build_is_kept_and_a_second_one_does_no_harm(
    scripts: dict[str, Any], build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wheel = scripts["llama_wheel"]
    monkeypatch.setattr(wheel, "CACHE", tmp_path / "wheels")
    python = tmp_path / "python"
    # Stands in for pip: finds the folder after -w, notes the flags it was given.
    python.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -w ] && out=$2; shift; done\n'
        "echo '[5/10] half'; echo '[10/10] done'; echo \"$CMAKE_ARGS\" > \"$out/x-1-py3-none-any.whl\"\n"
    )
    python.chmod(0o755)
    for _ in range(2):
        made = wheel.build_wheel(build, python, tmp_path / "log", scripts["steps"].Show())
        assert made == build.wheel() == build.folder / "x-1-py3-none-any.whl"
    flags = made.read_text()
    assert flags.startswith("-DX=1 -DCMAKE_CXX_FLAGS='-include ")
    assert "amx_tile.h" in flags
    assert json.loads((build.folder / "build.json").read_text()) == build.facts()
    assert [p.name for p in (tmp_path / "wheels").iterdir()] == [build.folder.name]
    assert "50 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "usable"), [("2.13.0+cpu", True), ("2.6.0", True), ("3.0", True), ("2.5.1", False), ("1.13.1", False)]
)
def test_a_torch_that_is_new_enough_is_used(scripts: dict[str, Any], tmp_path: Path, found: str, usable: bool) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {found}\n")
    python.chmod(0o755)
    assert scripts["torch_choice"].system_torch("2.6", python) == (found if usable else None)


def test_no_torch(scripts: dict[str, Any], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho\n")
    python.chmod(0o755)
    assert scripts["torch_choice"].system_torch("2.6", python) is None


def test_the_size_of_a_download_is_told(scripts: dict[str, Any], tmp_path: Path) -> None:
    files = {"torch": tmp_path / "torch.whl", "nvidia-x": tmp_path / "nvidia.whl"}
    for file in files.values():
        file.write_bytes(b"\0" * 5_000_000)
    items = [
        {"metadata": {"name": name, "version": "9"}, "download_info": {"url": file.as_uri()}}
        for name, file in files.items()
    ]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat <<'EOT'\n{json.dumps({'install': items})}\nEOT\n")
    python.chmod(0o755)
    explain = scripts["torch_choice"].explain_download
    assert explain(python, "torch==9") == "torch 9 is installed: a CUDA build, 0.01 GB in 2 packages"
    python.write_text("#!/bin/sh\nexit 1\n")
    assert "not known" in explain(python, "torch==9")


def test_requirements_are_those_of_pyproject(scripts: dict[str, Any]) -> None:
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    setup = scripts["setup"]
    plain, dev = setup.requirements_of(project, dev=False), setup.requirements_of(project, dev=True)
    assert set(plain) < set(dev)
    names = {setup._name(r) for r in plain}
    assert {"torch", "llama-cpp-python", "grpcio", "protobuf"} <= names
    assert "pytest" in {setup._name(r) for r in dev}


def test_the_stamp_knows_when_there_is_nothing_to_do(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setup = scripts["setup"]
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    project = {"project": {"name": "x"}}
    plain, dev = setup.stamp_of(project, dev=False), setup.stamp_of(project, dev=True)
    assert not setup.is_done(plain)
    setup.STAMP.write_text(json.dumps(dev))
    assert setup.is_done(dev)
    assert setup.is_done(plain)
    setup.STAMP.write_text(json.dumps(plain))
    assert not setup.is_done(dev)
    assert not setup.is_done(setup.stamp_of({"project": {"name": "y"}}, dev=False))
    setup.STAMP.write_text("{")
    assert not setup.is_done(plain)


def test_missing_programs_are_named_in_one_line(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setup, failed = scripts["setup"], scripts["steps"].SetupFailed
    monkeypatch.setattr(setup.shutil, "which", lambda name: None if name in ("c++", "apt-get") else f"/bin/{name}")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(failed, match=r"what your system calls g\+\+"):
        setup.need_programs(scripts["steps"].Show())
    monkeypatch.setattr(setup.shutil, "which", lambda name: None if name == "c++" else f"/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(failed, match=r"sudo apt-get install -y --no-install-recommends g\+\+"):
        setup.need_programs(scripts["steps"].Show())


def test_make_alone_prints_help() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("demo", "up", "test", "check", "soak", "proto", "clean"):
        assert f"make {target}" in done.stdout
