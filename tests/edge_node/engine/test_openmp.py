"""OpenMP's environment of the llama.cpp process."""

from __future__ import annotations

import pytest

from edge_node.engine.openmp import openmp_environment


def test_openmp_is_told_its_threads_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    environment = openmp_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["SOMETHING_ELSE"] == "1"
