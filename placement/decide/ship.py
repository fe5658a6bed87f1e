"""Ship KV, compute it where it is needed, or both at once: when would it be there?

For each codec that policy and both nodes allow, two predictions: all of it is shipped; or the target prefills
positions [0, p) while [p, n) comes, with p such that both end together (after arXiv 2603.28018). The source computes
every position in either case, since KV of a token depends on all before it; what it has cached costs it nothing.

    ready(q)  = wait + prefill of [cached, q) at the source
    tail(p)   = max(ready(p + chunk) + (n - p) * slowest of (encode, link, decode), ready(n) + last chunk) + round trips
    own(p)    = wait + prefill of [cached, p) + decoding of what comes, on the same CPU + the goodbye's round trips
    there(p)  = max(tail(p), own(p))

Pure; arrays over [codecs, sources, targets].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mesh.kv.hashing import BLOCK_TOKENS
from placement.decide.scores import NodeTimes, Predicted, link_between, prefill_between
from placement.decide.settings import DecideSettings
from placement.decide.types import BoolArray, FloatArray, IntArray, PlacementRequest, Shipment, Snapshot

_REFINEMENTS = 3  # of p; each shrinks the error by the ratio of the two prefill speeds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shipping:
    """When KV of all but the last prompt token is at the target, seconds from now; infinite where that way is closed.
    Arrays [n_codecs, n_sources, n_targets]; `own_tokens` is where the target's own prefill ends (both at once)."""

    ship_s: FloatArray
    both_s: FloatArray
    own_tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pair:
    """Facts of every codec, source and target; each broadcasts to [n_codecs, n_sources, n_targets]."""

    n: float  # tokens whose KV is to be there
    token_link_s: FloatArray
    trips_s: FloatArray  # all of them
    goodbye_s: FloatArray  # those after the last byte, among them
    encode_s: FloatArray
    decode_s: FloatArray
    source_wait_s: FloatArray
    source_cached: FloatArray
    source_token_s: FloatArray
    source_growth_s: FloatArray
    target_wait_s: FloatArray
    target_cached: FloatArray
    target_token_s: FloatArray
    target_growth_s: FloatArray
    chunk_tokens: int

    def ready_s(self, position: FloatArray) -> FloatArray:
        """When the source has KV of positions below this."""
        stop = np.minimum(position, self.n)
        return self.source_wait_s + prefill_between(self.source_token_s, self.source_growth_s, self.source_cached, stop)

    def tail_s(self, start: FloatArray) -> FloatArray:
        """When KV of [start, n) is at the target."""
        tokens = self.n - start
        chunk = np.minimum(tokens, self.chunk_tokens)
        slowest_s = np.maximum(np.maximum(self.token_link_s, self.encode_s), self.decode_s)
        streamed_s = self.ready_s(start + chunk) + chunk * self.encode_s + tokens * slowest_s
        computed = np.maximum(self.n - np.maximum(start, self.source_cached), 0.0)  # encoded beside their prefill
        last_s = self.ready_s(np.asarray(self.n)) + computed * self.encode_s + chunk * self.token_link_s
        return np.maximum(streamed_s, last_s) + chunk * self.decode_s + self.trips_s

    def own_s(self, stop: FloatArray) -> FloatArray:
        """When the target has computed [cached, stop) itself, decoding what comes besides."""
        prefill_s = prefill_between(self.target_token_s, self.target_growth_s, self.target_cached, stop)
        decode_s = np.where(prefill_s > 0, (self.n - stop) * self.decode_s, 0.0)
        return self.target_wait_s + prefill_s + decode_s + self.goodbye_s

    def meeting_point(self) -> FloatArray:
        """p at which both end together, a multiple of a block; the target's cached prefix where none helps."""
        least = np.floor(self.target_cached / BLOCK_TOKENS) * BLOCK_TOKENS
        most = max(0.0, np.floor(self.n / BLOCK_TOKENS - 1) * BLOCK_TOKENS)  # a block at least is shipped
        slowest_s = np.maximum(np.maximum(self.token_link_s, self.encode_s), self.decode_s)
        # own(p) - tail(p) as a2 p^2 + a1 p + a0, the source's part taken at the last guess of p.
        a2 = self.target_growth_s / 2
        nothing = np.zeros_like(self.target_cached)
        cached_s = prefill_between(self.target_token_s, self.target_growth_s, nothing, self.target_cached)
        begun = self.target_wait_s - cached_s + self.goodbye_s
        point = least
        for _ in range(_REFINEMENTS):
            chunk = np.minimum(self.n - point, self.chunk_tokens)
            fixed_s = chunk * (self.encode_s + self.decode_s) + self.trips_s
            own0 = begun + self.n * self.decode_s
            slope = self.target_token_s - self.decode_s
            last_s = self.ready_s(np.asarray(self.n)) + chunk * self.token_link_s + fixed_s
            # What is encoded beside its prefill: all that the source has not cached, less what the target computes.
            uncached_s, all_s = (self.n - self.source_cached) * self.encode_s, self.n * self.encode_s
            last = np.minimum(
                _root(a2, slope, own0 - last_s - uncached_s), _root(a2, slope + self.encode_s, own0 - last_s - all_s)
            )
            streamed_s = self.ready_s(point + chunk) + fixed_s + self.n * slowest_s
            point = np.maximum(last, _root(a2, slope + slowest_s, own0 - streamed_s))
            point = np.clip(np.floor(point / BLOCK_TOKENS) * BLOCK_TOKENS, least, np.maximum(least, most))
        return point


