"""Building the kernels: once, and a reason where it cannot be done."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from core_node.kernels import build
from mesh.errors import NotImplementedHere


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(NotImplementedHere, match="no C\\+\\+ compiler"):
        build.library(build.AVX2, tmp_path)


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_FLAGS", ("-fno-such-flag-as-this",))
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    with pytest.raises(NotImplementedHere, match="failed"):
        build.library(build.AVX2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_old_processor_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx", "fma"}))
    with pytest.raises(NotImplementedHere, match="no avx2"):
        build.best_variant()


def test_the_best_that_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"avx2", "fma"}
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(features))
    assert build.best_variant() is build.AVX2
    features |= {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi"}
    assert build.best_variant() is build.AVX2  # without bf16 products AVX-512 is not enough
    features |= {"avx512_bf16"}
    assert build.best_variant() is build.AVX512
    features |= {"amx_tile", "amx_bf16"}
    assert build.best_variant() is build.AMX


def test_each_instruction_set_has_a_file_of_its_own() -> None:
    compiler = shutil.which("g++") or sys.executable  # anything that says its version
    avx2, avx512, amx = (build._key(compiler, v) for v in (build.AVX2, build.AVX512, build.AMX))
    assert avx2 != avx512 == amx


@pytest.mark.soak
@pytest.mark.parametrize("variant", [build.AVX2, build.AVX512], ids=lambda v: v.name)
def test_every_variant_compiles_whatever_the_processor(variant: build.Variant, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    assert build.library(variant, tmp_path).exists()
