"""The work that each engine is given, and what its timings say. Pure.

Prompts are token ids without meaning, distinct but where a case is about shared prefixes. Prefill = prompt tokens /
T(1 output token); decode = output tokens beyond the first / (T(n) - T(1)); output = output tokens / T(n), T being the
wall time of a burst. Schedules and lengths depend on the seed, the case and the attempt alone, so that all engines get
the same.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mesh.errors import Internal

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
SHARED_TOKENS, OWN_TOKENS, SHARED_OUTPUT_TOKENS, SHARERS = 512, 32, 32, 16
MIXED_PROMPT_TOKENS, MIXED_OUTPUT_TOKENS = (16, 400), (8, 96)
COLD, WARM, OPEN_LOOP = "shared prefix, cold", "shared prefix, warm", "open loop"

Values = Mapping[str, float]  # by measure
Rows = Mapping[str, Values]  # by row of the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Requests of one exchange: request i is sent `at_s[i]` after the start."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    at_s: tuple[float, ...]

    def message(self) -> dict[str, Any]:
        """As drivers take it."""
        return {"prompts": self.prompts, "max_tokens": self.max_tokens, "at_s": self.at_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times in seconds after the start, in the order of the requests; `ids` is None where they are not told."""

    wall_s: float
    first_s: tuple[float, ...]
    last_s: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def parse(cls, message: Mapping[str, Any], work: Work, engine: str) -> Answer:
        """Check a driver's answer against the work. Raises Internal."""
        if tuple(message["n_tokens"]) != work.max_tokens:
            raise Internal(f"{engine} did not give the tokens that were asked for")
        ids = message["ids"]
        return cls(
            wall_s=float(message["wall_s"]),
            first_s=tuple(message["first_s"]),
            last_s=tuple(message["last_s"]),
            ids=None if ids is None else tuple(map(tuple, ids)),
        )


class Case(Protocol):
    """One piece of a round: some exchanges with each engine, one after another, and what they say."""

    @property
    def name(self) -> str: ...

    def works(self, rng: random.Random, vocab: int) -> list[Work]:
        """The exchanges."""
        ...

    def rows(self, works: Sequence[Work], answers: Sequence[Answer]) -> Rows:
        """Rows of the report and their values."""
        ...


@dataclass(frozen=True, slots=True)
class Burst:
    """`n` distinct prompts at once, with one output token and then, others, with 64."""

    n: int

    @property
    def name(self) -> str:
        return f"{self.n} at once"

    def works(self, rng: random.Random, vocab: int) -> list[Work]:
        return [at_once(prompts(rng, vocab, self.n, PROMPT_TOKENS), m) for m in (1, OUTPUT_TOKENS)]

    def rows(self, works: Sequence[Work], answers: Sequence[Answer]) -> Rows:
        first, whole = answers
        decoding_s = whole.wall_s - first.wall_s
        # Negative where the machine was slow during the first only: such a difference says nothing.
        decode = {"decode_tokens_per_s": self.n * (OUTPUT_TOKENS - 1) / decoding_s} if decoding_s > 0 else {}
        return {
            self.name: {
                "prefill_tokens_per_s": self.n * PROMPT_TOKENS / first.wall_s,
                **decode,
                **stream_values(works[1], whole),
            }
        }


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """16 requests that share 512 tokens: a prefix that was never seen, then others on the same one."""

    name: str = "shared prefix"

    def works(self, rng: random.Random, vocab: int) -> list[Work]:
        shared = prompts(rng, vocab, 1, SHARED_TOKENS)[0]
        return [
            at_once([shared + own for own in prompts(rng, vocab, SHARERS, OWN_TOKENS)], SHARED_OUTPUT_TOKENS)
            for _ in range(2)
        ]

    def rows(self, works: Sequence[Work], answers: Sequence[Answer]) -> Rows:
        return {n: stream_values(w, a) for n, w, a in zip((COLD, WARM), works, answers, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests of mixed lengths that arrive by a Poisson process, whether the engine keeps up or not. Goodput counts
    requests that met both objectives."""

    requests: int
    rate_per_s: float
    ttft_goal_s: float
    tpot_goal_s: float
    name: str = OPEN_LOOP

    def works(self, rng: random.Random, vocab: int) -> list[Work]:
        at_s, now = [], 0.0
        for _ in range(self.requests):
            at_s.append(now)
            now += rng.expovariate(self.rate_per_s)
        return [mixed(rng, vocab, at_s)]

    def rows(self, works: Sequence[Work], answers: Sequence[Answer]) -> Rows:
        work, answer = works[0], answers[0]
        good = sum(
            ttft <= self.ttft_goal_s and tpot <= self.tpot_goal_s
            for ttft, tpot in zip(ttfts(work, answer), tpots(work, answer), strict=True)
        )
        return {self.name: {**stream_values(work, answer), "goodput_per_s": good / answer.wall_s}}


def stream_values(work: Work, answer: Answer) -> dict[str, float]:
    """What any streamed work tells: output tokens/s, and times to first and per later output token of its requests."""
    first, later = ttfts(work, answer), tpots(work, answer)
    return {
        "output_tokens_per_s": sum(work.max_tokens) / answer.wall_s,
        "ttft_p50_s": statistics.median(first),
        "ttft_p95_s": percentile(first, 0.95),
        "tpot_p50_s": statistics.median(later),
        "tpot_p95_s": percentile(later, 0.95),
    }


def ttfts(work: Work, answer: Answer) -> list[float]:
    """Seconds from sending to the first token, by request."""
    return [first - at for first, at in zip(answer.first_s, work.at_s, strict=True)]


def tpots(work: Work, answer: Answer) -> list[float]:
    """Mean seconds per token after the first, by request; 0 for one of a single token."""
    rows = zip(answer.first_s, answer.last_s, work.max_tokens, strict=True)
    return [(last - first) / (n - 1) if n > 1 else 0.0 for first, last, n in rows]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def at_once(ids: Sequence[tuple[int, ...]], max_tokens: int) -> Work:
    """A burst."""
    n = len(ids)
    return Work(prompts=tuple(ids), max_tokens=(max_tokens,) * n, at_s=(0.0,) * n)


def mixed(rng: random.Random, vocab: int, at_s: Sequence[float]) -> Work:
    """Requests at these times whose lengths are log-uniform, as short ones are the many."""
    lengths = [(_log_uniform(rng, MIXED_PROMPT_TOKENS), _log_uniform(rng, MIXED_OUTPUT_TOKENS)) for _ in at_s]
    return Work(
        prompts=tuple(prompts(rng, vocab, 1, n)[0] for n, _ in lengths),
        max_tokens=tuple(n for _, n in lengths),
        at_s=tuple(at_s),
    )


def prompts(rng: random.Random, vocab: int, n: int, n_tokens: int) -> list[tuple[int, ...]]:
    """`n` random prompts."""
    return [tuple(rng.randrange(vocab) for _ in range(n_tokens)) for _ in range(n)]


def _log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
