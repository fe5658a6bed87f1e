"""One token for each row of logits: batched argmax where that is all there is to do, else mesh.node.sampling."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from mesh.node.sampling import Sampled, SamplingParams, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """What the draw of one row depends on. `token_ids` are all tokens so far."""

    sampling: SamplingParams
    token_ids: Seq[int]
    prompt_tokens: int


def choose(logits: torch.Tensor, rows: Seq[SampleRow], eos_token_ids: frozenset[int]) -> list[Sampled | None]:
    """Draw one token a row from `logits` (f32 [rows, vocab], on any device). None: that row is not finite."""
    best, best_ids = logits.max(dim=-1)  # the first, so the lowest, id on a tie; NaN if there is any
    finite, ids = torch.isfinite(best).tolist(), best_ids.tolist()
    drawn: list[Sampled | None] = []
    for i, row in enumerate(rows):
        if not finite[i]:
            drawn.append(None)
        elif _is_argmax(row):
            drawn.append(Sampled(ids[i]))
        else:
            drawn.append(sample(logits[i].cpu().numpy(), row.sampling, row.token_ids, row.prompt_tokens, eos_token_ids))
    return drawn


def _is_argmax(row: SampleRow) -> bool:
    s = row.sampling
    masks_end = len(row.token_ids) - row.prompt_tokens < s.min_tokens
    return s.greedy and not s.needs_counts and s.logprobs is None and not masks_end
