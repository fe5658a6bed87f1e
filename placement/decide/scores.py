"""Scores: predicted times and cost of each way to run a request, from fitted step times, load and links.

All arrays have the shape [n_nodes], or one that broadcasts to [n_prefill, n_decode] for pairs; times in seconds. What
the planner minimises is a weighed sum of terms (placement.decide.score_terms): the predicted time to the last token,
the policy's price for each second of engine time, what a missed latency wish costs, and so on. It is not bounded and
not a probability.

    single    rtt + wait + prefill + decode
    split     placement.decide.ship says when KV is at the target, then decode there
    offload   prefill and decode at the source while KV moves, a pause, then decode at the target
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from placement.decide.compiled import Compiled, compiled
from placement.decide.filters import Filtered, hits
from placement.decide.plugins import ScoreView
from placement.decide.settings import DecideSettings
from placement.decide.types import CodecTable, FloatArray, IntArray, PlacementRequest, PlanShape, Snapshot
from placement.policy.rules import Prices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """Predictions of one shape over nodes or pairs; arrays of one shape, seconds. `prefill` and `decode`: rows of the
    two parts, broadcasting to that shape; None: all nodes, in order. Where KV moves: in codec number `codec` of the
    table, and the target computes `own_tokens` itself. `cost_s` is 0 until `with_cost`."""

    ttft_s: FloatArray
    total_s: FloatArray
    price_s: FloatArray | None
    prefill: IntArray | None = None
    decode: IntArray | None = None
    cost_s: FloatArray | None = None
    codec: IntArray | None = None
    own_tokens: IntArray | None = None

    @property
    def cost(self) -> FloatArray:
        """The cost, once it was worked out."""
        assert self.cost_s is not None, "with_cost comes first"
        return self.cost_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTimes:
    """What scores are made of, per node: each array of shape [n_nodes]."""

    rtt_s: FloatArray  # entry to node
    goodput_bytes_per_s: FloatArray  # entry to node
    wait_s: FloatArray  # until the request gets its turn
    cached_tokens: FloatArray  # of this prompt, at most all but one
    prefill_token_s: FloatArray  # prefill of a token at position 0, its share of a full chunk's step included
    prefill_growth_s: FloatArray  # and more for each position before it
    prefill_s: FloatArray  # of this prompt in whole chunks, without what is cached
    first_s: FloatArray  # from the end of the prefill to the first token
    token_s: FloatArray  # one decode step of this request
    error_ratio: FloatArray  # how far off predictions usually are; 1: not known
    prices: Prices
    tier_edge: FloatArray  # 1.0 or 0.0
    codecs: CodecTable

    @property
    def prefill_price(self) -> FloatArray:
        """Of a second of prefill."""
        p = self.prices
        return p.core_prefill_per_s + (p.edge_prefill_per_s - p.core_prefill_per_s) * self.tier_edge

    @property
    def decode_price(self) -> FloatArray:
        """Of a second of decoding."""
        p = self.prices
        return p.core_decode_per_s + (p.edge_decode_per_s - p.core_decode_per_s) * self.tier_edge


def prefill_between(token_s: FloatArray, growth_s: FloatArray, start: FloatArray, stop: FloatArray) -> FloatArray:
    """Seconds to prefill positions [start, stop); 0 where that is empty. Attention looks at all tokens before."""
    stop = np.maximum(start, stop)
    return token_s * (stop - start) + growth_s * (stop**2 - start**2) / 2


def node_times(
    snapshot: Snapshot, request: PlacementRequest, prices: Prices, filtered: Filtered, settings: DecideSettings
) -> NodeTimes:
    """Times per node. Each is a sum of a few columns that were worked out with the snapshot."""
    columns, n = compiled(snapshot, settings), float(request.prompt_tokens)
    token_s = columns.step_s + columns.step_context_s * (n + request.expected_tokens / 2)
    chunk_share_s = columns.chunk_s / columns.chunk_tokens
    prefill_s = columns.token_s * n + np.ceil(n / columns.chunk_tokens) * columns.chunk_s
    if n > 0:
        prefill_s += columns.growth_s * (n * n / 2)
    cached = np.zeros(snapshot.n_nodes)
    for row, tokens in hits(snapshot, request).items():
        cached[row] = tokens
        prefill_s[row] = _prefill_after_hit(columns, row, n, tokens)
    turn_ratio, wait_s = columns.turn_ratio, columns.queue_s
    if filtered.full.any():
        turn_ratio = np.where(filtered.full, columns.full_turn_ratio, turn_ratio)
        wait_s = np.where(filtered.full, wait_s + columns.full_wait_s, wait_s)
    busy = filtered.age_s > settings.busy_after_s  # what is not heard of counts as busy, once for both reasons
    if busy.any():
        already = np.where(filtered.full, columns.full_wait_s, 0.0)
        wait_s = np.where(busy, wait_s + settings.busy_wait_s - already, wait_s)
    return NodeTimes(
        rtt_s=columns.rtt_s,
        goodput_bytes_per_s=columns.goodput_bytes_per_s,
        wait_s=wait_s + turn_ratio * token_s * request.expected_tokens,
        cached_tokens=cached,
        prefill_token_s=columns.token_s + chunk_share_s,
        prefill_growth_s=columns.growth_s,
        prefill_s=prefill_s,
        first_s=token_s * (1.0 - columns.fitted),
        token_s=token_s,
        error_ratio=columns.error_ratio,
        prices=prices,
        tier_edge=snapshot.tier_edge.astype(np.float64),
        codecs=snapshot.codecs or CodecTable.plain(snapshot.n_nodes),
    )


def _prefill_after_hit(columns: Compiled, row: int, n: float, cached: int) -> float:
    steps = np.ceil((n - cached) / columns.chunk_tokens[row])
    linear_s = columns.token_s[row] * (n - cached) + columns.growth_s[row] * (n * n - cached * cached) / 2
    return float(linear_s + steps * columns.chunk_s[row])


def score_single(times: NodeTimes, request: PlacementRequest) -> Predicted:
    """One node does all; arrays [n_nodes]."""
    ttft_s = times.rtt_s + times.wait_s + times.prefill_s + times.first_s
    decode_s = request.expected_tokens * times.token_s
    total_s = ttft_s + decode_s - times.token_s
    return Predicted(ttft_s=ttft_s, total_s=total_s, price_s=_price(times, times.prefill_s, decode_s))


def _price(times: NodeTimes, prefill_s: FloatArray, decode_s: FloatArray) -> FloatArray | None:
    if times.prices == _FREE:
        return None
    return times.prefill_price * prefill_s + times.decode_price * decode_s


_FREE = Prices()


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
    ttft_s = times.rtt_s[s] + times.wait_s[s] + times.prefill_s[s] + times.first_s[s]
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
    ttft_s = np.broadcast_to(ttft_s, total_s.shape)
    return Predicted(ttft_s=ttft_s, total_s=total_s, price_s=price, prefill=s, decode=t)


def least_offload(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    start: IntArray,
    then: IntArray,
    settings: DecideSettings,
) -> Predicted:
    """Times that `score_offload` is never below, the wish for one aside: every token at the faster of the two, and the
    pause; arrays [len(start), len(then)]. Cheap."""
    s, t = start[:, None], then[None, :]
    kv_token_s, trips_s = _kv_link(snapshot, times, s, t, settings)
    ttft_s = times.rtt_s[s] + times.wait_s[s] + times.prefill_s[s] + times.first_s[s]
    fastest_s = np.minimum(times.token_s[s], times.token_s[t])
    total_s = ttft_s + (request.expected_tokens - 1.0) * fastest_s + kv_token_s + trips_s
    source_price, target_price = (times.decode_price[i] * times.token_s[i] for i in (s, t))
    price = times.prefill_price[s] * times.prefill_s[s]
    price = price + request.expected_tokens * np.minimum(source_price, target_price)
    ttft_s = np.broadcast_to(ttft_s, total_s.shape)
    return Predicted(ttft_s=ttft_s, total_s=total_s, price_s=price, prefill=s, decode=t)


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


def with_cost(ways: Predicted, view: ScoreView) -> Predicted:
    """Predictions with what is minimised."""
    cost_s: FloatArray | None = None
    for weighed in view.settings.scores:
        term = weighed.score.cost_s(ways, view) if weighed.weight else None
        if term is None:
            continue
        if weighed.weight != 1.0:
            term = weighed.weight * term
        cost_s = term if cost_s is None else cost_s + term
    if cost_s is None:
        cost_s = np.zeros_like(ways.total_s)
    if ways.prefill is not None:  # of pairs, some are none
        cost_s = np.where(np.isfinite(ways.total_s), cost_s, np.inf)
    return replace(ways, cost_s=cost_s)
