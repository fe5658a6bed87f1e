"""Sampling as a pure function of (logits, tokens so far, parameters, position).

Randomness is counter-based: Philox-4x64 with key (seed, sample_index) and counter (position) gives one uniform
number, so the same logits give the same token wherever and in whatever batch they are computed, and a moved
generation continues as if it had stayed. Nothing but token ids needs to travel: penalty counts are a function
of the ids (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).

Order of operations: min_tokens mask, repetition penalty (prompt and output), presence and frequency penalty
(output only), temperature, top_k, top_p, min_p, draw. `temperature == 0` is greedy: the largest logit after
penalties, the lowest id on a tie. This is the order of vLLM's documentation; transformers applies temperature
before top_k too. Log-probabilities are of the distribution before temperature and truncation, after penalties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked on construction; raises InvalidRequest naming the field. `seed` is always set (the entry draws
    one where the caller gave none), so that a run can move."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # how many alternatives beside the chosen token; None: no log-probabilities
    sample_index: int = 0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS}", field="stop")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"each stop string has 1 to {MAX_STOP_CHARS} characters", field="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_counts(self) -> bool:
        """Whether any penalty looks at the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _within(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{field} must be in {bracket}{low}, {high}], got {value}", field=field)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token; `logprob` and `top` only if asked for."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The number in [0, 1) for this position. Depends on nothing else."""
    # Arrays of uint64: numpy would take a list with a seed of 2**63 or more for floats and lose its low bits.
    key = np.array([seed, sample_index], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(1)[0]
    return float(int(bits) >> 11) * 2.0**-53


def sample(
    logits: NDArray[np.float32],
    params: SamplingParams,
    token_ids: Sequence[int],
    prompt_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> Sampled:
    """Draw the token for position len(token_ids) from one row of logits (shape [vocab], not modified)."""
    row = logits.astype(np.float64)
    generated = len(token_ids) - prompt_tokens
    if generated < params.min_tokens and eos_token_ids:
        row[list(eos_token_ids)] = -np.inf
    if params.needs_counts:
        _penalise(row, params, token_ids, prompt_tokens)
    token_id = int(np.argmax(row)) if params.greedy else _draw(row, params, len(token_ids))
    if params.logprobs is None:
        return Sampled(token_id)
    peak = row.max()
    log_probs = row - (peak + math.log(np.exp(row - peak).sum()))
    best = _best(log_probs, params.logprobs) if params.logprobs else ()
    return Sampled(token_id, float(log_probs[token_id]), tuple((int(i), float(log_probs[i])) for i in best))


def _penalise(row: NDArray[np.float64], params: SamplingParams, token_ids: Sequence[int], prompt_tokens: int) -> None:
    ids = np.asarray(token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(ids)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    out, counts = np.unique(ids[prompt_tokens:], return_counts=True)
    row[out] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(row: NDArray[np.float64], params: SamplingParams, position: int) -> int:
    """One token. Sorts no more of the vocabulary than the parameters need: a whole one costs milliseconds."""
    weights = np.exp((row - row.max()) / params.temperature)
    ids: NDArray[np.int64] | None = None  # None: all, in the order of ids
    if params.top_k and params.top_k < len(weights):
        ids = _best(weights, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(weights, params.top_p, ids)
    kept = weights if ids is None else weights[ids]
    if params.min_p > 0.0:
        likely = np.flatnonzero(kept >= params.min_p * kept.max())
        ids = likely if ids is None else ids[likely]
        kept = kept[likely]
    cumulative = np.cumsum(kept)
    u = uniform(params.seed, params.sample_index, position) * cumulative[-1]
    at = min(int(np.searchsorted(cumulative, u, side="right")), len(kept) - 1)
    return at if ids is None else int(ids[at])


def _best(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Indices of the k largest, best first, ties by index."""
    if k < len(values):
        least = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > least)
        ids = np.sort(np.concatenate((above, np.flatnonzero(values == least)[: k - len(above)])))
    else:
        ids = np.arange(len(values))
    return ids[np.argsort(-values[ids], kind="stable")]


def _nucleus(weights: NDArray[np.float64], top_p: float, ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The smallest head whose mass reaches top_p of the whole, the token that crosses included; `ids`, best first,
    are what top_k left."""
    mass = top_p * (weights if ids is None else weights[ids]).sum()
    for size in (256, 4096, len(weights)):  # the head is nearly always short
        head = _best(weights, min(size, len(weights))) if ids is None else ids
        cumulative = np.cumsum(weights[head])
        if ids is not None or cumulative[-1] >= mass or size >= len(weights):
            break
    return head[: int(np.searchsorted(cumulative, mass)) + 1]
