"""When a run ends by itself: end-of-sequence token, stop string, max_tokens, full context."""

from __future__ import annotations

from collections.abc import Sequence

from mesh.node.engine import Finished, FinishReason
from mesh.node.sampling import SamplingParams
from mesh.node.stop import StopMatcher, TextStream


class Ending:
    """State of one run, a function of its generated tokens: a moved run replays those that it came with.

    The token that ends a run (end of sequence, or the one that completes a stop string) is part of its output.
    `stream` detokenises; it is needed only if there are stop strings. `finished` is set once the run has ended,
    which it may have by what was replayed."""

    def __init__(
        self,
        sampling: SamplingParams,
        token_ids: Sequence[int],
        prompt_tokens: int,
        *,
        max_context_tokens: int,
        eos_token_ids: frozenset[int],
        stream: TextStream | None,
    ) -> None:
        assert stream is not None or not sampling.stop
        self._sampling = sampling
        self._eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self._matcher = StopMatcher(sampling.stop)
        self._stream = stream if sampling.stop else None
        self._limit = min(prompt_tokens + sampling.max_tokens, max_context_tokens)
        self._n_tokens = prompt_tokens
        self.finished: Finished | None = None
        for token_id in token_ids[prompt_tokens:]:
            self.after(token_id)

    def after(self, token_id: int) -> Finished | None:
        """Account for one more token; the same as `finished` afterwards."""
        self._n_tokens += 1
        if self.finished is None:
            self.finished = self._verdict(token_id)
        return self.finished

    def _verdict(self, token_id: int) -> Finished | None:
        if token_id in self._eos:
            return Finished(FinishReason.STOP)
        if self._stream is not None:
            self._matcher.push(self._stream.push(token_id))
            if self._matcher.matched is not None:
                return Finished(FinishReason.STOP, self._matcher.matched)
        return Finished(FinishReason.LENGTH) if self._n_tokens >= self._limit else None
