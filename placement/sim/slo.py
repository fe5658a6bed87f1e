"""What a request must have to count as served: fixed before any run.

    TTFT <= 1 s + 0.2 ms for each prompt token       7,000 tokens: 2.4 s; 27,000: 6.4 s; 126,000: 26 s
    TPOT <= 100 ms                                   mean over the tokens behind the first

The allowance for the prompt is about ten times what one of the published GPUs needs to prefill it alone; the pace is
Mooncake's bound of the time between tokens (FAST'25). A request that was refused, or failed, is not within it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Seconds."""

    ttft_s: float = 1.0
    ttft_token_s: float = 0.0002
    tpot_s: float = 0.1

    def ttft_for(self, prompt_tokens: int) -> float:
        """The longest TTFT for a prompt."""
        return self.ttft_s + self.ttft_token_s * prompt_tokens

    def met(self, prompt_tokens: int, ttft_s: float, tpot_s: float) -> bool:
        """Whether a finished request was within it."""
        return ttft_s <= self.ttft_for(prompt_tokens) and tpot_s <= self.tpot_s


SLO = Slo()
"""Of all runs that do not say otherwise."""
