"""The profile of a step: what is measured is the engine's own step, and limits are arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from core_node.bench import perplexity, step_profile
from core_node.bench.engines.probe import Speed
from core_node.kernels.build import best_variant, library
from core_node.kernels.llama_step import PHASES, StepShape
from mesh.bench.types import BenchContext, Cell
from mesh.errors import InvalidRequest, NotImplementedHere
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf

SHAPE = StepShape(
    n_layers=2,
    hidden=64,
    n_heads=2,
    n_kv_heads=1,
    head_dim=32,
    ffn=96,
    vocab=100,
    norm_eps=1e-5,
    max_rows=64,
    max_logit_rows=8,
)


def profile(rows: int, logit_rows: int) -> step_profile.Profile:
    return step_profile.Profile(
        work="decode",
        rows=rows,
        logit_rows=logit_rows,
        context_tokens=50.0,
        wall_us=1000.0,
        phases_us=dict.fromkeys(PHASES, 90.0),
        kernels_cpu_us=900.0,
        python_us={"schedule": 60.0, "arrays": 40.0},
    )


def test_a_phase_is_bound_by_its_bytes_or_by_its_operations() -> None:
    few = step_profile._rows(profile(1, 1), SHAPE, 2, Speed(flop_per_s=1e9, read_bytes_per_s=1e8))
    by_part = {str(row["part"]): row for row in few}
    # 2 layers x 64 x 128 weights of 2 bytes at 100 MB/s
    assert by_part["qkv"]["limit_us"] == pytest.approx(327.7)
    assert by_part["qkv"]["bound_by"] == "memory"
    # 50 positions x K and V x 32 x 2 bytes x 2 layers
    assert by_part["attention"]["limit_us"] == pytest.approx(128.0)
    assert by_part["norm"]["limit_us"] is None
    many = step_profile._rows(profile(32, 32), SHAPE, 2, Speed(flop_per_s=1e9, read_bytes_per_s=1e8))
    qkv = next(row for row in many if row["part"] == "qkv")
    assert qkv["bound_by"] == "arithmetic"
    assert qkv["limit_us"] == pytest.approx(2 * 2 * 64 * 128 * 32 / 1e3, abs=0.1)


def test_the_share_of_python_is_of_what_was_computed() -> None:
    assert profile(1, 1).python_ratio == pytest.approx(0.1)


def test_a_watch_adds_up_calls_and_leaves_nothing_behind() -> None:
    class Owner:
        def work(self) -> int:
            return 7

    owner, watch = Owner(), step_profile._Watch()
    watch.on("work", owner, "work")
    assert owner.work() == 7
    assert owner.work() == 7
    watch.close()
    assert "work" not in vars(owner)
    assert list(watch.us) == ["work"]


@pytest.mark.model
async def test_the_benches_run_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "limits", lambda _: Speed(flop_per_s=1e11, read_bytes_per_s=1e10))
    try:
        library(best_variant())
    except NotImplementedHere as exc:
        pytest.skip(exc.message)
    config = TinyConfig(n_heads=4, n_kv_heads=2, head_dim=32, context_tokens=1024)
    path = write_gguf(tmp_path / "small.F32.gguf", random_weights(config), config)
    result = await step_profile.BENCH.run(context(step_profile.BENCH.defaults, model=str(path), threads=1))
    works = {row["work"] for row in result.rows}
    assert works == {"decode 1", "decode 8", "decode 32", "prefill 256"}
    assert {row["part"] for row in result.rows} >= {*PHASES, "schedule", "arrays", "sampling", "whole step"}
    text = tmp_path / "text"
    text.write_text("a b c d " * 300, encoding="utf-8")
    settings = {"model": str(path), "threads": 1, "text": str(text), "windows": 2, "window_tokens": 40}
    found = await perplexity.BENCH.run(context(perplexity.BENCH.defaults, **settings))
    assert [row["weights"] for row in found.rows] == ["bf16", "int8"]
    assert 0.8 < found.goals[0].value < 1.2
    settings["windows"] = 10_000
    with pytest.raises(InvalidRequest, match="windows need"):
        await perplexity.BENCH.run(context(perplexity.BENCH.defaults, **settings))


def context(defaults: Mapping[str, Cell], **changes: Cell) -> BenchContext:
    return BenchContext(settings={**defaults, **changes}, progress=lambda *_: None)
