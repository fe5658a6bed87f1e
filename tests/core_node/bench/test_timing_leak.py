"""The timing-leak benchmark on a tiny model: what is computed tells nothing across tenants, and all inside one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from core_node.bench.timing_leak import BENCH, auc
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf


async def bench(model: Path, **changes: Cell) -> BenchResult:
    values: Mapping[str, Cell] = {**BENCH.defaults, "probes": 40, "prompt_tokens": 48, "model": str(model), **changes}
    return await BENCH.run(BenchContext(settings=values, progress=lambda done, total, what: None))


def test_auc_is_the_chance_of_being_faster() -> None:
    rng = random.Random(1)
    sent, new = ([rng.choice((1.0, 2.0, 3.0)) for _ in range(n)] for n in (30, 50))
    pairs = [1.0 if a < b else 0.5 if a == b else 0.0 for a in sent for b in new]
    assert auc(sent, new) == pytest.approx(sum(pairs) / len(pairs))
    assert auc([1.0], [2.0]) == 1.0
    assert auc([1.0], [1.0]) == 0.5


@pytest.mark.parametrize(
    "changes", [{"probes": 21}, {"probes": 10}, {"prompt_tokens": 8}, {"clock": "sun"}, {"attackers": "nobody"}]
)
async def test_settings_out_of_range_are_refused(changes: dict[str, Cell], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        await bench(tmp_path / "none.gguf", **changes)


async def test_nothing_leaks_between_tenants_and_labels_and_the_probe_is_not_blind(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.F32.gguf", random_weights(TinyConfig()), TinyConfig())
    result = await bench(model)
    # Exact, whatever else the machine does: tokens that the engine had to compute.
    assert {str(row["attacker"]): row["auc_computed"] for row in result.rows} == {
        "another tenant": 0.5,
        "same tenant, another label": 0.5,
        "same tenant": 1.0,
        "no salt": 1.0,
    }
    assert [goal.goal for goal in result.goals] == [0.55, 0.55, 0.9, 0.9]
