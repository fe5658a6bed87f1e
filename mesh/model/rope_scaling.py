"""RoPE scaling: the canonical text that is part of a KV layout, and the frequencies it stands for. Pure.

    none
    linear:factor=F
    llama3:factor=F,high_freq_factor=B,low_freq_factor=A,original_context=N

Source: the llama3 scaling is that of Llama 3.1's published configuration: pairs that turn slowly within the original
context are slowed by `factor`, fast ones are kept, those between are blended. A GGUF does not hold the parameters but
the divisors that come of them (`rope_freqs.weight`), so they are recognised there among the published ones.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest

_PARAMETERS: Final = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_context"),
}
# Of every published model with this scaling; they differ in `factor` (8, 32 ...).
_LLAMA3_PUBLISHED: Final = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_context": 8192.0}


def scaling_text(kind: str, **parameters: float) -> str:
    """Canonical text. Raises InvalidRequest on an unknown kind or parameters that are missing, left over or not
    positive."""
    if kind not in _PARAMETERS:
        raise InvalidRequest(
            f"RoPE scaling {kind} is not supported; {', '.join(k for k in _PARAMETERS if k != 'none')} are",
            field="model",
        )
    if set(parameters) != set(_PARAMETERS[kind]):
        raise InvalidRequest(
            f"RoPE scaling {kind} needs exactly the parameters {', '.join(_PARAMETERS[kind]) or '(none)'}",
            field="model",
        )
    for name, value in parameters.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidRequest(f"RoPE scaling {kind}: {name} is {value}", field="model")
    if kind == "linear" and parameters["factor"] == 1.0:
        return "none"
    pairs = ",".join(f"{name}={parameters[name]:g}" for name in _PARAMETERS[kind])
    return f"{kind}:{pairs}" if pairs else kind


def inverse_frequencies(head_dim: int, base: float, scaling: str) -> NDArray[np.float64]:
    """Radians per position of each pair [head_dim / 2]. Raises InvalidRequest on a text that is not canonical."""
    frequencies: NDArray[np.float64] = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind, values = _parse(scaling)
    if kind == "linear":
        return frequencies / values["factor"]
    if kind == "llama3":
        turns = values["original_context"] * frequencies / (2 * math.pi)  # within the original context
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / values["factor"])
    return frequencies


def recognise_llama3(divisors: NDArray[np.float32], head_dim: int, base: float) -> str | None:
    """The canonical text whose frequencies are the plain ones over `divisors` [head_dim / 2]; None if no published
    parameters give them."""
    if divisors.shape != (head_dim // 2,) or not (np.isfinite(divisors).all() and (divisors > 0).all()):
        return None
    text = scaling_text("llama3", factor=float(np.round(divisors.max(), 4)), **_LLAMA3_PUBLISHED)
    expected = inverse_frequencies(head_dim, base, "none") / inverse_frequencies(head_dim, base, text)
    return text if np.allclose(divisors, expected, rtol=1e-4) else None


def _parse(scaling: str) -> tuple[str, dict[str, float]]:
    kind, _, text = scaling.partition(":")
    values: dict[str, float] = {}
    try:
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            values[name] = float(value)
    except ValueError as exc:
        raise InvalidRequest(f"RoPE scaling {scaling!r} is malformed", field="model") from exc
    scaling_text(kind, **values)
    return kind, values
