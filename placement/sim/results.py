"""What a run comes to: goodput first, with refused and failed requests counted as misses. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.sim.flight import Outcome, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Over all requests of a run. Ratios are of all requests; times of those that were answered, NaN if none was."""

    n_requests: int
    goodput_ratio: float
    late_ratio: float
    refused_ratio: float
    failed_ratio: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    hit_ratio: float  # cached tokens of all prompt tokens
    fallbacks: int
    shapes: tuple[tuple[str, int], ...]


def summarise(records: Sequence[Record]) -> Summary:
    """Raises ValueError without any record."""
    if not records:
        raise ValueError("no records to summarise")
    n, outcomes = len(records), Counter(record.outcome for record in records)
    answered = [r for r in records if r.outcome in (Outcome.WITHIN_SLO, Outcome.LATE)]
    ttft = np.array([r.ttft_s for r in answered]) if answered else np.array([np.nan])
    tpot = np.array([r.tpot_s for r in answered]) if answered else np.array([np.nan])
    return Summary(
        n_requests=n,
        goodput_ratio=outcomes[Outcome.WITHIN_SLO] / n,
        late_ratio=outcomes[Outcome.LATE] / n,
        refused_ratio=outcomes[Outcome.REFUSED] / n,
        failed_ratio=outcomes[Outcome.FAILED] / n,
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p95_s=float(np.quantile(ttft, 0.95)),
        tpot_p50_s=float(np.quantile(tpot, 0.5)),
        tpot_p95_s=float(np.quantile(tpot, 0.95)),
        hit_ratio=sum(r.cached_tokens for r in records) / max(1, sum(r.request.prompt_tokens for r in records)),
        fallbacks=sum(r.fallbacks for r in records),
        shapes=tuple(sorted(Counter(r.shape for r in answered).items())),
    )
