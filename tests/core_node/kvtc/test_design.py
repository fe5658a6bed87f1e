"""Rates and errors of steps, and settings made of them."""

from __future__ import annotations

import numpy as np
import pytest

from core_node.kvtc.design import GROUP, Measured, design, grouped, measure
from mesh.errors import InvalidRequest

RANK = 32


def measured() -> Measured:
    rng = np.random.default_rng(0)
    spread = np.concatenate([2.0 ** -(np.arange(RANK) / 4), 0.3 * 2.0 ** -(np.arange(RANK) / 8)])
    fit, held_out = (rng.laplace(scale=spread, size=(1500, 2 * RANK)).astype(np.float32) for _ in range(2))
    return measure(fit, [held_out], RANK, [0.01])


@pytest.mark.parametrize("bits", [15.0, 40.0, 90.0])
def test_is_no_worse_than_any_uniform_step_of_the_same_rate(bits: float) -> None:
    m = measured()
    s = design(m, name="x", bits_per_token=bits, bound_ratio=1.0)
    error = s.bound - m.outside[0]
    for i in range(m.bits.shape[1]):
        if m.bits[:, i].sum() <= 0.99 * bits:
            assert error <= m.errors[:, i].sum()


def test_more_bits_err_less_and_groups_share_a_step() -> None:
    m = measured()
    some, more = (design(m, name="x", bits_per_token=b, bound_ratio=1.0) for b in (20.0, 80.0))
    assert more.bound < some.bound
    steps = more.steps.reshape(-1, GROUP)
    assert (steps == steps[:, :1]).all()


def test_wide_coefficients_are_kept_before_narrow_ones() -> None:
    s = design(measured(), name="x", bits_per_token=20.0, bound_ratio=1.0)
    kept = s.steps[0] > 0
    assert kept[:GROUP].all()
    assert not kept[-GROUP:].any()


def test_groups_are_sums() -> None:
    assert grouped(np.ones((2 * GROUP, 3))).tolist() == [[GROUP] * 3] * 2


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        design(measured(), name="x", bits_per_token=0.0, bound_ratio=1.0)