def _root(a2: FloatArray, a1: FloatArray, a0: FloatArray) -> FloatArray:
    """The least p >= 0 from which a2 p^2 + a1 p + a0 >= 0; 0 where that is so at 0, or where there is no such p."""
    under = np.sqrt(np.maximum(a1**2 - 4 * a2 * a0, 0.0))
    divisor = a1 + under
    return np.where((a0 < 0) & (divisor > 0), -2 * a0 / np.where(divisor > 0, divisor, 1.0), 0.0)


def shipping(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    source: IntArray,
    target: IntArray,
    settings: DecideSettings,
) -> Shipping:
    """Predictions for every codec of `times.codecs` from each row of `source` to each of `target`."""
    pair = _pair(snapshot, times, request, source, target, settings)
    can_encode, can_decode = (np.isfinite(s).T for s in (times.codecs.encode_s, times.codecs.decode_s))
    able = can_encode[:, source][:, :, None] & can_decode[:, target][:, None, :]
    least = np.floor(pair.target_cached / BLOCK_TOKENS) * BLOCK_TOKENS
    shape = np.broadcast_shapes(pair.token_link_s.shape, able.shape)
    ship_s = np.maximum(pair.tail_s(least), pair.target_wait_s)
    point = pair.meeting_point()
    both_s = np.maximum(pair.tail_s(point), pair.own_s(point))
    helps = able & (point - least >= settings.least_own_tokens)
    return Shipping(
        ship_s=np.broadcast_to(np.where(able, ship_s, np.inf), shape),
        both_s=np.broadcast_to(np.where(helps, both_s, np.inf), shape),
        own_tokens=np.broadcast_to(np.where(helps, point, 0), shape).astype(np.int64),
    )


def _pair(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    source: IntArray,
    target: IntArray,
    settings: DecideSettings,
) -> _Pair:
    s, t, codecs = source[:, None], target[None, :], times.codecs
    goodput, trips_s = link_between(times, s, t, settings)
    token_bytes = snapshot.kv_bytes_per_token[s] * codecs.bytes_ratio[:, None, None]
    return _Pair(
        n=float(max(request.prompt_tokens - 1, 0)),
        token_link_s=token_bytes / goodput,
        trips_s=trips_s,
        goodbye_s=trips_s * settings.goodbye_round_trips / settings.transfer_round_trips,
        encode_s=_known(codecs.encode_s).T[:, source][:, :, None],
        decode_s=_known(codecs.decode_s).T[:, target][:, None, :],
        source_wait_s=times.wait_s[s],
        source_cached=times.cached_tokens[s],
        source_token_s=times.prefill_token_s[s],
        source_growth_s=times.prefill_growth_s[s],
        target_wait_s=times.wait_s[t],
        target_cached=times.cached_tokens[t],
        target_token_s=times.prefill_token_s[t],
        target_growth_s=times.prefill_growth_s[t],
        chunk_tokens=settings.chunk_tokens,
    )


def _known(seconds: FloatArray) -> FloatArray:
    """Zeros where a node lacks a codec: such a way is closed, whatever it would take."""
    return np.where(np.isfinite(seconds), seconds, 0.0)


def allowed_codecs(times: NodeTimes, request: PlacementRequest, max_loss_ratio: float) -> BoolArray:
    """Codecs that lose no more than policy accepts, and that the wish asks for; shape [n_codecs]."""
    allowed: BoolArray = times.codecs.loss_ratio <= max_loss_ratio
    if request.wish.codec:
        allowed = allowed & np.array([name == request.wish.codec for name in times.codecs.names], dtype=np.bool_)
    return allowed


