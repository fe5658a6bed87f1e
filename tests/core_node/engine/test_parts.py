"""Small parts: endings, sampler, speed averages."""

from __future__ import annotations

import pytest
import torch

from core_node.engine.ending import Ending
from core_node.engine.sampler import SampleRow, choose
from core_node.engine.speed import SpeedMeter
from mesh.node.engine import Finished, FinishReason
from mesh.node.sampling import SamplingParams

EOS = frozenset({9})


class Letters:
    """Token 0 is "a", 1 is "b" ..."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


def ending(replayed: tuple[int, ...] = (), context: int = 100, **sampling: object) -> Ending:
    values: dict[str, object] = {"max_tokens": 10, "seed": 0, **sampling}
    params = SamplingParams(**values)  # type: ignore[arg-type]
    return Ending(params, (7, 7, *replayed), 2, max_context_tokens=context, eos_token_ids=EOS, stream=Letters())


def test_end_of_sequence() -> None:
    assert ending().after(9) == Finished(FinishReason.STOP)
    assert ending(ignore_eos=True).after(9) is None


def test_max_tokens_and_context() -> None:
    assert ending(max_tokens=1).after(0) == Finished(FinishReason.LENGTH)
    assert ending(context=3).after(0) == Finished(FinishReason.LENGTH)
    assert ending(context=4).after(0) is None


def test_a_stop_string_wins_over_length() -> None:
    assert ending(max_tokens=1, stop=("a",)).after(0) == Finished(FinishReason.STOP, "a")


def test_a_stop_string_over_replayed_tokens() -> None:
    e = ending((0, 1), stop=("abc",))
    assert e.finished is None
    assert e.after(2) == Finished(FinishReason.STOP, "abc")


def test_the_prompt_is_not_searched() -> None:
    assert ending(stop=("ha",)).after(0) is None  # the prompt's last token is "h"


def test_replayed_tokens_may_have_ended_it() -> None:
    assert ending((0, 1, 2), stop=("b",)).finished == Finished(FinishReason.STOP, "b")
    assert ending((0,) * 10).finished == Finished(FinishReason.LENGTH)


def row(**sampling: object) -> SampleRow:
    values: dict[str, object] = {"max_tokens": 10, "seed": 3, "temperature": 0.0, **sampling}
    return SampleRow(sampling=SamplingParams(**values), token_ids=[1, 2], prompt_tokens=2)  # type: ignore[arg-type]


def test_ties_go_to_the_lowest_id_on_both_ways() -> None:
    logits = torch.zeros(2, 50)
    logits[:, [7, 20, 33]] = 1.0
    drawn = choose(logits, [row(), row(logprobs=1)], EOS)
    assert [d.token_id for d in drawn if d is not None] == [7, 7]


def test_rows_are_independent() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50, generator=g)
    rows = [row(), row(temperature=1.0), row(frequency_penalty=1.0), row(logprobs=2)]
    together = choose(logits, rows, EOS)
    apart = [choose(logits[i : i + 1], [r], EOS)[0] for i, r in enumerate(rows)]
    assert together == apart


def test_min_tokens_masks_the_end_of_a_greedy_row() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 9], logits[0, 4] = 2.0, 1.0
    assert [d.token_id for d in choose(logits, [row()], EOS) if d] == [9]
    assert [d.token_id for d in choose(logits, [row(min_tokens=1)], EOS) if d] == [4]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_named(value: float) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 5] = value
    drawn = choose(logits, [row(), row()], EOS)
    assert drawn[0] is None
    assert drawn[1] is not None


def test_no_rows() -> None:
    assert choose(torch.zeros(0, 50), [], EOS) == []


def test_speeds_are_zero_until_measured_and_then_the_first_value() -> None:
    meter = SpeedMeter()
    assert (meter.prefill_tokens_per_s, meter.decode_tokens_per_s) == (0.0, 0.0)
    meter.observe(duration_s=0.5, prefill_tokens=100, decode_tokens=0)
    meter.observe(duration_s=0.1, prefill_tokens=0, decode_tokens=8)
    assert meter.prefill_tokens_per_s == pytest.approx(200)
    assert meter.decode_tokens_per_s == pytest.approx(10)


def test_speeds_follow_what_is_measured() -> None:
    meter = SpeedMeter()
    for _ in range(300):
        meter.observe(duration_s=0.1, prefill_tokens=100, decode_tokens=0)
    for _ in range(300):
        meter.observe(duration_s=0.2, prefill_tokens=100, decode_tokens=0)
    assert meter.prefill_tokens_per_s == pytest.approx(500, rel=0.01)


def test_a_few_prompt_tokens_beside_many_decodes_say_nothing_of_prefill() -> None:
    meter = SpeedMeter()
    meter.observe(duration_s=0.1, prefill_tokens=2, decode_tokens=8)
    assert meter.prefill_tokens_per_s == 0.0
