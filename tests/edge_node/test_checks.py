"""The doctor's word on llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_node import checks
from edge_node.engine.selftest import SelfTestOutcome, SelfTestResult
from mesh.cli.checks import Examined, Finding, Verdict
from mesh.model.catalogue import demo_model_path


def found(model_path: Path | None) -> Finding:
    [check] = checks.checks()
    return check.run(Examined(state_folder=Path("."), model_path=model_path))


def test_without_a_model_it_is_not_tested() -> None:
    assert found(None).verdict is Verdict.FAIL


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    finding = found(tmp_path / "m.gguf")
    assert finding.verdict is Verdict.FAIL
    assert finding.remedy


def test_a_crash_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crash = SelfTestResult(outcome=SelfTestOutcome.CRASHED, says="llama.cpp crashed (SIGILL)", remedy="rebuild it")
    monkeypatch.setattr(checks, "run_self_test", lambda path, n_threads, timeout_s: crash)
    assert found(tmp_path) == Finding(verdict=Verdict.FAIL, says="llama.cpp crashed (SIGILL)", remedy="rebuild it")


@pytest.mark.model
def test_this_build_works() -> None:
    assert found(demo_model_path()).verdict is Verdict.OK
