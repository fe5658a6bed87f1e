"""One token for each row of logits: batched argmax where that is all there is to do, else mesh.node.sampling."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mesh.node.sampling import Sampled, SamplingParams, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """What the draw of one row depends on. `token_ids` are all tokens so far."""

    sampling: SamplingParams
    token_ids: Seq[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """A step's logits, as far as somebody looks at them. `best_ids`: of each row's largest (the lowest id on a tie);
    `finite`: whether a row can be drawn from; `row(i)`: f32 [vocab], good until the next step."""

    best_ids: Seq[int]
    finite: Seq[bool]
    row: Callable[[int], NDArray[np.float32]]

    @classmethod
    def of(cls, logits: torch.Tensor) -> Logits:
        """Of f32 [rows, vocab] on any device."""
        best, best_ids = logits.max(dim=-1)  # the first, so the lowest, id on a tie; NaN if there is any
        return cls(
            best_ids=best_ids.tolist(), finite=torch.isfinite(best).tolist(), row=lambda i: logits[i].cpu().numpy()
        )


def choose(logits: torch.Tensor | Logits, rows: Seq[SampleRow], eos_token_ids: frozenset[int]) -> list[Sampled | None]:
    """Draw one token a row. None: that row is not finite."""
    given = logits if isinstance(logits, Logits) else Logits.of(logits)
    drawn: list[Sampled | None] = []
    for i, row in enumerate(rows):
        if not given.finite[i]:
            drawn.append(None)
        elif is_argmax(row):
            drawn.append(Sampled(given.best_ids[i]))
        else:
            drawn.append(sample(given.row(i), row.sampling, row.token_ids, row.prompt_tokens, eos_token_ids))
    return drawn


def is_argmax(row: SampleRow) -> bool:
    """Whether the largest logit is all that this draw looks at."""
    s = row.sampling
    masks_end = len(row.token_ids) - row.prompt_tokens < s.min_tokens
    return s.greedy and not s.needs_counts and s.logprobs is None and not masks_end
