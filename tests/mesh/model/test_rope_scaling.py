"""Scalings: canonical text, frequencies, and llama3 recognised from a GGUF's divisors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mesh.errors import InvalidRequest
from mesh.model.rope_scaling import inverse_frequencies, recognise_llama3, scaling_text

LLAMA3 = "llama3:factor=8,high_freq_factor=4,low_freq_factor=1,original_context=8192"


def test_canonical_text() -> None:
    assert scaling_text("none") == "none"
    assert scaling_text("linear", factor=1.0) == "none"
    assert scaling_text("linear", factor=2.5) == "linear:factor=2.5"
    parameters = {"low_freq_factor": 1.0, "original_context": 8192, "factor": 8.0, "high_freq_factor": 4.0}
    assert scaling_text("llama3", **parameters) == LLAMA3


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
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


@pytest.mark.parametrize(("head_dim", "base", "factor"), [(128, 500_000.0, 8), (64, 500_000.0, 32)])
def test_llama3_is_recognised_by_its_divisors(head_dim: int, base: float, factor: int) -> None:
    text = LLAMA3.replace("factor=8,", f"factor={factor},", 1)
    divisors = inverse_frequencies(head_dim, base, "none") / inverse_frequencies(head_dim, base, text)
    assert recognise_llama3(divisors.astype(np.float32), head_dim, base) == text


def test_other_divisors_are_not_recognised() -> None:
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    assert recognise_llama3(divisors, 64, 1e4) is None
    assert recognise_llama3(divisors, 128, 1e4) is None
    assert recognise_llama3(np.full(32, np.nan, np.float32), 64, 1e4) is None
    assert recognise_llama3(np.zeros(32, np.float32), 64, 1e4) is None


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
def test_other_texts_are_refused(scaling: str) -> None:
    with pytest.raises(InvalidRequest, match="RoPE scaling"):
        inverse_frequencies(8, 1e4, scaling)
