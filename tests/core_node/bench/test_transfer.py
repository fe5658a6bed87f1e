"""The benchmark `transfer`: its arithmetic, its settings, and one small run."""

from __future__ import annotations

import pytest

from core_node.bench.transfer import BENCH, Times, _row
from mesh.bench.types import BenchContext, Cell
from mesh.errors import InvalidRequest


def context(**changes: Cell) -> BenchContext:
    return BenchContext(settings={**BENCH.defaults, **changes}, progress=lambda done, total, what: None)


def test_the_law_is_worked_out_from_medians() -> None:
    times = [
        Times(prefill_s=2.0, transfer_s=4.0, both_s=5.0, wire_bytes=7),
        Times(prefill_s=9.0, transfer_s=9.0, both_s=9.0, wire_bytes=7),
        Times(prefill_s=1.0, transfer_s=4.0, both_s=5.5, wire_bytes=7),
    ]
    row = _row(100.0, 40.0, 1024, times)
    assert (row["prefill_s"], row["transfer_s"], row["both_s"]) == (2.0, 4.0, 5.5)
    assert row["max_and_last_chunk_s"] == 5.0  # 4 s and a quarter of it: 256 of 1,024 tokens
    assert row["sum_s"] == 6.0
    assert row["ratio"] == 1.1
    assert row["of_sum_ratio"] == pytest.approx(5.5 / 6, abs=1e-3)


def test_a_prompt_of_one_chunk_hides_nothing() -> None:
    row = _row(100.0, 2.0, 100, [Times(prefill_s=1.0, transfer_s=1.0, both_s=2.0, wire_bytes=1)])
    assert row["max_and_last_chunk_s"] == row["sum_s"] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"link_mbit_per_s": "fast"},
        {"link_mbit_per_s": "0"},
        {"link_mbit_per_s": "-1"},
        {"link_mbit_per_s": ""},
        {"round_trip_ms": "-1"},
        {"round_trip_ms": "nan"},
        {"round_trip_ms": "1e9"},
    ],
)
async def test_settings_that_cannot_be(changes: dict[str, Cell]) -> None:
    with pytest.raises(InvalidRequest):
        await BENCH.run(context(**changes))


@pytest.mark.model
async def test_a_small_run() -> None:
    settings = context(prompt_tokens=300, link_mbit_per_s="200", round_trip_ms="5", rounds=1)
    result = await BENCH.run(settings)
    (row,) = result.rows
    assert row["wire_bytes"] == 300 * 23_040
    assert all(float(str(row[name])) > 0 for name in ("prefill_s", "transfer_s", "both_s", "ratio"))
    assert len(result.goals) == 1
