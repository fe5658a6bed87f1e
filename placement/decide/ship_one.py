"""The arithmetic of placement.decide.ship for one source and one target, in plain numbers: an array of one costs more
to handle than to compute. A property test holds the two together. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh.kv.hashing import BLOCK_TOKENS
from placement.decide.scores import NodeTimes
from placement.decide.settings import DecideSettings
from placement.decide.types import PlacementRequest, Snapshot

_REFINEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """When KV of all but the last prompt token is at the target with one codec, seconds from now: all of it shipped, or
    the target computing positions [0, own_tokens) meanwhile; infinite where that way is closed."""

    ship_s: float
    both_s: float
    own_tokens: int


def ship_one(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    source: int,
    target: int,
    settings: DecideSettings,
) -> list[Shipped]:
    """One for each codec of `times.codecs`."""
    goodput = min(float(times.goodput_bytes_per_s[source]), float(times.goodput_bytes_per_s[target]))
    trips_s = settings.transfer_round_trips * (float(times.rtt_s[source]) + float(times.rtt_s[target]))
    ends = [
        _End(
            wait_s=float(times.wait_s[row]),
            cached=float(times.cached_tokens[row]),
            token_s=float(times.prefill_token_s[row]),
            growth_s=float(times.prefill_growth_s[row]),
        )
        for row in (source, target)
    ]
    token_bytes, codecs = float(snapshot.kv_bytes_per_token[source]), times.codecs
    found = []
    for i in range(len(codecs.names)):
        encode_s, decode_s = float(codecs.encode_s[source, i]), float(codecs.decode_s[target, i])
        if not (math.isfinite(encode_s) and math.isfinite(decode_s)):
            found.append(Shipped(ship_s=math.inf, both_s=math.inf, own_tokens=0))
            continue
        pair = _Pair(
            n=float(max(request.prompt_tokens - 1, 0)),
            link_s=token_bytes * float(codecs.bytes_ratio[i]) / goodput,
            trips_s=trips_s,
            goodbye_s=trips_s * settings.goodbye_round_trips / settings.transfer_round_trips,
            encode_s=encode_s,
            decode_s=decode_s,
            source=ends[0],
            target=ends[1],
            chunk=settings.chunk_tokens,
        )
        found.append(pair.shipped(settings.least_own_tokens))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A node of the pair."""

    wait_s: float
    cached: float
    token_s: float
    growth_s: float

    def prefill_s(self, start: float, stop: float) -> float:
        stop = max(start, stop)
        return self.token_s * (stop - start) + self.growth_s * (stop**2 - start**2) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """See placement.decide.ship._Pair, whose formulae these are."""

    n: float
    link_s: float
    trips_s: float
    goodbye_s: float
    encode_s: float
    decode_s: float
    source: _End
    target: _End
    chunk: int

    def shipped(self, least_own_tokens: int) -> Shipped:
        least = math.floor(self.target.cached / BLOCK_TOKENS) * BLOCK_TOKENS
        point = self._meeting_point(float(least))
        helps = point - least >= least_own_tokens
        return Shipped(
            ship_s=max(self._tail_s(least), self.target.wait_s),
            both_s=max(self._tail_s(point), self._own_s(point)) if helps else math.inf,
            own_tokens=int(point) if helps else 0,
        )

    def _ready_s(self, position: float) -> float:
        return self.source.wait_s + self.source.prefill_s(self.source.cached, min(position, self.n))

    def _tail_s(self, start: float) -> float:
        tokens = self.n - start
        chunk = min(tokens, self.chunk)
        slowest_s = max(self.link_s, self.encode_s, self.decode_s)
        streamed_s = self._ready_s(start + chunk) + chunk * self.encode_s + tokens * slowest_s
        computed = max(self.n - max(start, self.source.cached), 0.0)
        last_s = self._ready_s(self.n) + computed * self.encode_s + chunk * self.link_s
        return max(streamed_s, last_s) + chunk * self.decode_s + self.trips_s

    def _own_s(self, stop: float) -> float:
        prefill_s = self.target.prefill_s(self.target.cached, stop)
        decode_s = (self.n - stop) * self.decode_s if prefill_s > 0 else 0.0
        return self.target.wait_s + prefill_s + decode_s + self.goodbye_s

    def _meeting_point(self, least: float) -> float:
        most = max(0.0, math.floor(self.n / BLOCK_TOKENS - 1) * BLOCK_TOKENS)
        slowest_s = max(self.link_s, self.encode_s, self.decode_s)
        a2 = self.target.growth_s / 2
        begun = self.target.wait_s - self.target.prefill_s(0.0, self.target.cached) + self.goodbye_s
        own0 = begun + self.n * self.decode_s
        slope = self.target.token_s - self.decode_s
        uncached_s = (self.n - self.source.cached) * self.encode_s
        point = least
        for _ in range(_REFINEMENTS):
            chunk = min(self.n - point, self.chunk)
            fixed_s = chunk * (self.encode_s + self.decode_s) + self.trips_s
            last_s = self._ready_s(self.n) + chunk * self.link_s + fixed_s
            last = min(
                _root(a2, slope, own0 - last_s - uncached_s),
                _root(a2, slope + self.encode_s, own0 - last_s - self.n * self.encode_s),
            )
            streamed_s = self._ready_s(point + chunk) + fixed_s + self.n * slowest_s
            point = max(last, _root(a2, slope + slowest_s, own0 - streamed_s))
            point = min(max(math.floor(point / BLOCK_TOKENS) * BLOCK_TOKENS, least), max(least, most))
        return point


def _root(a2: float, a1: float, a0: float) -> float:
    if a0 >= 0:
        return 0.0
    divisor = a1 + math.sqrt(max(a1**2 - 4 * a2 * a0, 0.0))
    return -2 * a0 / divisor if divisor > 0 else 0.0
