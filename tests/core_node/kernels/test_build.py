"""Building the kernels: once, and a reason where it cannot be done."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core_node.kernels import build
from mesh.errors import NotImplementedHere


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(NotImplementedHere, match="no C\\+\\+ compiler"):
        build.library(tmp_path)


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_FLAGS", ("-fno-such-flag-as-this",))
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    with pytest.raises(NotImplementedHere, match="failed"):
        build.library(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_old_processor_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2"}))
    with pytest.raises(NotImplementedHere, match="avx512_bf16"):
        build.require_cpu()


def test_amx_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    without = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"})
    monkeypatch.setattr(build, "cpu_features", lambda: without)
    assert not build.require_cpu()
    monkeypatch.setattr(build, "cpu_features", lambda: without | {"amx_tile", "amx_bf16"})
    assert build.require_cpu()
