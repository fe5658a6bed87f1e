"""What an entry makes of answers that took longer than predicted."""

from __future__ import annotations

import math
import random

import pytest

from mesh.node.latency_model import LatencyCurve
from placement.predict.calibration import NEUTRAL, Calibration
from placement.predict.predict import Queue, predict


def fed(ratios: list[float], *, gap_s: float = 1.0) -> tuple[Calibration, float]:
    known, now_s = Calibration(), 0.0
    for ratio in ratios:
        known.saw("a", ttft_ratio=ratio, tpot_ratio=ratio, now_s=now_s)
        now_s += gap_s
    return known, now_s


def test_a_node_that_lies_of_its_speed_is_predicted_by_what_it_does_and_named() -> None:
    known, now_s = fed([8.0] * 20)
    assert known.scale("a", now_s).ttft == pytest.approx(8.0, rel=0.25)
    assert known.liar("a", now_s) == pytest.approx(8.0)
    honest, now_s = fed([1.1] * 20)
    assert honest.liar("a", now_s) == 0.0
    assert honest.scale("b", now_s) == NEUTRAL


def test_a_few_wild_answers_move_nothing_and_one_alone_little() -> None:
    rng = random.Random(3)
    ratios = [rng.lognormvariate(0.0, 0.1) for _ in range(24)] + [1e6, 1e6, 50.0]
    known, now_s = fed(ratios)
    assert known.scale("a", now_s).tpot == pytest.approx(1.0, abs=0.12)
    once, now_s = fed([30.0])
    assert once.scale("a", now_s).ttft < 4.0


def test_it_forgets_and_says_how_sure_it_is() -> None:
    known, now_s = fed([3.0] * 10)
    assert known.scale("a", now_s).error_ratio < 0.5
    assert known.scale("a", now_s + 3600.0) == NEUTRAL
    few, now_s = fed([3.0])
    assert few.scale("a", now_s).error_ratio > known.scale("a", 10.0).error_ratio


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_what_cannot_be_is_ignored(ratio: float) -> None:
    known, now_s = fed([ratio] * 5)
    assert known.scale("a", now_s) == NEUTRAL


def test_a_clock_that_goes_back_breaks_nothing() -> None:
    known, _ = fed([2.0] * 10, gap_s=100.0)
    assert known.scale("a", -1e6).ttft == pytest.approx(2.0, rel=0.3)


def test_its_memory_is_bounded() -> None:
    known = Calibration()
    for i in range(20_000):
        known.saw(f"n{i}", ttft_ratio=2.0, now_s=0.0)
    assert len(known.node_ids) == 16_384
    assert known.scale("n0", 0.0) == NEUTRAL


def test_a_prediction_is_the_sum_that_the_module_states() -> None:
    curve = LatencyCurve(
        prefill_base_s=0.01, prefill_token_s=0.001, prefill_growth_s=1e-6,
        decode_base_s=0.02, decode_row_s=0.001, decode_context_s=1e-6, error_ratio=0.1,
    )  # fmt: skip
    queue = Queue(
        running=4, waiting=1, waiting_prefill_tokens=100, context_tokens=2000, step_tokens=104, most_running=32
    )
    told = predict(
        curve,
        queue,
        prompt_tokens=300,
        cached_tokens=50,
        expected_tokens=11,
        rtt_s=0.05,
        ttft_scale=2.0,
        tpot_scale=3.0,
    )
    beside = 0.004 + 0.002
    waits = 0.1 + 1e-6 * 100**2 / 2 + 1.0 * (0.01 + beside)
    prefill = 0.25 + 1e-6 * (300**2 - 50**2) / 2 + 3 * (0.01 + beside)
    step = 0.02 + 0.006 + 1e-6 * (2000 + 100 + 300 + 5.5)
    assert told.ttft_s == pytest.approx(0.05 + 2.0 * (waits + prefill))
    assert told.tpot_s == pytest.approx(3.0 * step)
    assert told.total_s == pytest.approx(told.ttft_s + 10 * told.tpot_s)
    assert told.error_ratio == 0.1
