"""Rotary position embedding in the order in which llama.cpp stores K: adjacent pairs or halves, by architecture.

Source: Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

import torch

from mesh.model.architectures import RopePairs
from mesh.model.rope_scaling import inverse_frequencies


def rope_table(head_dim: int, base: float, scaling: str, n_positions: int) -> torch.Tensor:
    """cos and sin for positions [0, n_positions): f32 [n_positions, 2, head_dim / 2]. Angles are made in f64.
    `scaling` is KvGeometry.rope_scaling."""
    frequencies = torch.from_numpy(inverse_frequencies(head_dim, base, scaling))
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: RopePairs = RopePairs.ADJACENT
) -> torch.Tensor:
    """Rotate `x` [tokens, heads, head_dim] by the tokens' `cos` and `sin` (f32 [tokens, 1, head_dim / 2]);
    computed in f32, returned in x's dtype."""
    adjacent = pairs is RopePairs.ADJACENT
    shape = (-1, 2) if adjacent else (2, -1)
    across = -1 if adjacent else -2
    a, b = torch.unflatten(x.float(), -1, shape).unbind(across)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=across).flatten(-2).to(x.dtype)
