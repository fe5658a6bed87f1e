"""The work and what its timings say."""

from __future__ import annotations

import random

import pytest

from core_node.bench.engines.work import (
    MIXED_OUTPUT_TOKENS,
    MIXED_PROMPT_TOKENS,
    Answer,
    Burst,
    Case,
    OpenLoop,
    SharedPrefix,
    Work,
    at_once,
    percentile,
)
from mesh.errors import Internal

OPEN = OpenLoop(requests=200, rate_per_s=4.0, ttft_goal_s=1.0, tpot_goal_s=0.1)


@pytest.mark.parametrize("case", [Burst(3), SharedPrefix(), OPEN], ids=lambda case: case.name)
def test_all_engines_get_the_same_work_and_each_attempt_another(case: Case) -> None:
    first, again, other = (case.works(random.Random(seed), 1000) for seed in ("a", "a", "b"))
    assert first == again
    assert not {p for w in first for p in w.prompts} & {p for w in other for p in w.prompts}


def test_a_burst_says_prefill_decode_and_output() -> None:
    case = Burst(2)
    works = case.works(random.Random(1), 100)
    assert [w.max_tokens for w in works] == [(1, 1), (64, 64)]
    first = Answer(wall_s=0.5, first_s=(0.4, 0.5), last_s=(0.4, 0.5))
    whole = Answer(wall_s=2.0, first_s=(0.4, 0.6), last_s=(1.66, 2.0))
    assert case.rows(works, [first, whole])["2 at once"] == pytest.approx(
        {
            "prefill_tokens_per_s": 1024.0,
            "decode_tokens_per_s": 84.0,
            "output_tokens_per_s": 64.0,
            "ttft_p50_s": 0.5,
            "ttft_p95_s": 0.6,
            "tpot_p50_s": (0.02 + 1.4 / 63) / 2,
            "tpot_p95_s": 1.4 / 63,
        }
    )


def test_the_shared_prefix_is_shared_in_both_bursts_and_nothing_else_is() -> None:
    cold, warm = SharedPrefix().works(random.Random(1), 49152)
    prompts = cold.prompts + warm.prompts
    assert len({p[:512] for p in prompts}) == 1
    assert len({p[512:] for p in prompts}) == len(prompts) == 32
    assert {len(p) for p in prompts} == {544}


def test_an_open_loop_keeps_its_rate_and_counts_what_met_both_objectives() -> None:
    (work,) = OPEN.works(random.Random(1), 100)
    assert work.at_s[-1] / (OPEN.requests - 1) == pytest.approx(1 / OPEN.rate_per_s, rel=0.2)
    for lengths, bounds in (
        ([len(p) for p in work.prompts], MIXED_PROMPT_TOKENS),
        (work.max_tokens, MIXED_OUTPUT_TOKENS),
    ):
        assert bounds[0] <= min(lengths) < bounds[0] * 2
        assert bounds[1] / 2 < max(lengths) <= bounds[1]
    three = Work(prompts=((1,), (2,), (3,)), max_tokens=(11, 11, 11), at_s=(0.0, 1.0, 2.0))
    answer = Answer(wall_s=10.0, first_s=(0.5, 2.5, 2.5), last_s=(1.0, 3.0, 5.0))  # good, late, slow
    assert OPEN.rows([three], [answer])["open loop"]["goodput_per_s"] == pytest.approx(0.1)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.76, 4.0), (1.0, 4.0)])
def test_percentiles(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_an_answer_with_other_counts_is_refused() -> None:
    message = {"wall_s": 1.0, "first_s": [0.1], "last_s": [0.2], "n_tokens": [3], "ids": None}
    with pytest.raises(Internal, match="x did not give the tokens"):
        Answer.parse(message, at_once([(1,)], 4), "x")
