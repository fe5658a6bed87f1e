"""Sampling against transformers' processors, and against the definition where there is none.

A draw is a function of one uniform number, so drawing for every number of a fine grid gives the whole distribution: a
token's share of the grid is its probability up to one grid step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core_node.engine.ending import Ending
from core_node.engine.sampler import SampleRow, choose
from mesh.node import sampling as module
from mesh.node.engine import FinishReason
from mesh.node.sampling import SamplingParams, sample

VOCAB, GRID, EOS = 40, 1_000, 7
PROMPT_TOKENS = 6


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "seed": 1, **changes})  # type: ignore[arg-type]


def row(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def tokens(seed: int, n: int = 14) -> list[int]:
    """With repeats, in the prompt and behind it."""
    rng = random.Random(seed)
    return [rng.randrange(12) for _ in range(n)]


def reference(logits: NDArray[np.float32], p: SamplingParams, ids: Sequence[int]) -> NDArray[np.float64]:
    """Scores by transformers; presence and frequency by their definition (it has neither)."""
    n_prompt = PROMPT_TOKENS
    seen = torch.tensor([list(ids)])
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    processors = LogitsProcessorList()
    if p.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(n_prompt, p.min_tokens, EOS, device="cpu"))
    if p.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    scores = processors(seen, scores).clone()
    for token_id in set(ids[n_prompt:]):
        scores[0, token_id] -= p.presence_penalty + p.frequency_penalty * list(ids[n_prompt:]).count(token_id)
    warpers = LogitsProcessorList()
    if p.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0.0:
        warpers.append(MinPLogitsWarper(p.min_p))
    values: NDArray[np.float64] = warpers(seen, scores)[0].numpy()
    return values


def distribution(
    logits: NDArray[np.float32], p: SamplingParams, ids: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> NDArray[np.float64]:
    counts = np.zeros(VOCAB)
    for i in range(GRID):
        monkeypatch.setattr(module, "uniform", lambda *_, u=(i + 0.5) / GRID: u)
        counts[sample(logits, p, ids, PROMPT_TOKENS, frozenset({EOS})).token_id] += 1
    return counts / GRID


CASES: list[dict[str, object]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.9},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.1},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"min_tokens": 30},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_p": 0.7, "min_p": 0.1},
    {"min_tokens": 9, "repetition_penalty": 1.1, "temperature": 0.8, "top_k": 3},
]


@pytest.mark.parametrize("changes", CASES, ids=lambda c: ",".join(c) or "plain")
def test_the_distribution_is_transformers(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        logits, ids, p = row(seed), tokens(seed), params(**changes)
        want = np.exp(reference(logits, p, ids))
        want /= want.sum()
        got = distribution(logits, p, ids, monkeypatch)
        assert np.abs(got - want).max() <= 1.01 / GRID
        assert not got[want == 0].any()


@pytest.mark.parametrize("changes", [c for c in CASES if not {"top_k", "top_p", "min_p", "temperature"} & set(c)])
def test_greedy_takes_the_largest_processed_score(changes: dict[str, object]) -> None:
    for seed in range(30):
        logits, ids, p = row(seed), tokens(seed), params(temperature=0.0, **changes)
        got = sample(logits, p, ids, PROMPT_TOKENS, frozenset({EOS})).token_id
        assert got == int(reference(logits, p, ids).argmax())


@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5, "temperature": 0.5}])
def test_log_probabilities_are_of_the_penalised_scores(changes: dict[str, object]) -> None:
    for seed in range(10):
        logits, ids, p = row(seed), tokens(seed), params(logprobs=5, **changes)
        drawn = sample(logits, p, ids, PROMPT_TOKENS)
        before = params(**{k: v for k, v in changes.items() if k != "temperature"})
        want = torch.log_softmax(torch.from_numpy(reference(logits, before, ids)), -1)
        best = want.topk(5)
        assert drawn.logprob == pytest.approx(float(want[drawn.token_id]))
        assert [i for i, _ in drawn.top] == best.indices.tolist()
        assert [x for _, x in drawn.top] == pytest.approx(best.values.tolist())


def test_rows_of_a_batch_are_those_of_the_definition() -> None:
    """The batched way of the engine gives what each row gives alone, whatever its neighbours ask for."""
    rows = [
        SampleRow(sampling=params(sample_index=i, **c), token_ids=tokens(i), prompt_tokens=PROMPT_TOKENS)
        for i, c in enumerate([*CASES, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3}])
    ]
    logits = torch.from_numpy(np.stack([row(i) for i in range(len(rows))]))
    drawn = choose(logits, rows, frozenset({EOS}))
    for i, (one, got) in enumerate(zip(rows, drawn, strict=True)):
        assert got == sample(row(i), one.sampling, one.token_ids, PROMPT_TOKENS, frozenset({EOS}))


def test_seed_and_sample_index_and_position_each_change_the_numbers() -> None:
    numbers = {module.uniform(s, i, p) for s in range(5) for i in range(5) for p in range(40)}
    assert len(numbers) == 1000
    values = np.array(sorted(numbers))
    assert np.abs(values - (np.arange(1000) + 0.5) / 1000).max() < 0.06  # Kolmogorov-Smirnov, far beyond 1 %


class Pieces:
    """A tokenizer whose tokens are the pieces given."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_over_token_borders(seed: int) -> None:
    """A run ends with the first token after which the generated text holds a stop string, wherever borders fall."""
    rng = random.Random(seed)
    pieces = ["", *("".join(rng.choice("ab") for _ in range(rng.randrange(1, 4))) for _ in range(9))]
    stop = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(2, 7))) for _ in range(rng.randrange(1, 4)))
    ids = [rng.randrange(len(pieces)) for _ in range(60)]
    texts = ["".join(pieces[i] for i in ids[: n + 1]) for n in range(len(ids))]
    want = next((n for n, text in enumerate(texts) if any(s in text for s in stop)), None)
    replayed = rng.randrange(0, 20)  # a moved run starts with those that it came with
    ending = Ending(
        params(max_tokens=100, stop=stop),
        [0, *ids[:replayed]],
        1,
        max_context_tokens=1000,
        eos_token_ids=frozenset(),
        stream=Pieces(pieces),
    )
    got = None if ending.finished is None else want
    for n in range(replayed, len(ids)):
        if ending.finished is None and ending.after(ids[n]) is not None:
            got = n
    assert got == want
    if ending.finished is not None:
        assert want is not None
        assert ending.finished.reason is FinishReason.STOP
        assert ending.finished.stop_string in texts[want]
