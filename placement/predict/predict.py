"""Predicted times of one request at one node, plainly: what placement.decide.node_times computes for all nodes at once.

    chunk     = step budget - running
    queue     = W b + c W L / 2 + W / chunk * (a + beside)         W: prompt tokens before this one, L: of one of them
    prefill   = (n - h) b + c (n^2 - h^2) / 2 + ceil((n - h) / chunk) * (a + beside)             h: the prefix hit
    turn      = expected * step / running * those that must end before there is a place
    ttft      = round trip + ttft_scale * (queue + turn + prefill)      the last prefill step gives the first token
    tpot      = tpot_scale * (d + e * rows + f * context)       rows: all that run or wait, and this one
    total     = ttft + (expected - 1) * tpot

a, b, c, d, e, f are the node's own fit (mesh.node.latency_model); `beside` is what the rows that decode add to a step.
The scales are what the entry found the node's answers to take, over what was predicted (placement.predict.calibration).
Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh.node.latency_model import LatencyCurve

DEFAULT_STEP_TOKENS = 256
"""Step budget of a node that does not tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What is at a node already. `context_tokens`: positions that its running sequences attend to. `step_tokens`: most
    tokens of a step, `most_running`: most sequences at once; 0: not told. `full`: the prompt does not fit its free
    KV."""

    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    context_tokens: int = 0
    step_tokens: int = 0
    most_running: int = 0
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds. `error_ratio`: how far off it usually is, as a share."""

    ttft_s: float
    tpot_s: float
    total_s: float
    error_ratio: float


def predict(
    curve: LatencyCurve,
    queue: Queue,
    *,
    prompt_tokens: int,
    cached_tokens: int = 0,
    expected_tokens: int = 128,
    rtt_s: float = 0.0,
    ttft_scale: float = 1.0,
    tpot_scale: float = 1.0,
) -> Prediction:
    """Times of a request of `prompt_tokens`, of which the node has `cached_tokens` in its cache, and `expected_tokens`
    of output. The curve must know prefill and decoding."""
    cached = min(max(cached_tokens, 0), prompt_tokens - 1)
    running, ahead = queue.running, queue.waiting_prefill_tokens
    chunk = max(1, (queue.step_tokens or DEFAULT_STEP_TOKENS) - running)
    beside_s = curve.decode_row_s * running + curve.decode_context_s * queue.context_tokens
    queue_s = curve.prefill_token_s * ahead
    queue_s += curve.prefill_growth_s * ahead * ahead / (2 * max(queue.waiting, 1))
    queue_s += ahead / chunk * (curve.prefill_base_s + beside_s)
    prefill_s = curve.prefill_token_s * (prompt_tokens - cached)
    prefill_s += curve.prefill_growth_s * (prompt_tokens**2 - cached**2) / 2
    prefill_s += math.ceil((prompt_tokens - cached) / chunk) * (curve.prefill_base_s + beside_s)

    rows = running + queue.waiting + 1
    if queue.most_running:
        rows = min(rows, queue.most_running)
    context = queue.context_tokens + ahead + prompt_tokens + expected_tokens / 2
    step_s = curve.step_s(rows, context)
    turn_s = expected_tokens * step_s * _before(queue) / max(running, 1)
    ttft_s = rtt_s + ttft_scale * (queue_s + turn_s + prefill_s)
    tpot_s = tpot_scale * step_s
    return Prediction(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        total_s=ttft_s + max(expected_tokens - 1, 0) * tpot_s,
        error_ratio=curve.error_ratio,
    )


def _before(queue: Queue) -> int:
    """Sequences that must end before this one has a place."""
    if queue.full:
        return queue.waiting + 1
    if queue.most_running:
        return max(0, queue.running + queue.waiting + 1 - queue.most_running)
    return 0
