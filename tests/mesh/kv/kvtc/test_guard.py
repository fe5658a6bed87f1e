"""What the encoder allows the tokens of a chunk to err by."""

from __future__ import annotations

import numpy as np
import pytest

from mesh.kv.kvtc.guard import allowance


def errors(mean: float, spread: float, n: int = 256) -> np.ndarray:
    drawn = np.random.default_rng(0).standard_normal(n)
    drawn = (drawn - drawn.mean()) / drawn.std()
    return (mean + spread * drawn).astype(np.float32)


def test_usual_chunks_pass_but_for_tokens_far_out() -> None:
    allowed = allowance(errors(8.0, 3.0), 10.0)
    assert allowed.limit == 30.0
    assert allowed.after_excess == 5.0


def test_a_chunk_that_errs_more_is_brought_far_below_the_usual_error() -> None:
    allowed = allowance(errors(12.0, 4.0), 10.0)
    assert allowed.limit == allowed.after_excess == 5.0


def test_high_errors_that_are_all_alike_are_noise() -> None:
    assert allowance(errors(12.0, 1.5), 10.0).limit < 1.0
    assert allowance(errors(8.0, 1.0), 10.0).limit == 30.0  # low ones are not


@pytest.mark.parametrize("n", [1, 4])
def test_few_tokens_may_stray_a_little_further(n: int) -> None:
    assert allowance(np.full(n, 11.0, dtype=np.float32), 10.0).limit == 30.0
    assert allowance(np.full(n, 14.0, dtype=np.float32), 10.0).limit == 5.0


def test_no_token_at_all_is_fine() -> None:
    assert allowance(np.empty(0, dtype=np.float32), 10.0).limit == 30.0
