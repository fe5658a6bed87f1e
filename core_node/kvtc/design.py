"""From coefficients to settings: what each step costs and spoils on held-out text, and the allocation for each target.

Pure numpy. Magnitudes (and so the frequency tables' choice) come from the windows that the basis was made of, rates and
errors from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mesh.kv.kvtc.allocate import allocate
from mesh.kv.kvtc.artifact import PREDICTED, Setting
from mesh.kv.kvtc.quantise import code_bits, context_of, laplace_counts, quantise, symbols_of, zones_of
from mesh.kv.kvtc.rans import PROB_BITS, FrequencyTables, normalise

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_Number = TypeVar("_Number", bound=np.generic)

GROUP = 8  # coefficients of like variance that share a step
_N_STEPS = 16
_MAX_GAIN = 2.5
_PRIOR_COUNT = 2000.0  # weight of the Laplace shape against what was counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`steps` f32 [n_steps] ascending; for each coefficient (K's `rank_k`, then V's) dropped (index 0) or with each
    step: bits a token, weighted squared error, frequency table and gain, all [n, n_steps + 1].

    A dead zone and a coarse step shrink a coefficient towards its mean. Least squares wants it so; but attention sums
    over many tokens, where noise averages out and shrinkage does not, so what is decoded is scaled up, half way (by the
    geometric mean) to where it would be right on average: `gains` = sqrt(E[c^2] / E[c decoded c]).

    `window_errors` [n_windows, n, n_steps + 1] are the errors of each window alone, `outside` [n_windows] the mean
    error in each that no coefficient mends, as the basis lacks it."""

    steps: F32
    bits: F64
    errors: F64
    contexts: NDArray[np.intp]
    gains: F64
    window_errors: F64
    outside: F64
    tables: FrequencyTables
    rank_k: int


def measure(fit: F32, held_out: Sequence[F32], rank_k: int, outside: Sequence[float]) -> Measured:
    """`fit` and `held_out`, window by window, are coefficients of K (`rank_k` of them) and V [n_tokens, n]."""
    spread = np.sqrt(np.square(fit).mean(axis=0))
    middle = np.median(spread)
    steps = (middle * 2.0 ** (0.5 * (np.arange(_N_STEPS) - 3))).astype(np.float32)
    contexts, tables = _tables(fit, steps)
    zones = zones_of(tables)
    n, tokens = fit.shape[1], np.asarray([len(x) for x in held_out])
    bits, gains = np.zeros((n, _N_STEPS + 1)), np.ones((n, _N_STEPS + 1))
    errors = np.empty((len(held_out), n, _N_STEPS + 1))
    energy = np.square(fit).sum(axis=0, dtype=np.float64)
    for w, window in enumerate(held_out):
        errors[w, :, 0] = np.square(window).mean(axis=0, dtype=np.float64)
        for i, step in enumerate(steps):
            q = quantise(window, step, zones.of(contexts[:, i]))
            errors[w, :, i + 1] = np.square(window - q * step).mean(axis=0)
            each = code_bits(q, np.broadcast_to(contexts[:, i], q.shape), tables).sum(axis=0)
            bits[:, i + 1] += each / tokens.sum()
    for i, step in enumerate(steps):
        kept = (fit * (quantise(fit, step, zones.of(contexts[:, i])) * step)).sum(axis=0, dtype=np.float64)
        gains[:, i + 1] = np.sqrt(np.clip(energy / np.maximum(kept, 1e-30), 1.0, _MAX_GAIN))
    contexts = np.concatenate([np.zeros((n, 1), dtype=np.intp), contexts], axis=1)
    return Measured(
        steps=steps,
        bits=bits,
        errors=np.average(errors, axis=0, weights=tokens),
        contexts=contexts,
        gains=gains,
        window_errors=errors,
        outside=np.asarray(outside, dtype=np.float64),
        tables=tables,
        rank_k=rank_k,
    )


