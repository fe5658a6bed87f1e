"""The ways in which a set of nodes can run a request: single nodes, and pairs with a KV move between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mesh.identity.place import Place
from placement.decide.scores import NodeTimes, Predicted, score_offload, score_single
from placement.decide.settings import DecideSettings
from placement.decide.ship import score_split
from placement.decide.types import BoolArray, Candidate, FloatArray, IntArray, PlacementRequest, PlanShape, Snapshot
from placement.decide.ways_disaggregated import (
    disaggregated_rows,
    does_all,
    interference_s,
    score_disaggregated,
    with_harm,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """Rows that may play each part, as row numbers. Pairs need both of their parts."""

    local: IntArray
    core: IntArray
    split: tuple[IntArray, IntArray]  # prefill, decode
    offload: tuple[IntArray, IntArray]  # start, then
    disaggregated: tuple[IntArray, IntArray]  # prefill, decode; see placement.decide.ways_disaggregated

    def nodes(self, n_nodes: int) -> BoolArray:
        """Nodes that play a part in some way, shape [n_nodes]."""
        part = np.zeros(n_nodes, dtype=np.bool_)
        part[self.local] = part[self.core] = True
        for first, then in (self.split, self.offload, self.disaggregated):
            if len(first) and len(then):
                part[first] = part[then] = True
        return part


def find_ways(
    snapshot: Snapshot, request: PlacementRequest, *, run: BoolArray, wished: BoolArray, kv_allowed: BoolArray
) -> Ways:
    """Ways over the nodes of `run`, ending at nodes of `wished`, moving KV only to nodes of `kv_allowed`.

    An edge entry pairs the core with its own engine only; it has no link to other sites."""
    edge, shape = snapshot.tier_edge, request.wish.shape
    paired = edge.copy()
    if snapshot.entry_row >= 0 and edge[snapshot.entry_row]:
        paired &= np.arange(snapshot.n_nodes) == snapshot.entry_row
    movable = run & kv_allowed & wished if request.prompt_tokens > 1 else np.zeros_like(run)

    def rows(mask: BoolArray, *shapes: PlanShape) -> IntArray:
        return np.flatnonzero(mask) if shape in (None, *shapes) else np.zeros(0, dtype=np.int64)

    return Ways(
        local=rows(run & wished & edge, PlanShape.LOCAL),
        core=rows(run & wished & ~edge & does_all(snapshot, request), PlanShape.CORE),
        split=(rows(run & ~edge & snapshot.prefills, PlanShape.SPLIT), rows(movable & paired, PlanShape.SPLIT)),
        offload=(rows(run & paired, PlanShape.OFFLOAD), rows(movable & ~edge & snapshot.decodes, PlanShape.OFFLOAD)),
        disaggregated=disaggregated_rows(
            snapshot, prefill=rows(run & ~edge, PlanShape.DISAGGREGATED), decode=rows(movable, PlanShape.DISAGGREGATED)
        ),
    )


def rank(
    ways: Ways,
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    settings: DecideSettings,
    tie_rank: IntArray,
    *,
    max_loss_ratio: float,
) -> list[Candidate]:
    """Scored candidates, best first; the best few of each shape. `tie_rank` [n_nodes] orders equals,
    `max_loss_ratio` is what a codec may lose."""
    harm_s = interference_s(snapshot, times, settings)
    single = with_harm(score_single(times, request, settings), harm_s)
    found = [
        *_best_singles(PlanShape.LOCAL, ways.local, single, snapshot, settings, tie_rank),
        *_best_singles(PlanShape.CORE, ways.core, single, snapshot, settings, tie_rank),
    ]
    for shape, (first, then), score in (
        (PlanShape.SPLIT, ways.split, partial(score_split, max_loss_ratio=max_loss_ratio)),
        (PlanShape.OFFLOAD, ways.offload, score_offload),
        (PlanShape.DISAGGREGATED, ways.disaggregated, score_disaggregated),
    ):
        if len(first) and len(then):
            first = _least(first, times.wait_s + times.prefill_s, tie_rank, settings.prefill_nodes)
            then = _least(then, _decode_guess_s(snapshot, times, request), tie_rank, settings.decode_nodes)
            predicted = with_harm(score(snapshot, times, request, first, then, settings), harm_s[first][:, None])
            names = times.codecs.names
            found.extend(_best_pairs(shape, first, then, predicted, snapshot, settings, tie_rank, names))

    def order(place: Place) -> int:
        return int(tie_rank[snapshot.row_of(place.node_id)])

    found.sort(key=lambda c: (c.cost_s, c.shape.value, order(c.decode), order(c.prefill)))
    return found


def _least(rows: IntArray, cost: FloatArray, tie_rank: IntArray, count: int) -> IntArray:
    """The `count` of `rows` that cost least, least first; equals in the order of `tie_rank`. `cost` [n_nodes]."""
    costs = cost[rows]
    if len(rows) > 4 * count:  # sorting is the dear part: leave out what cannot be among them
        near = costs <= np.partition(costs, count - 1)[count - 1]
        rows, costs = rows[near], costs[near]
    return rows[np.lexsort((tie_rank[rows], costs))[:count]]


def _decode_guess_s(snapshot: Snapshot, times: NodeTimes, request: PlacementRequest) -> FloatArray:
    """About what decoding there takes, KV in f16 over the entry's link included; tells which nodes are worth a closer
    look, shape [n_nodes]."""
    shipping_s = request.prompt_tokens * snapshot.kv_bytes_per_token / times.goodput_bytes_per_s
    return times.rtt_s + times.wait_s + request.expected_tokens * times.token_s + shipping_s


def _best_singles(
    shape: PlanShape,
    rows: IntArray,
    single: Predicted,
    snapshot: Snapshot,
    settings: DecideSettings,
    tie_rank: IntArray,
) -> Iterator[Candidate]:
    for i in _least(rows, single.cost_s, tie_rank, settings.candidates_per_shape):
        yield _candidate(shape, snapshot, int(i), int(i), single, (i,))


def _best_pairs(
    shape: PlanShape,
    first: IntArray,
    then: IntArray,
    predicted: Predicted,
    snapshot: Snapshot,
    settings: DecideSettings,
    tie_rank: IntArray,
    codecs: tuple[str, ...],
) -> Iterator[Candidate]:
    at_first, at_then = (a.ravel() for a in np.indices(predicted.cost_s.shape))
    keys = (tie_rank[first][at_first], tie_rank[then][at_then], predicted.cost_s.ravel())
    for k in np.lexsort(keys)[: settings.candidates_per_shape]:
        i, j = at_first[k], at_then[k]
        if np.isfinite(predicted.cost_s[i, j]):
            found = _candidate(shape, snapshot, int(first[i]), int(then[j]), predicted, (i, j))
            if predicted.codec is not None and predicted.own_tokens is not None:
                codec = codecs[int(predicted.codec[i, j])]
                found = replace(found, codec=codec, own_tokens=int(predicted.own_tokens[i, j]))
            yield found


def _candidate(
    shape: PlanShape, snapshot: Snapshot, prefill: int, decode: int, predicted: Predicted, at: tuple[np.intp, ...]
) -> Candidate:
    return Candidate(
        shape=shape,
        prefill=snapshot.places[prefill],
        decode=snapshot.places[decode],
        cost_s=float(predicted.cost_s[at]),
        ttft_s=float(predicted.ttft_s[at]),
        total_s=float(predicted.total_s[at]),
    )
