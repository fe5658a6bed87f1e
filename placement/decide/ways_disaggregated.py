"""Prefill and decode apart, inside the core: which nodes may do which half, and when a pair pays.

A pair is one core node that prefills and another that decodes, at least one of them with that role alone: two nodes
that do both gain nothing by it. What it costs is the KV transfer, of which the prefill hides all but the last chunk
(max(prefill, transfer) + last chunk). What it spares is interference: a prefill at a node that also decodes slows
every request that decodes there for as long as it takes, and that is counted where nodes have roles (DistServe,
arXiv 2401.09670). How much a node's own decoding is slowed now is in its measured decode speed.
"""

from __future__ import annotations

import numpy as np

from mesh.node.serving_role import MOST_PREFILL_AT_DECODE_TOKENS
from placement.decide.scores import NodeTimes, Predicted, link_between
from placement.decide.settings import DecideSettings
from placement.decide.types import BoolArray, FloatArray, IntArray, PlacementRequest, Snapshot


def does_all(snapshot: Snapshot, request: PlacementRequest) -> BoolArray:
    """Nodes whose role lets them run the whole request alone, shape [n_nodes]: a decode node can if next to nothing
    is to be prefilled."""
    if request.brings_kv or request.prompt_tokens <= MOST_PREFILL_AT_DECODE_TOKENS:
        return snapshot.decodes
    return snapshot.decodes & snapshot.prefills


def disaggregated_rows(snapshot: Snapshot, *, prefill: IntArray, decode: IntArray) -> tuple[IntArray, IntArray]:
    """Of the rows that may run a request and those that KV may move to, those that can be halves of a pair. Both are
    empty unless there is a pair of two nodes, one of them with a role of its own."""
    none = np.zeros(0, dtype=np.int64)
    if not (len(prefill) and len(decode)) or snapshot.all_do_both:
        return none, none
    first = prefill[snapshot.prefills[prefill]]
    then = decode[snapshot.decodes[decode] & ~snapshot.tier_edge[decode]]
    if not (len(first) and len(then) and _apart(snapshot, first, then).any()):
        return none, none
    return first, then


def _apart(snapshot: Snapshot, first: IntArray, then: IntArray) -> BoolArray:
    """Which pairs are two nodes with at least one role between them, shape [len(first), len(then)]."""
    p, d = first[:, None], then[None, :]
    apart: BoolArray = (p != d) & ~(snapshot.decodes[p] & snapshot.prefills[d])
    return apart


def score_disaggregated(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    prefill: IntArray,
    decode: IntArray,
    settings: DecideSettings,
) -> Predicted:
    """Prefill at rows `prefill`, KV in chunks to rows `decode`; arrays [len(prefill), len(decode)], infinite for what
    is no pair. The decode node makes room before the prefill starts, so the two waits add up."""
    p, d = prefill[:, None], decode[None, :]
    tokens = max(request.prompt_tokens - 1, 0)
    token_s, trips_s = _link(snapshot, times, p, d, settings)
    last_chunk_s = min(tokens, settings.chunk_tokens) * token_s
    kv_there_s = times.wait_s[d] + times.wait_s[p] + np.maximum(times.prefill_s[p], tokens * token_s)
    ttft_s = times.rtt_s[d] + kv_there_s + last_chunk_s + trips_s + times.token_s[d]
    decode_s = request.expected_tokens * times.token_s[d]
    total_s = np.where(_apart(snapshot, prefill, decode), ttft_s + decode_s - times.token_s[d], np.inf)
    price = times.prefill_price[p] * times.prefill_s[p] + times.decode_price[d] * decode_s
    ttft_s = np.broadcast_to(ttft_s, total_s.shape)
    return Predicted(ttft_s=ttft_s, total_s=total_s, price_s=price, prefill=p, decode=d)


def _link(
    snapshot: Snapshot, times: NodeTimes, source: IntArray, target: IntArray, settings: DecideSettings
) -> tuple[FloatArray, FloatArray]:
    """Seconds to ship KV of one token without loss, and of a transfer's round trips. The entry measures its own links
    only: what it knows of those between two others is that nodes of one site are near each other."""
    goodput, trips_s = link_between(times, source, target, settings)
    near = np.array([[snapshot.places[p].site == snapshot.places[d].site for d in target[0]] for p in source[:, 0]])
    goodput = np.where(near, np.maximum(goodput, settings.same_site_goodput_bytes_per_s), goodput)
    trips_s = np.where(near, np.minimum(trips_s, settings.transfer_round_trips * settings.same_site_rtt_s), trips_s)
    return snapshot.kv_bytes_per_token[source] / goodput, trips_s
