"""The engine benchmark: refusals, and a small run of our own engine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from core_node.bench.engine import BENCH
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest
from tests.core_node.engine.demo_model import demo_model_path


async def bench(**changes: Cell) -> BenchResult:
    values: Mapping[str, Cell] = {**BENCH.defaults, "model": str(demo_model_path()), **changes}
    return await BENCH.run(BenchContext(settings=values, progress=lambda done, total, what: None))


@pytest.mark.parametrize(
    "changes",
    [
        {"peers": "nobody"},
        {"peers": "openvino", "openvino_python": "/nowhere", "openvino_model": "/"},
        {"peers": "vllm", "vllm_model": "/nowhere"},
    ],
)
async def test_a_peer_that_is_not_there_is_refused(changes: dict[str, Cell]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await bench(**changes)
    assert caught.value.details["field"] == "peers"


@pytest.mark.model
async def test_our_own_engine_alone() -> None:
    result = await bench(rounds=1, concurrency="2", threads=1, int8=False, probe_tolerance_ratio=1000.0)
    assert [row["case"] for row in result.rows] == ["2 at once", "shared prefix, cold", "shared prefix, warm"]
    assert {row["engine"] for row in result.rows} == {"kvmesh"}
    assert all(float(str(row["output_tokens_per_s"])) > 0 for row in result.rows)
    assert result.goals == ()
    assert result.notes[0].startswith("kvmesh: kvmesh-core")
