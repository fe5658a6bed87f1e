"""`kvmesh bench roofline` on a tiny shape, and its arithmetic."""

from __future__ import annotations

import pytest

from core_node.bench import roofline
from core_node.bench.roofline import BENCH, RandomWeights, operations, read_bytes
from core_node.engine.weights import check_shapes
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest, Overloaded


async def bench(monkeypatch: pytest.MonkeyPatch, **changes: Cell) -> BenchResult:
    monkeypatch.setattr(roofline, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setitem(roofline._PROBE_SIZE, "cpu", 64)
    small: dict[str, Cell] = {
        "device": "cpu", "shape": "tiny", "batches": "1,3", "context_tokens": 40, "prefill_tokens": 48, "steps": 2,
        "threads": 1,
    }  # fmt: skip
    context = BenchContext(settings={**BENCH.defaults, **small, **changes}, progress=lambda *_: None)
    return await BENCH.run(context)


async def test_a_row_for_each_batch_and_one_for_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    result = await bench(monkeypatch)
    assert [(row["step"], row["sequences"]) for row in result.rows] == [("decode", 1), ("decode", 3), ("prefill", 1)]
    for row in result.rows:
        assert float(str(row["took_ms"])) > 0
        assert float(str(row["limit_ms"])) > 0
    assert len(result.goals) == 3
    assert "random weights on cpu" in result.notes[0]


@pytest.mark.parametrize("changes", [{"shape": "9b"}, {"batches": "0"}, {"device": "cuda:77"}])
async def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Cell]) -> None:
    with pytest.raises(InvalidRequest):
        await bench(monkeypatch, **changes)


async def test_a_shape_that_does_not_fit_is_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "available_bytes", lambda: 1 << 30)
    with pytest.raises(Overloaded, match=r"shape 8b with its KV takes \d+ MiB, 1024 MiB are free"):
        await bench(monkeypatch, shape="8b")


def test_the_arithmetic() -> None:
    d = roofline._description(roofline._SHAPES["tiny"], 64)
    check_shapes(d, RandomWeights(d).shapes)
    q, kv, h, f, v = 4 * 32, 2 * 32, 64, 96, 512
    layer = h * (2 * q + 2 * kv + 3 * f) + 2 * h
    assert d.tied_embeddings
    assert read_bytes(d, 3, 40) == 2 * (2 * layer + h + v * h + 3 * h) + 3 * 40 * (2 * kv * 2 * 2)
    assert operations(d, 10) == 2 * (2 * layer + h) * 10 + 2 * 2 * q * 10 * 11 + 2 * v * h


def test_the_big_shape_is_of_eight_billion_parameters() -> None:
    d = roofline._description(roofline._SHAPES["8b"], 4096)
    assert 8.0e9 < roofline.n_parameters(d) < 8.1e9
