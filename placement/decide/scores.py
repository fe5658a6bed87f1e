"""Scores: predicted times and cost of each way to run a request, from measured speeds, load and links.

All arrays have the shape [n_nodes], or [n_prefill, n_decode] for pairs; times in seconds. A cost is the predicted
time to the last token, plus the policy's price for each second of engine time, plus what a missed latency wish
costs. The planner minimises it; it is not bounded and not a probability.

    single    rtt + wait + prefill + decode
    split     wait + max(prefill, KV transfer) + last chunk + round trips, then decode at the target
    offload   prefill and decode at the source while KV moves, a pause, then decode at the target
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.decide.filters import kv_pool_full
from placement.decide.settings import DecideSettings
from placement.decide.types import BoolArray, FloatArray, IntArray, PlacementRequest, Snapshot
from placement.policy.rules import Prices

# Encoded bytes for a byte of f16: q8_0 has 34 bytes for each 32 values.
CODEC_RATIO = {"f16": 1.0, "q8_0": 34 / 64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """Predictions of one shape over nodes or pairs; arrays of one shape, seconds."""

    ttft_s: FloatArray
    total_s: FloatArray
    cost_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTimes:
    """What scores are made of, per node: each array of shape [n_nodes]."""

    rtt_s: FloatArray  # entry to node
    goodput_bytes_per_s: FloatArray  # entry to node
    wait_s: FloatArray  # until the request gets its turn
    prefill_s: FloatArray  # of this prompt, without what is cached
    token_s: FloatArray  # one decode step of this request
    prefill_price: FloatArray
    decode_price: FloatArray


def node_times(
    snapshot: Snapshot, request: PlacementRequest, prices: Prices, age_s: FloatArray, settings: DecideSettings
) -> NodeTimes:
    """Times per node; what is not measured takes the pessimistic defaults of the settings."""
    own = np.arange(snapshot.n_nodes) == snapshot.entry_row
    prefill_speed = _measured(snapshot.prefill_tokens_per_s, settings.prefill_tokens_per_s)
    decode_speed = _measured(snapshot.decode_tokens_per_s, settings.decode_tokens_per_s)
    rtt_s = np.where(own, 0.0, np.where(np.isfinite(snapshot.rtt_s), snapshot.rtt_s, settings.rtt_s))
    goodput = _measured(snapshot.goodput_bytes_per_s, settings.goodput_bytes_per_s)
    to_prefill = np.maximum(request.prompt_tokens - snapshot.cached_tokens, 1)
    busy = (age_s > settings.busy_after_s) | kv_pool_full(snapshot, request)
    token_s = (1.0 + settings.batch_cost_ratio * snapshot.running) / decode_speed
    # Requests that wait for a slot each want about as long as this one; they leave as many slots as run now.
    turn_s = request.expected_tokens * token_s * snapshot.waiting / np.maximum(snapshot.running, 1)
    wait_s = snapshot.waiting_prefill_tokens / prefill_speed + turn_s + np.where(busy, settings.busy_wait_s, 0.0)
    edge = snapshot.tier_edge
    return NodeTimes(
        rtt_s=rtt_s,
        goodput_bytes_per_s=np.where(own, np.inf, goodput),
        wait_s=wait_s,
        prefill_s=to_prefill / prefill_speed,
        token_s=token_s,
        prefill_price=np.where(edge, prices.edge_prefill_per_s, prices.core_prefill_per_s),
        decode_price=np.where(edge, prices.edge_decode_per_s, prices.core_decode_per_s),
    )


def score_single(times: NodeTimes, request: PlacementRequest, settings: DecideSettings) -> Predicted:
    """One node does all; arrays [n_nodes]."""
    ttft_s = times.rtt_s + times.wait_s + times.prefill_s + times.token_s
    decode_s = request.expected_tokens * times.token_s
    total_s = ttft_s + decode_s - times.token_s
    price = times.prefill_price * times.prefill_s + times.decode_price * decode_s
    return _with_cost(ttft_s, total_s, price, request, settings)


def score_split(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    prefill: IntArray,
    decode: IntArray,
    settings: DecideSettings,
) -> Predicted:
    """Prefill at rows `prefill`, KV in chunks to rows `decode`; arrays [len(prefill), len(decode)].

    A chunk travels while the next is computed, so that only the slower of the two counts, and the last chunk."""
    p, d = prefill[:, None], decode[None, :]
    tokens = max(request.prompt_tokens - 1, 0)
    token_s, trips_s = _kv_link(snapshot, times, p, d, settings)
    last_chunk_s = min(tokens, settings.chunk_tokens) * token_s
    kv_there_s = times.wait_s[p] + np.maximum(times.prefill_s[p], tokens * token_s) + last_chunk_s + trips_s
    ttft_s = times.rtt_s[d] + np.maximum(kv_there_s, times.wait_s[d]) + times.token_s[d]
    decode_s = request.expected_tokens * times.token_s[d]
    total_s = ttft_s + decode_s - times.token_s[d]
    price = times.prefill_price[p] * times.prefill_s[p] + times.decode_price[d] * decode_s
    return _with_cost(ttft_s, total_s, price, request, settings)


def score_offload(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    start: IntArray,
    then: IntArray,
    settings: DecideSettings,
) -> Predicted:
    """Start at rows `start`, move after the first token to rows `then`; arrays [len(start), len(then)].

    Infinite where the request would be over before it had moved."""
    s, t = start[:, None], then[None, :]
    kv_token_s, trips_s = _kv_link(snapshot, times, s, t, settings)
    ttft_s = times.rtt_s[s] + times.wait_s[s] + times.prefill_s[s] + times.token_s[s]
    moving_s = np.maximum(request.prompt_tokens * kv_token_s + trips_s, times.wait_s[t])
    at_start = np.minimum(request.expected_tokens, 1.0 + np.floor(moving_s / times.token_s[s]))
    at_target = request.expected_tokens - at_start
    # The pause ships the last step and starts the run at the target.
    pause_s = kv_token_s + trips_s
    total_s = ttft_s + (at_start - 1.0) * times.token_s[s] + pause_s + at_target * times.token_s[t]
    price = (
        times.prefill_price[s] * times.prefill_s[s]
        + times.decode_price[s] * at_start * times.token_s[s]
        + times.decode_price[t] * at_target * times.token_s[t]
    )
    total_s = np.where(at_target > 0, total_s, np.inf)  # it would be over before it had moved
    return _with_cost(np.broadcast_to(ttft_s, total_s.shape), total_s, price, request, settings)


def _measured(values: FloatArray, default: float) -> FloatArray:
    good: BoolArray = np.isfinite(values) & (values > 0.0)
    return np.where(good, values, default)


def _kv_link(
    snapshot: Snapshot,
    times: NodeTimes,
    source: IntArray,
    target: IntArray,
    settings: DecideSettings,
) -> tuple[FloatArray, FloatArray]:
    """Seconds to ship KV of one token, and seconds of a transfer's round trips, between each pair of rows."""
    goodput = np.minimum(times.goodput_bytes_per_s[source], times.goodput_bytes_per_s[target])
    trips_s = settings.transfer_round_trips * (times.rtt_s[source] + times.rtt_s[target])
    return snapshot.kv_bytes_per_token[source] * CODEC_RATIO[settings.codec] / goodput, trips_s


def _with_cost(
    ttft_s: FloatArray, total_s: FloatArray, price: FloatArray, request: PlacementRequest, settings: DecideSettings
) -> Predicted:
    late_s = np.zeros_like(total_s)
    if request.ttft_s is not None:
        late_s = late_s + np.maximum(ttft_s - request.ttft_s, 0.0)
    if request.tpot_s is not None:
        wanted_s = request.tpot_s * max(request.expected_tokens - 1, 0)
        late_s = late_s + np.maximum(total_s - ttft_s - wanted_s, 0.0)
    if request.deadline_s is not None:
        late_s = late_s + np.maximum(total_s - request.deadline_s, 0.0)
    return Predicted(ttft_s=ttft_s, total_s=total_s, cost_s=total_s + price + settings.late_cost_ratio * late_s)
