"""kvmesh doctor: what each check says of a machine, good and bad."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from mesh.cli import doctor, machine_checks
from mesh.cli.checks import Check, Examined, Finding, Verdict, fail, ok, warn
from mesh.errors import Overloaded
from mesh.model.catalogue import demo_model_path

HERE = Examined(state_folder=Path("."), model_path=None)


def found(name: str, examined: Examined = HERE) -> Finding:
    check = next(c for c in machine_checks.checks() if c.name == name)
    return check.run(examined)


def invoke(monkeypatch: pytest.MonkeyPatch, checks: list[Check], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "all_checks", lambda: checks)
    app = typer.Typer()
    doctor.register(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


def test_each_check_of_the_machine_says_something() -> None:
    for name, finding in doctor.examine(machine_checks.checks(), HERE):
        assert finding.says, name
        assert "\n" not in finding.says + finding.remedy
        assert finding.remedy or finding.verdict is Verdict.OK


def test_failures_decide_the_exit_code_and_warnings_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check(name="a", run=lambda e: ok("fine")), Check(name="b", run=lambda e: warn("hm", "do this"))]
    code, output = invoke(monkeypatch, checks)
    assert code == 0
    assert "do this" in output
    code, output = invoke(monkeypatch, [*checks, Check(name="c", run=lambda e: fail("bad", "do that"))], "--json")
    assert code == 1
    report = json.loads(output)
    assert report["ok"] is False
    assert report["checks"][2] == {"name": "c", "verdict": "fail", "says": "bad", "remedy": "do that"}


def test_a_check_that_raises_is_a_failure() -> None:
    def run(_: Examined) -> Finding:
        raise Overloaded("no room")

    [(_, finding)] = doctor.examine([Check(name="x", run=run)], HERE)
    assert finding == Finding(verdict=Verdict.FAIL, says="no room")


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 7080))
        except OSError:
            pass  # somebody else has it: as good for this test
        else:
            taken.listen()
        finding = found("ports")
    assert finding.verdict is Verdict.WARN
    assert "7080" in finding.says


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    examined = Examined(state_folder=tmp_path / "not" / "yet", model_path=None)
    for free_bytes, verdict in ((10**10, Verdict.OK), (10**9, Verdict.WARN), (10**8, Verdict.FAIL)):
        usage = SimpleNamespace(free=free_bytes)
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder, usage=usage: usage)
        assert found("disk", examined).verdict is verdict
    monkeypatch.setattr(machine_checks.os, "access", lambda folder, mode: False)
    assert "can't be written" in found("disk", examined).says


def test_a_clock_before_the_build_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.time, "time", lambda: 0.0)
    assert found("clock").verdict is Verdict.FAIL


def test_cpu_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "cpu_flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(machine_checks.platform, "machine", lambda: "x86_64")
    assert "AVX2" in found("cpu").remedy


def test_model(tmp_path: Path) -> None:
    assert found("model").verdict is Verdict.FAIL
    missing = Examined(state_folder=tmp_path, model_path=tmp_path / "m.gguf")
    assert "not a file" in found("model", missing).says
    other = tmp_path / "m.gguf"
    other.write_bytes(b"GGUF")
    assert found("model", Examined(state_folder=tmp_path, model_path=other)).verdict is Verdict.OK


@pytest.mark.model
def test_the_demo_model_is_the_published_file() -> None:
    finding = found("model", Examined(state_folder=Path("."), model_path=demo_model_path()))
    assert finding.verdict is Verdict.OK


def test_a_consul_that_does_not_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = Examined(state_folder=tmp_path, model_path=None)
    monkeypatch.setattr(machine_checks.shutil, "which", lambda name: None)
    assert found("consul", examined).says == "no consul binary"
    binary = tmp_path / "consul" / "usr" / "bin" / "consul"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o755)
    assert "ended with 3" in found("consul", examined).says
    binary.write_text("#!/bin/sh\necho Consul v9\n")
    assert found("consul", examined).verdict is Verdict.OK
