"""What a request really took, against what was predicted for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.telemetry.metrics import PredictedTime
from placement.decide.types import Candidate

_LEAST_TOKENS = 4  # of an output that says something of the time per token
_MOST_OTHER_HIT = 0.1  # share of the prompt by which the prefix hit may differ from what was thought


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of a request that ran as planned, as its entry saw them; seconds. `tokens` of output."""

    ttft_s: float
    total_s: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for an output too short to tell."""
        return None if self.tokens < _LEAST_TOKENS else (self.total_s - self.ttft_s) / (self.tokens - 1)

    def errors(self, choice: Candidate) -> Iterator[tuple[PredictedTime, float]]:
        """How far each prediction was off: |measured - predicted| / measured. The total is that of as many tokens as
        came: how many there would be was not predicted."""
        total_s = choice.ttft_s + max(self.tokens - 1, 0) * choice.tpot_s
        for kind, measured_s, predicted_s in (
            (PredictedTime.TTFT, self.ttft_s, choice.ttft_s),
            (PredictedTime.TPOT, self.tpot_s, choice.tpot_s),
            (PredictedTime.TOTAL, self.total_s, total_s),
        ):
            if measured_s is not None and measured_s > 0:
                yield kind, abs(measured_s - predicted_s) / measured_s

    def ratios(self, choice: Candidate) -> tuple[float | None, float | None]:
        """Measured over predicted TTFT and TPOT, before any correction, for the node's calibration. None where it tells
        nothing of the node: the hit was another than thought, or the output too short."""
        ttft = tpot = None
        if abs(self.cached_tokens - choice.cached_tokens) <= _MOST_OTHER_HIT * self.prompt_tokens and choice.ttft_s > 0:
            ttft = self.ttft_s / choice.ttft_s * choice.ttft_scale
        if self.tpot_s is not None and choice.tpot_s > 0:
            tpot = self.tpot_s / choice.tpot_s * choice.tpot_scale
        return ttft, tpot
