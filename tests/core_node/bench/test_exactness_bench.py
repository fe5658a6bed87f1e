"""`kvmesh bench exactness` on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_node.bench.exactness import BENCH
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf


async def bench(tmp_path: Path, **changes: Cell) -> BenchResult:
    config = TinyConfig(n_layers=1)
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(config), config)
    small: dict[str, Cell] = {"prompts": 4, "output_tokens": 4, "longest_prompt": 40, "threads": 1}
    settings = {**BENCH.defaults, **small, "model": str(path), **changes}
    return await BENCH.run(BenchContext(settings=settings, progress=lambda *_: None))


async def test_rows_and_goals(tmp_path: Path) -> None:
    result = await bench(tmp_path, ways="f32, bf16 torch exact")
    assert len(result.rows) == 2 * 7
    assert {row["schedule"] for row in result.rows} >= {"all at once", "preempted", "moved and back", "random"}
    for row in result.rows:
        told = sum(int(str(row[c])) for c in ("equal_tokens", "near_ties", "others_that_differ", "not_compared"))
        assert told == 4 * 4
        assert float(str(row["alone_prefill_tokens_per_s"])) > 0
    assert [(g.value, g.goal) for g in result.goals] == [(0, 0), (0, 0)]
    assert len(result.notes) == 2


@pytest.mark.parametrize("changes", [{"ways": "f32,f8"}, {"prompts": 0}, {"output_tokens": 2}, {"longest_prompt": 3}])
async def test_settings_that_make_no_sense(tmp_path: Path, changes: dict[str, Cell]) -> None:
    with pytest.raises(InvalidRequest):
        await bench(tmp_path, **changes)
