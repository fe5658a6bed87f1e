"""The doctor's word on torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core_node.checks import checks
from mesh.cli.checks import Examined, Finding, Verdict


def found() -> Finding:
    [check] = checks()
    return check.run(Examined(state_folder=Path("."), model_path=None))


def test_this_torch_is_new_enough() -> None:
    finding = found()
    assert finding.verdict is Verdict.OK
    assert torch.__version__ in finding.says


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    assert found().verdict is Verdict.WARN
