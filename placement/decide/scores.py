"""Scores: predicted times and cost of each way to run a request, from measured speeds, load and links.

All arrays have the shape [n_nodes], or [n_prefill, n_decode] for pairs; times in seconds. A cost is the predicted
time to the last token, plus the policy's price for each second of engine time, plus what a missed latency wish
costs. The planner minimises it; it is not bounded and not a probability.

    single    rtt + wait + prefill + decode
    split     placement.decide.ship says when KV is at the target, then decode there
    offload   prefill and decode at the source while KV moves, a pause, then decode at the target
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.decide.filters import kv_pool_full
from placement.decide.settings import DecideSettings
from placement.decide.types import BoolArray, CodecTable, FloatArray, IntArray, PlacementRequest, PlanShape, Snapshot
from placement.policy.rules import Prices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """Predictions of one shape over nodes or pairs; arrays of one shape, seconds. Where KV moves: in codec number
    `codec` of the table, and the target computes `own_tokens` itself."""

    ttft_s: FloatArray
    total_s: FloatArray
    cost_s: FloatArray
    codec: IntArray | None = None
    own_tokens: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTimes:
    """What scores are made of, per node: each array of shape [n_nodes]."""

    rtt_s: FloatArray  # entry to node
    goodput_bytes_per_s: FloatArray  # entry to node
    wait_s: FloatArray  # until the request gets its turn
    cached_tokens: FloatArray  # of this prompt, at most all but one
    prefill_token_s: FloatArray  # prefill of a token at position 0
    prefill_growth_s: FloatArray  # and more for each position before it
    prefill_s: FloatArray  # of this prompt, without what is cached
    token_s: FloatArray  # one decode step of this request
    prefill_price: FloatArray
    decode_price: FloatArray
    codecs: CodecTable


def prefill_between(token_s: FloatArray, growth_s: FloatArray, start: FloatArray, stop: FloatArray) -> FloatArray:
    """Seconds to prefill positions [start, stop); 0 where that is empty. Attention looks at all tokens before."""
    stop = np.maximum(start, stop)
    return token_s * (stop - start) + growth_s * (stop**2 - start**2) / 2


def node_times(
    snapshot: Snapshot, request: PlacementRequest, prices: Prices, age_s: FloatArray, settings: DecideSettings
) -> NodeTimes:
    """Times per node; what is not measured takes the pessimistic defaults of the settings."""
    own = np.arange(snapshot.n_nodes) == snapshot.entry_row
    prefill_speed = _measured(snapshot.prefill_tokens_per_s, settings.prefill_tokens_per_s)
    decode_speed = _measured(snapshot.decode_tokens_per_s, settings.decode_tokens_per_s)
    rtt_s = np.where(own, 0.0, np.where(np.isfinite(snapshot.rtt_s), snapshot.rtt_s, settings.rtt_s))
    goodput = _measured(snapshot.goodput_bytes_per_s, settings.goodput_bytes_per_s)
    cached = np.clip(snapshot.cached_tokens, 0, request.prompt_tokens - 1).astype(np.float64)
    prefill_token_s, prefill_growth_s = 1.0 / prefill_speed, np.zeros(snapshot.n_nodes)
    if snapshot.prefill_token_s is not None and snapshot.prefill_growth_s is not None:
        known = snapshot.prefill_token_s > 0
        prefill_token_s = np.where(known, snapshot.prefill_token_s, prefill_token_s)
        prefill_growth_s = np.where(known, snapshot.prefill_growth_s, 0.0)
    whole = np.full(snapshot.n_nodes, float(request.prompt_tokens))
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
        cached_tokens=cached,
        prefill_token_s=prefill_token_s,
        prefill_growth_s=prefill_growth_s,
        prefill_s=prefill_between(prefill_token_s, prefill_growth_s, cached, whole),
        token_s=token_s,
        prefill_price=np.where(edge, prices.edge_prefill_per_s, prices.core_prefill_per_s),
        decode_price=np.where(edge, prices.edge_decode_per_s, prices.core_decode_per_s),
        codecs=snapshot.codecs or CodecTable.plain(snapshot.n_nodes),
    )


def score_single(times: NodeTimes, request: PlacementRequest, settings: DecideSettings) -> Predicted:
    """One node does all; arrays [n_nodes]."""
    ttft_s = times.rtt_s + times.wait_s + times.prefill_s + times.token_s
    decode_s = request.expected_tokens * times.token_s
    total_s = ttft_s + decode_s - times.token_s
    price = times.prefill_price * times.prefill_s + times.decode_price * decode_s
    return with_cost(ttft_s, total_s, price, request, settings)


def score_offload(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    start: IntArray,
    then: IntArray,
    settings: DecideSettings,
) -> Predicted:
    """Start at rows `start`, move after the first token to rows `then`; arrays [len(start), len(then)].

    Where the request would be over before it had moved: infinite, or what the start takes if the wish is for this."""
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
    # It would be over before it had moved: no way at all, unless that is what is asked for.
    stays_s = ttft_s + (request.expected_tokens - 1.0) * times.token_s[s]
    total_s = np.where(at_target > 0, total_s, stays_s if request.wish.shape is PlanShape.OFFLOAD else np.inf)
    return with_cost(np.broadcast_to(ttft_s, total_s.shape), total_s, price, request, settings)


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
    """Seconds to ship KV of one token in f16, and seconds of a transfer's round trips, between each pair of rows."""
    goodput, trips_s = link_between(times, source, target, settings)
    return snapshot.kv_bytes_per_token[source] / goodput, trips_s


def link_between(
    times: NodeTimes, source: IntArray, target: IntArray, settings: DecideSettings
) -> tuple[FloatArray, FloatArray]:
    """Goodput in bytes/s, and seconds of a transfer's round trips, between each pair of rows."""
    goodput = np.minimum(times.goodput_bytes_per_s[source], times.goodput_bytes_per_s[target])
    return goodput, settings.transfer_round_trips * (times.rtt_s[source] + times.rtt_s[target])


def with_cost(
    ttft_s: FloatArray, total_s: FloatArray, price: FloatArray, request: PlacementRequest, settings: DecideSettings
) -> Predicted:
    """Predictions with what is minimised: total time, price, and what missed wishes cost."""
    late_s = np.zeros_like(total_s)
    if request.ttft_s is not None:
        late_s = late_s + np.maximum(ttft_s - request.ttft_s, 0.0)
    if request.tpot_s is not None:
        wanted_s = request.tpot_s * max(request.expected_tokens - 1, 0)
        late_s = late_s + np.maximum(total_s - ttft_s - wanted_s, 0.0)
    if request.deadline_s is not None:
        late_s = late_s + np.maximum(total_s - request.deadline_s, 0.0)
    return Predicted(ttft_s=ttft_s, total_s=total_s, cost_s=total_s + price + settings.late_cost_ratio * late_s)
