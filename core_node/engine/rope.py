"""Rotary position embedding on adjacent pairs (dimension 2i with 2i + 1), as llama.cpp rotates `llama` models.

Source: Su et al., "RoFormer" (2021); the llama3 scaling is that of Llama 3.1's published configuration. A model's
scaling comes as the canonical text of KvGeometry.rope_scaling:

    none
    linear:factor=F
    llama3:factor=F,low_freq_factor=A,high_freq_factor=B,original_context=N
"""

from __future__ import annotations

import math

import torch

from mesh.errors import InvalidRequest

_PARAMETERS = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_context"),
}


def inverse_frequencies(head_dim: int, base: float, scaling: str) -> torch.Tensor:
    """Radians per position of each pair, f64 [head_dim / 2]. Raises InvalidRequest on a scaling it does not know."""
    kind, values = _parse(scaling)
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "linear":
        return frequencies / values["factor"]
    if kind == "llama3":
        return _llama3(frequencies, **values)
    return frequencies


def rope_table(head_dim: int, base: float, scaling: str, n_positions: int) -> torch.Tensor:
    """cos and sin for positions [0, n_positions): f32 [n_positions, 2, head_dim / 2]. Angles are made in f64."""
    frequencies = inverse_frequencies(head_dim, base, scaling)
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [tokens, heads, head_dim] by the tokens' `cos` and `sin` (f32 [tokens, 1, head_dim / 2]);
    computed in f32, returned in x's dtype."""
    even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def _parse(scaling: str) -> tuple[str, dict[str, float]]:
    kind, _, text = scaling.partition(":")
    values: dict[str, float] = {}
    try:
        for pair in filter(None, text.split(",")):
            key, _, value = pair.partition("=")
            values[key] = float(value)
    except ValueError as exc:
        raise InvalidRequest(f"RoPE scaling {scaling!r} is malformed", field="model") from exc
    if kind not in _PARAMETERS or set(values) != set(_PARAMETERS[kind]):
        raise InvalidRequest(
            f"RoPE scaling {scaling!r} is not supported; supported: {', '.join(_PARAMETERS)}", field="model"
        )
    if not all(math.isfinite(v) and v > 0 for v in values.values()):
        raise InvalidRequest(f"RoPE scaling {scaling!r} has a parameter that is not positive", field="model")
    return kind, values


def _llama3(
    frequencies: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: float
) -> torch.Tensor:
    """Slow pairs are divided by `factor`, fast ones kept, those between blended."""
    turns = original_context * frequencies / (2 * math.pi)  # full rotations within the original context
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / factor)
