"""Rotary position embedding on adjacent pairs (dimension 2i with 2i + 1), as llama.cpp rotates `llama` models.

Source: Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

import torch

from mesh.model.rope_scaling import inverse_frequencies


def rope_table(head_dim: int, base: float, scaling: str, n_positions: int) -> torch.Tensor:
    """cos and sin for positions [0, n_positions): f32 [n_positions, 2, head_dim / 2]. Angles are made in f64.
    `scaling` is KvGeometry.rope_scaling."""
    frequencies = torch.from_numpy(inverse_frequencies(head_dim, base, scaling))
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [tokens, heads, head_dim] by the tokens' `cos` and `sin` (f32 [tokens, 1, head_dim / 2]);
    computed in f32, returned in x's dtype."""
    even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
