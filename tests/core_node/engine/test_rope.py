"""Rotation of adjacent pairs, and the scalings."""

from __future__ import annotations

import math

import pytest
import torch

from core_node.engine.rope import inverse_frequencies, rope_table, rotate
from mesh.errors import InvalidRequest

LLAMA3 = "llama3:factor=8,high_freq_factor=4,low_freq_factor=1,original_context=8192"


def test_a_pair_is_turned_by_its_angle() -> None:
    table = rope_table(4, 100.0, "none", 6)
    cos, sin = table[5].unsqueeze(0).unsqueeze(2).unbind(1)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    slow = 5 * 100.0**-0.5
    want = [math.cos(5), math.sin(5), -2 * math.sin(slow), 2 * math.cos(slow)]
    assert rotate(x, cos, sin).flatten().tolist() == pytest.approx(want, abs=1e-6)


def test_position_zero_turns_nothing() -> None:
    cos, sin = rope_table(8, 1e4, "none", 1)[:1].unsqueeze(2).unbind(1)
    x = torch.arange(8.0).view(1, 1, 8)
    assert torch.equal(rotate(x, cos, sin), x)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = rope_table(8, 1e4, "none", 5), rope_table(8, 1e4, "linear:factor=4", 17)
    torch.testing.assert_close(scaled[16], plain[4])


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    """Against the definition in Llama 3.1's published configuration, written with wavelengths."""
    plain, got = inverse_frequencies(64, 500_000.0, "none"), inverse_frequencies(64, 500_000.0, LLAMA3)
    for f, g in zip(plain.tolist(), got.tolist(), strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            want = f
        elif wavelength > 8192 / 1:
            want = f / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * f / 8 + smooth * f
        assert g == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "scaling",
    [
        "yarn:factor=4",
        "linear",
        "linear:factor=x",
        "linear:factor=0",
        "linear:factor=nan",
        "linear:factor=2,other=1",
        "llama3:factor=8",
        "none:factor=1",
        "",
    ],
)
def test_other_scalings_are_refused(scaling: str) -> None:
    with pytest.raises(InvalidRequest, match="RoPE scaling"):
        inverse_frequencies(8, 1e4, scaling)
