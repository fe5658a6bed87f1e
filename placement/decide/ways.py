"""The ways in which a set of nodes can run a request: single nodes, and pairs with a KV move between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from mesh.identity.place import Place
from placement.decide.plugins import ScoreView
from placement.decide.scores import NodeTimes, Predicted, least_offload, score_offload, score_single, with_cost
from placement.decide.settings import DecideSettings
from placement.decide.ship import least_split, score_split
from placement.decide.types import (
    AnyArray,
    BoolArray,
    Candidate,
    FloatArray,
    IntArray,
    PlacementRequest,
    PlanShape,
    Snapshot,
)
from placement.decide.ways_disaggregated import disaggregated_rows, does_all, score_disaggregated


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
        return mask.nonzero()[0] if shape in (None, *shapes) else np.zeros(0, dtype=np.int64)

    return Ways(
        local=rows(run & wished & edge, PlanShape.LOCAL),
        core=rows(run & wished & ~edge & does_all(snapshot, request), PlanShape.CORE),
        split=(rows(run & ~edge & snapshot.prefills, PlanShape.SPLIT), rows(movable & paired, PlanShape.SPLIT)),
        offload=(rows(run & paired, PlanShape.OFFLOAD), rows(movable & ~edge & snapshot.decodes, PlanShape.OFFLOAD)),
        disaggregated=disaggregated_rows(
            snapshot, prefill=rows(run & ~edge, PlanShape.DISAGGREGATED), decode=rows(movable, PlanShape.DISAGGREGATED)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranked:
    """`candidates`: best first, the best few of each shape. `least_total_s`: the soonest that any way would be done, if
    predictions are as far off as they usually are; `least_idle_s`: the same on idle nodes; the other two are these of
    the first token. Infinite without ways, and without a deadline of that kind."""

    candidates: list[Candidate]
    least_total_s: float
    least_idle_s: float
    least_ttft_s: float = math.inf
    idle_ttft_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ties:
    """A drawn order of nodes that does not depend on the order of rows. `keys` [n_nodes]: drawn once for each node id,
    uint64; `factor`: odd, drawn for each decision."""

    keys: AnyArray
    factor: int

    def of(self, rows: IntArray) -> AnyArray:
        """Where these rows stand in it, uint64."""
        order: AnyArray = self.keys[rows] * np.uint64(self.factor)
        return order


def rank(ways: Ways, view: ScoreView, ties: Ties, *, max_loss_ratio: float) -> Ranked:
    """Scored candidates. `max_loss_ratio` is what a codec may lose."""
    times, request, settings = view.times, view.request, view.settings
    single = with_cost(score_single(times, request), view)
    singles = np.concatenate((ways.local, ways.core))
    soonest = _Soonest(times, request)
    if len(singles):
        soonest.look((single.total_s[singles], single.ttft_s[singles]), times.wait_s[singles], singles)
    cost_s = soonest.in_time(single)
    found = [
        *_best_singles(PlanShape.LOCAL, ways.local, single, cost_s, view, ties),
        *_best_singles(PlanShape.CORE, ways.core, single, cost_s, view, ties),
    ]
    best_s = min((c.cost_s for c in found), default=math.inf)
    limit_s = settings.pair_cost_ratio * best_s
    split, least = (partial(f, max_loss_ratio=max_loss_ratio) for f in (score_split, least_split))
    for shape, (first, then), score, bound in (
        (PlanShape.SPLIT, ways.split, split, least),
        (PlanShape.OFFLOAD, ways.offload, score_offload, least_offload),
        (PlanShape.DISAGGREGATED, ways.disaggregated, score_disaggregated, None),
    ):
        most_s = math.inf if bound is None else limit_s
        first, then = _worth_a_look(first, then, bound, most_s, view, ties)
        if len(first) and len(then):
            predicted = with_cost(score(view.snapshot, times, request, first, then, settings), view)
            done = predicted.total_s, predicted.ttft_s
            soonest.look(done, times.wait_s[first][:, None], first[:, None], then[None, :])
            found.extend(_best_pairs(shape, first, then, predicted, soonest.in_time(predicted), most_s, view, ties))

    def order(place: Place) -> int:
        return int(ties.of(np.array([view.snapshot.row_of(place.node_id)]))[0])

    found.sort(key=lambda c: (c.cost_s, c.shape.value))
    if any((a.cost_s, a.shape) == (b.cost_s, b.shape) for a, b in pairwise(found)):  # rare; their order is drawn
        found.sort(key=lambda c: (c.cost_s, c.shape.value, order(c.decode), order(c.prefill)))
    (total_s, idle_s), (ttft_s, idle_ttft_s) = soonest.least
    return Ranked(
        candidates=found, least_total_s=total_s, least_idle_s=idle_s, least_ttft_s=ttft_s, idle_ttft_s=idle_ttft_s
    )


def _worth_a_look(
    first: IntArray, then: IntArray, bound: Bound | None, limit_s: float, view: ScoreView, ties: Ties
) -> tuple[IntArray, IntArray]:
    """Of the rows that may be the two parts of a pair, those for which the arithmetic is worth it: the few that look
    best, less those that cannot be part of a pair within the limit."""
    none, times, settings = first[:0], view.times, view.settings
    if not (len(first) and len(then)):
        return none, none
    first = _least(first, times.wait_s[first] + times.prefill_s[first], ties, settings.prefill_nodes)
    then = _least(then, _decode_guess_s(view, then), ties, settings.decode_nodes)
    if bound is None or limit_s == math.inf:
        return first, then
    hope = with_cost(bound(view.snapshot, times, view.request, first, then, settings), view).cost <= limit_s
    if not hope.any():
        return none, none
    return first[hope.any(axis=1)], then[hope.any(axis=0)]


Bound = Callable[[Snapshot, NodeTimes, PlacementRequest, IntArray, IntArray, DecideSettings], Predicted]


class _Soonest:
    """Of all ways, when the first would be done, and have its first token; and which are in time, if the request has a
    deadline for either. A prediction misses it only if it does so after it is shortened by its usual error."""

    def __init__(self, times: NodeTimes, request: PlacementRequest) -> None:
        self._error = times.error_ratio
        deadlines = (request.deadline_s, request.ttft_deadline_s)
        self._deadlines = (None, None) if request.brings_kv else deadlines
        self.least = [(math.inf, math.inf), (math.inf, math.inf)]  # as it is, and on idle nodes

    def look(self, done_s: tuple[FloatArray, FloatArray], wait_s: FloatArray, *rows: IntArray) -> None:
        """Ways that use these rows, with their times to the last and to the first token."""
        for kind, (deadline_s, predicted_s) in enumerate(zip(self._deadlines, done_s, strict=True)):
            if deadline_s is not None and predicted_s.size:
                usual = 1.0 + self._usual(rows)
                now_s, idle_s = self.least[kind]
                now_s = min(now_s, float((predicted_s / usual).min()))
                self.least[kind] = now_s, min(idle_s, float(((predicted_s - wait_s) / usual).min()))

    def _usual(self, rows: tuple[IntArray, ...]) -> FloatArray:
        usual = self._error[rows[0]]
        for more in rows[1:]:
            usual = np.maximum(usual, self._error[more])
        return usual

    def in_time(self, ways: Predicted) -> FloatArray:
        """The costs, infinite where a deadline would be missed."""
        cost_s = ways.cost
        if self._deadlines == (None, None):
            return cost_s
        parts = [rows for rows in (ways.prefill, ways.decode) if rows is not None]
        usual = 1.0 + (self._usual(tuple(parts)) if parts else self._error)
        for deadline_s, predicted_s in zip(self._deadlines, (ways.total_s, ways.ttft_s), strict=True):
            if deadline_s is not None:
                cost_s = np.where(predicted_s / usual <= deadline_s, cost_s, np.inf)
        return cost_s


def _least(rows: IntArray, costs: FloatArray, ties: Ties, count: int) -> IntArray:
    """The `count` of `rows` that cost least, least first; equals in a drawn order. `costs` [len(rows)]."""
    if len(rows) > count:  # sorting is the dear part: leave out what cannot be among them
        near = costs <= np.partition(costs, count - 1)[count - 1]
        rows, costs = rows[near], costs[near]
    return rows[np.lexsort((ties.of(rows), costs))[:count]]


def _decode_guess_s(view: ScoreView, rows: IntArray) -> FloatArray:
    """About what decoding at these rows takes, KV in f16 over the entry's link included; tells which nodes are worth a
    closer look, shape [len(rows)]."""
    times, request = view.times, view.request
    kv_bytes = request.prompt_tokens * view.snapshot.kv_bytes_per_token[rows]
    decode_s = request.expected_tokens * times.token_s[rows]
    return times.rtt_s[rows] + times.wait_s[rows] + decode_s + kv_bytes / times.goodput_bytes_per_s[rows]


def _best_singles(
    shape: PlanShape, rows: IntArray, single: Predicted, cost_s: FloatArray, view: ScoreView, ties: Ties
) -> Iterator[Candidate]:
    for row in _least(rows, cost_s[rows], ties, view.settings.candidates_per_shape).tolist():
        if cost_s[row] < math.inf:
            yield _candidate(shape, view, row, row, single, (row,))


def _best_pairs(
    shape: PlanShape,
    first: IntArray,
    then: IntArray,
    predicted: Predicted,
    cost_s: FloatArray,
    limit_s: float,
    view: ScoreView,
    ties: Ties,
) -> Iterator[Candidate]:
    at_first, at_then = (a.ravel() for a in np.indices(cost_s.shape))
    keys = (ties.of(first)[at_first], ties.of(then)[at_then], cost_s.ravel())
    codecs = view.times.codecs.names
    for k in np.lexsort(keys)[: view.settings.candidates_per_shape]:
        i, j = at_first[k], at_then[k]
        if cost_s[i, j] < math.inf and cost_s[i, j] <= limit_s:
            found = _candidate(shape, view, int(first[i]), int(then[j]), predicted, (i, j))
            if predicted.codec is not None and predicted.own_tokens is not None:
                codec = codecs[int(predicted.codec[i, j])]
                found = replace(found, codec=codec, own_tokens=int(predicted.own_tokens[i, j]))
            yield found


def _candidate(
    shape: PlanShape, view: ScoreView, prefill: int, decode: int, predicted: Predicted, at: tuple[int | np.intp, ...]
) -> Candidate:
    times, fit = view.times, view.snapshot.fit
    return Candidate(
        shape=shape,
        prefill=view.snapshot.places[prefill],
        decode=view.snapshot.places[decode],
        cost_s=float(predicted.cost[at]),
        ttft_s=float(predicted.ttft_s[at]),
        total_s=float(predicted.total_s[at]),
        tpot_s=float(times.token_s[decode]),
        error_ratio=float(max(times.error_ratio[prefill], times.error_ratio[decode])),
        ttft_scale=1.0 if fit is None else float(fit.ttft_scale[prefill]),
        tpot_scale=1.0 if fit is None else float(fit.tpot_scale[decode]),
        cached_tokens=int(times.cached_tokens[prefill]),
    )