def predict_v(coefficients: F32, rank_k: int, bits_per_token: float) -> tuple[float, F32]:
    """What K's coefficients tell of V's, both beside each other in `coefficients` [n_tokens, n]: the step of a uniform
    quantiser at this rate, and the linear map [rank_k, P] that does best once K has that quantiser's noise (Wiener)."""
    second = np.square(coefficients, dtype=np.float64).mean(axis=0)
    low, high = 0.0, float(second.max())
    for _ in range(50):  # reverse water-filling: the noise at which the rate is what it should be
        noise = (low + high) / 2
        rate = 0.5 * np.log2(np.maximum(second / noise, 1.0)).sum()
        low, high = (noise, high) if rate > bits_per_token else (low, noise)
    k, v = coefficients[:, :rank_k], coefficients[:, rank_k : rank_k + PREDICTED]
    gram = (k.T @ k).astype(np.float64) + np.diag(len(k) * np.minimum(noise, second[:rank_k]))
    predict: F32 = np.linalg.solve(gram, (k.T @ v).astype(np.float64)).astype(np.float32)
    return float(np.sqrt(12.0 * noise)), predict


def grouped(values: F64) -> F64:
    """Sums over groups of coefficients [n_groups, n_choices]; K and V have whole groups each."""
    summed: F64 = values.reshape(-1, GROUP, values.shape[1]).sum(axis=1)
    return summed


def design(measured: Measured, *, name: str, bits_per_token: float, bound_ratio: float) -> Setting:
    """The setting of least error within `bits_per_token`; usual text may err `bound_ratio` times as much as the middle
    one of the held-out windows does."""
    chosen = allocate(grouped(measured.bits), grouped(measured.errors), bits_per_token)
    each = np.repeat(chosen, GROUP)
    rows = np.arange(len(each))
    steps = np.where(each > 0, measured.steps[np.maximum(each, 1) - 1], 0.0).astype(np.float32)
    error = np.median(measured.window_errors[:, rows, each].sum(axis=1) + measured.outside)
    return Setting(
        name=name,
        steps=_by_stream(steps, measured.rank_k),
        restore=_by_stream((steps * measured.gains[rows, each]).astype(np.float32), measured.rank_k),
        contexts=_by_stream(measured.contexts[rows, each].astype(np.uint8), measured.rank_k),
        bound=float(bound_ratio * error),
    )


def _by_stream(values: NDArray[_Number], rank_k: int) -> NDArray[_Number]:
    """[2, R], zero where a basis has fewer."""
    out = np.zeros((2, max(rank_k, len(values) - rank_k)), dtype=values.dtype)
    out[0, :rank_k] = values[:rank_k]
    out[1, : len(values) - rank_k] = values[rank_k:]
    return out


def _tables(fit: F32, steps: F32) -> tuple[NDArray[np.intp], FrequencyTables]:
    """Table of each coefficient under each step [n, n_steps], and the tables: what symbols really came, over all steps,
    blended with the Laplace shape."""
    prior = laplace_counts()
    first = zones_of(FrequencyTables(normalise(prior)))
    prior /= prior.sum(axis=1, keepdims=True)
    width = prior.shape[1]
    counted = np.zeros(prior.size)
    contexts = np.empty((fit.shape[1], len(steps)), dtype=np.intp)
    for i, step in enumerate(steps):
        about = context_of(np.abs(quantise(fit, step)).mean(axis=0))
        levels = quantise(fit, step, first.of(about))
        contexts[:, i] = context_of(np.abs(levels).mean(axis=0))
        symbols = symbols_of(levels).astype(np.intp)
        counted += np.bincount((contexts[:, i] * width + symbols).ravel(), minlength=prior.size)
    counts = counted.reshape(prior.shape)
    counts[:, 1:-1] = counts[:, 1:-1].reshape(len(counts), -1, 2).mean(axis=2).repeat(2, axis=1)  # signs are even
    share = (counts + _PRIOR_COUNT * prior) / (counts.sum(axis=1, keepdims=True) + _PRIOR_COUNT)
    share[:, :-1][share[:, :-1] < 0.4 / (1 << PROB_BITS)] = 0.0
    share[:, -1] = np.maximum(share[:, -1], 0.5 / (1 << PROB_BITS))
    share[:, 0] = np.maximum(share[:, 0], 1.0 / (1 << PROB_BITS))
    return contexts, FrequencyTables(normalise(share))