def score_split(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    prefill: IntArray,
    decode: IntArray,
    settings: DecideSettings,
    *,
    max_loss_ratio: float,
) -> Predicted:
    """Prefill at rows `prefill`, KV in the best allowed way to rows `decode`; arrays [len(prefill), len(decode)].

    Of ways that are about as fast, the codec that loses less is taken, and shipping all over computing a part.
    Infinite where no codec is allowed."""
    allowed = np.flatnonzero(allowed_codecs(times, request, max_loss_ratio))
    if not len(allowed):
        never = np.full((len(prefill), len(decode)), np.inf)
        return Predicted(ttft_s=never, total_s=never, price_s=None, prefill=prefill[:, None], decode=decode[None, :])
    times = replace(times, codecs=times.codecs.only(allowed))
    ways = shipping(snapshot, times, request, prefill, decode, settings)
    there_s = np.stack((ways.ship_s, ways.both_s), axis=1)  # [codecs, ship or both, sources, targets]
    for shipment, at in ((Shipment.SHIP, 1), (Shipment.BOTH, 0)):
        if request.wish.shipment is shipment:
            there_s[:, at] = np.inf
    there_s = there_s.reshape(-1, *there_s.shape[2:])
    best_s = there_s.min(axis=0)
    # The first that is near the best: codecs are in order of loss, and computing a part has to be worth its work.
    weighed_s = there_s * np.where(np.arange(len(there_s)) % 2 == 1, 1.0 + settings.both_gain_ratio, 1.0)[:, None, None]
    chosen = np.argmax(weighed_s <= weighed_s.min(axis=0) * (1.0 + settings.near_best_ratio), axis=0)
    possible = np.isfinite(best_s)
    kv_there_s = np.where(possible, np.take_along_axis(there_s, chosen[None], axis=0)[0], 0.0)
    codec, both = chosen // 2, chosen % 2 == 1
    own = np.where(both, np.take_along_axis(ways.own_tokens, codec[None], axis=0)[0], 0)

    d = decode[None, :]
    ttft_s = times.rtt_s[d] + kv_there_s + times.token_s[d]
    decode_s = request.expected_tokens * times.token_s[d]
    total_s = ttft_s + decode_s - times.token_s[d]
    own_s = prefill_between(times.prefill_token_s[d], times.prefill_growth_s[d], times.cached_tokens[d], own)
    price = times.prefill_price[prefill[:, None]] * times.prefill_s[prefill[:, None]]
    price = price + times.decode_price[d] * decode_s + times.prefill_price[d] * np.where(both, own_s, 0.0)
    return Predicted(
        ttft_s=ttft_s,
        total_s=np.where(possible, total_s, np.inf),
        price_s=price,
        prefill=prefill[:, None],
        decode=d,
        codec=allowed[codec],
        own_tokens=own,
    )


def least_split(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    prefill: IntArray,
    decode: IntArray,
    settings: DecideSettings,
    *,
    max_loss_ratio: float,
) -> Predicted:
    """Times that `score_split` is never below; arrays [len(prefill), len(decode)]. Cheap.

    The source has computed every position before KV is complete, whatever way is taken; of what the target has not
    cached, tokens either cross the link, in the smallest codec allowed, or are computed there, both at once at best."""
    ratios = times.codecs.bytes_ratio[allowed_codecs(times, request, max_loss_ratio)]
    s, d = prefill[:, None], decode[None, :]
    if not len(ratios):
        never = np.full((len(prefill), len(decode)), np.inf)
        return Predicted(ttft_s=never, total_s=never, price_s=None, prefill=s, decode=d)
    goodput, trips_s = link_between(times, s, d, settings)
    n = float(max(request.prompt_tokens - 1, 0))
    link_s = snapshot.kv_bytes_per_token[s] * float(ratios.min()) / goodput
    own_s = times.prefill_token_s[d]
    ready_s = times.wait_s[s] + prefill_between(
        times.prefill_token_s[s], times.prefill_growth_s[s], times.cached_tokens[s], np.asarray(n)
    )
    left = np.maximum(n - times.cached_tokens[d], 0.0)
    moved_s = left * (link_s * own_s) / (link_s + own_s)
    there_s = np.maximum(ready_s, moved_s) + trips_s * (settings.goodbye_round_trips / settings.transfer_round_trips)
    there_s = np.maximum(there_s, times.wait_s[d])
    decode_s = request.expected_tokens * times.token_s[d]
    ttft_s = times.rtt_s[d] + there_s + times.token_s[d]
    price = times.prefill_price[s] * times.prefill_s[s] + times.decode_price[d] * decode_s
    total_s = ttft_s + decode_s - times.token_s[d]
    return Predicted(ttft_s=ttft_s, total_s=total_s, price_s=price, prefill=s, decode=d)
