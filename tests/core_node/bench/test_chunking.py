"""The chunking benchmark: refusals, and a small run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from core_node.bench.chunking import BENCH
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf


async def bench(model: Path, **changes: Cell) -> BenchResult:
    small = {"prompt_tokens": 256, "decoding": 3, "output_tokens": 40, "fixed_step_tokens": 64, "rounds": 1}
    values: Mapping[str, Cell] = {**BENCH.defaults, **small, "n_threads": 1, "model": str(model), **changes}
    return await BENCH.run(BenchContext(settings=values, progress=lambda done, total, what: None))


@pytest.mark.parametrize("changes", [{"prompt_tokens": 63}, {"decoding": 0}, {"output_tokens": 10}])
async def test_settings_out_of_range_are_refused(changes: dict[str, Cell], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        await bench(tmp_path / "none.gguf", **changes)


async def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidRequest, match=r"kvmesh\[bench\]"):
        await bench(tmp_path / "none.gguf", plot=str(tmp_path / "p.png"))


async def test_a_small_run(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.F32.gguf", random_weights(TinyConfig()), TinyConfig())
    result = await bench(model)
    assert [row["prefill"] for row in result.rows] == ["quiet", "whole", "fixed", "tuned"]
    assert all(float(str(row["itl_p99_ms"])) >= float(str(row["itl_p50_ms"])) > 0 for row in result.rows)
    assert [row["prompt_ttft_s"] is None for row in result.rows] == [True, False, False, False]
    assert len(result.goals) == 2
