"""Rotation of adjacent pairs."""

from __future__ import annotations

import math

import pytest
import torch

from core_node.engine.rope import rope_table, rotate
from mesh.model.architectures import RopePairs


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


def test_halves_are_adjacent_pairs_in_another_order() -> None:
    cos, sin = rope_table(8, 1e4, "none", 4).unsqueeze(2).unbind(1)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # (i, i + 4) side by side
    halves = rotate(x, cos, sin, RopePairs.HALVES)
    assert torch.equal(halves[..., order], rotate(x[..., order].contiguous(), cos, sin, RopePairs.ADJACENT))
