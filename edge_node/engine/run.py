"""One run, as long as it lives, and one hold. Changed by the engine core only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_node.engine.kv_store import Sequence
from mesh.errors import Internal
from mesh.node.engine import FinishReason, RunSpec
from mesh.node.sampling import Sampled, sample
from mesh.node.stop import StopMatcher, TextStream

NewTextStream = Callable[[], TextStream]


@dataclass(slots=True, eq=False)
class Run:
    """`tokens` grows as tokens are sampled; numbers derived from it are properties, so that they cannot drift.

    `key` numbers submissions, so that a name used again is not mistaken for the run that had it before."""

    key: int
    spec: RunSpec
    arrival: int
    tokens: list[int]
    sequence: Sequence | None = None
    cached: int = 0  # tokens that came from the cache or a hold at first
    started: bool = False  # was admitted once; a preempted run is not counted again
    prefilled: bool = False
    stops: StopScan | None = None

    @property
    def computed(self) -> int:
        """Leading tokens with KV."""
        return self.sequence.length if self.sequence is not None else 0

    @property
    def outstanding(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens after the prompt, those of an earlier node included."""
        return len(self.tokens) - self.spec.prompt_tokens

    @property
    def shareable(self) -> int:
        """How many of its tokens' KV may come from elsewhere: the last one is computed, for its logits."""
        return len(self.tokens) if self.spec.prefill_only else len(self.tokens) - 1

    @property
    def order(self) -> tuple[int, int]:
        return (self.spec.priority, self.arrival)

    def sample(self, logits: NDArray[np.float32], eos_token_ids: frozenset[int]) -> Sampled:
        """The next token from one row of logits."""
        p = self.spec.sampling
        if p.greedy and not p.needs_counts and p.logprobs is None and self.generated >= p.min_tokens:
            drawn = Sampled(int(np.argmax(logits)))  # no copy of the row; ties go to the lowest id, as in sample()
        else:
            drawn = sample(logits, p, self.tokens, self.spec.prompt_tokens, eos_token_ids)
        if not np.isfinite(logits[drawn.token_id]):
            raise Internal("the model gave a logit that is not a finite number")
        return drawn

    def finish_reason(
        self, eos_token_ids: frozenset[int], max_context_tokens: int
    ) -> tuple[FinishReason, str | None] | None:
        """Why the run is over after its last token, and the stop string that ended it; None if it goes on."""
        p = self.spec.sampling
        if self.generated > 0:
            if self.tokens[-1] in eos_token_ids and not p.ignore_eos:
                return FinishReason.STOP, None
            if self.stops is not None and (stop := self.stops.matched(self.tokens)) is not None:
                return FinishReason.STOP, stop
        if self.generated >= p.max_tokens or len(self.tokens) >= max_context_tokens:
            return FinishReason.LENGTH, None
        return None


class StopScan:
    """Stop strings over a run's generated tokens. A function of the ids alone, so that a run that started on
    another node is scanned from its first generated token."""

    def __init__(self, spec: RunSpec, new_stream: NewTextStream) -> None:
        self._stream = new_stream()
        self._matcher = StopMatcher(spec.sampling.stop)
        self._next = spec.prompt_tokens
        # Text before min_tokens may hold a stop string; it does not end the run and is not looked at.
        self._first = spec.prompt_tokens + max(0, spec.sampling.min_tokens - 1)

    def matched(self, tokens: list[int]) -> str | None:
        """The stop string that the tokens so far have met."""
        while self._next < len(tokens):
            text = self._stream.push(tokens[self._next])
            if self._next >= self._first:
                self._matcher.push(text)
            self._next += 1
        return self._matcher.matched


@dataclass(slots=True, eq=False)
class Hold:
    """KV without a run. `max_tokens` is set while it is an import that may still be written to."""

    sequence: Sequence | None
    salt: bytes
    max_tokens: int | None = None

    @property
    def kv_tokens(self) -> int:
        return self.sequence.length if self.sequence is not None else 0
