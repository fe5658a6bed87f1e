"""`kvmesh bench kvtc` from text to goals, on a tiny random model: it measures every setting on every kind of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core_node.bench import kvtc
from core_node.kvtc.calibrate import Plan
from core_node.kvtc.texts import built_in
from mesh.bench.types import BenchContext
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf

pytestmark = [pytest.mark.model, pytest.mark.soak]


async def test_measures_every_setting_on_every_kind_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    config = TinyConfig(head_dim=32)
    model = write_gguf(tmp_path / "tiny.F32.gguf", random_weights(config), config)
    text = tmp_path / "text.txt"
    text.write_text(built_in()[0].text[:120_000], encoding="utf-8")
    small = Plan(rank_k=64, rank_v=160, fit_windows=4, held_out_windows=2, targets=(8, 16))
    monkeypatch.setattr(kvtc, "Plan", lambda seed: small)
    settings = {**kvtc.BENCH.defaults, "model": str(model), "text": str(text), "windows": 3, "unseen_windows": 1}
    settings |= {"threads": 1, "save": str(tmp_path / "a.kvtc")}
    result = await kvtc.BENCH.run(BenchContext(settings=settings, progress=lambda done, total, what: None))
    rows = {(row["codec"], row["text"]) for row in result.rows}
    assert {(codec, "second half") for codec in ("q8_0", "q4", "kvtc 8x", "kvtc 16x")} <= rows
    assert {(codec, "random tokens") for codec in ("q8_0", "q4", "kvtc 8x", "kvtc 16x")} <= rows
    assert {goal.name for goal in result.goals} >= {"basis MB", "ratio at <= 1 % higher perplexity"}
    assert (tmp_path / "a.kvtc").stat().st_size > 0
