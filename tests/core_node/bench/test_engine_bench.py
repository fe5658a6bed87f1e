"""The engine benchmark: refusals, a missing peer, and a small run of our own engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from core_node.bench.engine import BENCH, ended_by_sigterm
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest
from tests.core_node.engine.demo_model import demo_model_path


async def bench(**changes: Cell) -> BenchResult:
    values: Mapping[str, Cell] = {**BENCH.defaults, "model": str(demo_model_path()), **changes}
    return await BENCH.run(BenchContext(settings=values, progress=lambda done, total, what: None))


@pytest.mark.parametrize("changes", [{"peers": "nobody"}, {"ours": "openvino"}])
async def test_an_unknown_engine_is_refused(changes: dict[str, Cell]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await bench(**changes)
    assert caught.value.details["field"] == next(iter(changes))


async def test_sigterm_ends_the_measuring_and_not_the_report() -> None:
    async with ended_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)
    await asyncio.sleep(0)  # nothing is cancelled any more


async def test_a_second_sigterm_does_not_end_the_report() -> None:
    async with ended_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)
    os.kill(os.getpid(), signal.SIGTERM)  # would end this process
    await asyncio.sleep(0.01)


async def test_another_cancellation_is_none_of_its_business() -> None:
    async def body() -> None:
        async with ended_by_sigterm():
            await asyncio.sleep(600)

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_our_own_engine_and_a_peer_that_is_not_there(tmp_path: Path) -> None:
    result = await bench(
        ours="kvmesh", peers="vllm", peers_folder=str(tmp_path), rounds=1, concurrency="2", threads=1,
        shared_prefix=False, open_loop_requests=2, open_loop_rate_per_s=10.0, probe_tolerance_ratio=1000.0,
        profile=False, record=str(tmp_path / "record.jsonl"),
    )  # fmt: skip
    assert [row["case"] for row in result.rows] == ["2 at once", "open loop"]
    assert {row["engine"] for row in result.rows} == {"kvmesh"}
    assert all(float(str(row["output_tokens_per_s"])) > 0 for row in result.rows)
    assert result.goals == ()
    assert any(note.startswith("kvmesh: kvmesh-core") for note in result.notes)
    assert any(note.startswith("vllm: not installed: there is no ") for note in result.notes)
    assert (tmp_path / "record.jsonl").read_text().count("\n") == 3
