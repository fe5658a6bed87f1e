"""The fast path is the plain one: columns patched row by row, bounds that leave pairs out, and formulae for all nodes
at once give what each node alone, everything anew and every pair would."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.node.latency_model import LatencyCurve
from placement.decide import ways
from placement.decide.compiled import Compiled, compiled
from placement.decide.decide import decide
from placement.decide.filters import filter_nodes
from placement.decide.scores import node_times, score_single
from placement.decide.settings import DEFAULTS
from placement.decide.types import FitColumns, PlacementRequest, Plan, Snapshot, Wish
from placement.policy.model import parse_policy
from placement.policy.rules import Prices
from placement.predict.predict import Queue, predict
from tests.placement.decide.meshes import Node, core, edge, request, snapshot

POLICY = parse_policy(
    "version: 1\nrules: {internal: {anywhere: true}, restricted: {sites: [own]}}\nprice: {core_decode_per_s: 3}",
    version=1,
)
SEEDS = st.integers(0, 2**32)


def random_node(rng: random.Random, number: int) -> Node:
    facts: dict[str, Any] = {
        "running": rng.randrange(6), "waiting": rng.choice((0, 0, 0, 2, 9, 70)),
        "waiting_prefill_tokens": rng.randrange(4000), "kv_free_tokens": rng.choice((0, 900, 100_000)),
        "prefill_tokens_per_s": rng.uniform(50, 6000), "decode_tokens_per_s": rng.choice((0.0, rng.uniform(2, 90))),
        "rtt_s": rng.choice((math.nan, rng.uniform(0.0001, 0.3))), "ready": rng.random() < 0.9,
        "draining": rng.random() < 0.1, "reachable": rng.random() < 0.9, "age_s": rng.choice((0.0, 1.0, 20.0, 90.0)),
        "goodput_bytes_per_s": rng.choice((math.nan, 10 ** rng.uniform(5, 10))),
        "cached_tokens": rng.choice((0, 0, 300, 5000)), "codecs": rng.choice((("f16",), ("f16", "q8_0", "small"))),
        "role": rng.choice(("both",) * 5 + ("prefill", "decode")),
    }  # fmt: skip
    make = core if rng.random() < 0.4 else edge
    return make(f"n{number:03d}", **facts)


def random_fit(rng: random.Random, n: int) -> FitColumns:
    """Fits of a node each, some of which know nothing."""
    known = np.array([float(rng.random() < 0.7) for _ in range(n)])

    def some(low: float, high: float) -> Any:
        return known * np.array([rng.uniform(low, high) for _ in range(n)])

    def ints(*choices: int) -> Any:
        return np.array([rng.choice(choices) for _ in range(n)], dtype=np.int64)

    def ratios(low: float, high: float) -> Any:
        return np.array([rng.choice((1.0, rng.uniform(low, high))) for _ in range(n)])

    return FitColumns(
        prefill_base_s=some(0.001, 0.02), prefill_token_s=some(1e-4, 5e-3), prefill_growth_s=some(0, 1e-6),
        decode_base_s=some(0.005, 0.1), decode_row_s=some(0, 0.01), decode_context_s=some(0, 1e-6),
        error_ratio=ratios(0.01, 1.0), context_tokens=ints(0, 500, 40_000), step_tokens=ints(0, 64, 512),
        most_running=ints(0, 4, 64), ttft_scale=ratios(0.2, 8.0), tpot_scale=ratios(0.2, 8.0),
        scale_error_ratio=ratios(0.01, 0.99),
    )  # fmt: skip


def random_mesh(rng: random.Random, *, made_s: float = 0.0) -> Snapshot:
    nodes = [random_node(rng, i) for i in range(rng.randrange(1, 30))]
    entry = rng.choice((nodes[0].node_id, "placement-1"))
    mesh = snapshot(nodes, entry=entry, made_s=made_s)
    return replace(mesh, fit=random_fit(rng, len(nodes))) if rng.random() < 0.8 else mesh


def random_request(rng: random.Random) -> PlacementRequest:
    asked = request(
        int(10 ** rng.uniform(0, 3.7)), label=rng.choice(("internal", "internal", "restricted")),
        expected_tokens=rng.randrange(1, 200), ttft_s=rng.choice((None, 0.5)), tpot_s=rng.choice((None, 0.02)),
        deadline_s=rng.choice((None, None, 1.0, 8.0)),
    )  # fmt: skip
    return replace(
        asked,
        cached={} if rng.random() < 0.5 else {f"n{rng.randrange(30):03d}": 400, "edge-n000": 10**6},
        session_node_id=rng.choice(("", "n001", "edge-n002")),
    )


def run(mesh: Snapshot, asked: PlacementRequest, seed: int) -> Any:
    return decide(mesh, asked, POLICY, entry_site="n000", now_s=0.5, rng=random.Random(seed))


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_patched_columns_are_those_of_everything_anew(seed: int) -> None:
    rng = random.Random(seed)
    mesh = random_mesh(rng)
    for _ in range(6):
        if rng.random() < 0.7:
            compiled(mesh, DEFAULTS)
        rows = np.array(
            sorted(rng.sample(range(mesh.n_nodes), rng.randrange(min(3, mesh.n_nodes) + 1))), dtype=np.int64
        )
        columns = {
            "running": np.array([rng.randrange(9) for _ in rows], dtype=np.int64),
            "ready": np.array([rng.random() < 0.5 for _ in rows], dtype=np.bool_),
        }
        fit = {"decode_base_s": np.array([rng.uniform(0, 1) for _ in rows])} if mesh.fit is not None else None
        before = mesh.running.copy()
        patched = mesh.patched(rows, columns, fit)
        np.testing.assert_array_equal(mesh.running, before)
        mesh = patched
    anew = replace(mesh)
    assert not anew.kept
    for name in Compiled.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(compiled(mesh, DEFAULTS), name), getattr(compiled(anew, DEFAULTS), name))


def test_a_snapshot_does_not_keep_all_before_it() -> None:
    mesh = random_mesh(random.Random(1))
    rows = np.array([0])
    for i in range(100):
        mesh = mesh.patched(rows, {"running": np.array([i])})
    depth, at = 0, mesh
    while at.kept:
        (link,) = at.kept.values()
        at, depth = link.origin, depth + 1  # type: ignore[attr-defined]
    assert depth <= 8


@given(seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_pairs_that_are_left_out_by_their_bound_would_not_have_been_told_of(seed: int) -> None:
    rng = random.Random(seed)
    mesh, asked = random_mesh(rng), random_request(rng)
    fast = run(mesh, asked, seed)

    def no_bound(snap: Snapshot, times: Any, req: Any, first: Any, then: Any, conf: Any, **rest: Any) -> Any:
        zeros = np.zeros((len(first), len(then)))
        return ways.Predicted(ttft_s=zeros, total_s=zeros, price_s=None, prefill=first[:, None], decode=then[None, :])

    with patch.object(ways, "least_split", no_bound), patch.object(ways, "least_offload", no_bound):
        slow = run(replace(mesh), asked, seed)
    assert fast == slow


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [random_node(rng, i) for i in range(rng.randrange(2, 20))]
    asked = random_request(rng)
    shuffled = rng.sample(nodes, len(nodes))
    one, other = (run(snapshot(n, entry=nodes[0].node_id, made_s=0.0), asked, seed) for n in (nodes, shuffled))
    assert type(one) is type(other)
    if isinstance(one, Plan):
        assert one.choice == other.choice
        assert one.candidates == other.candidates
    assert {(r.reason, r.count) for r in one.refused} == {(r.reason, r.count) for r in other.refused}


@given(seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_the_columns_say_what_the_plain_predictor_says_of_each_node(seed: int) -> None:
    rng = random.Random(seed)
    mesh = random_mesh(rng)
    if mesh.fit is None:
        return
    asked = replace(random_request(rng), cached={})
    filtered = filter_nodes(mesh, asked, POLICY, entry_site="n000", now_s=0.0, settings=DEFAULTS)
    single = score_single(node_times(mesh, asked, Prices(), filtered, DEFAULTS), asked)
    for row, place in enumerate(mesh.places):
        fit = {name: getattr(mesh.fit, name)[row].item() for name in FitColumns.__dataclass_fields__}
        curve = LatencyCurve(**{k: v for k, v in fit.items() if k in LatencyCurve.__dataclass_fields__})
        if not (curve.knows_prefill and curve.knows_decode):
            continue
        queue = Queue(
            running=int(mesh.running[row]), waiting=int(mesh.waiting[row]),
            waiting_prefill_tokens=int(mesh.waiting_prefill_tokens[row]), context_tokens=fit["context_tokens"],
            step_tokens=fit["step_tokens"], most_running=fit["most_running"], full=bool(filtered.full[row]),
        )  # fmt: skip
        own = row == mesh.entry_row
        rtt_s = 0.0 if own else float(mesh.rtt_s[row]) if np.isfinite(mesh.rtt_s[row]) else DEFAULTS.rtt_s
        stale = 0.0 if own or mesh.age_s[row] <= DEFAULTS.busy_after_s else DEFAULTS.busy_wait_s
        told = predict(
            curve, queue, prompt_tokens=asked.prompt_tokens, cached_tokens=int(mesh.cached_tokens[row]),
            expected_tokens=asked.expected_tokens, rtt_s=rtt_s, ttft_scale=fit["ttft_scale"],
            tpot_scale=fit["tpot_scale"],
        )  # fmt: skip
        assert single.ttft_s[row] == pytest.approx(told.ttft_s + stale), place
        assert single.total_s[row] == pytest.approx(told.total_s + stale), place


def test_a_wish_is_served_whatever_its_pair_costs() -> None:
    mesh = snapshot([core(goodput_bytes_per_s=1e4), edge("paris")], entry="edge-paris", made_s=0.0)
    wish = Wish(shape=ways.PlanShape.SPLIT)
    assert isinstance(run(mesh, request(2000, wish=wish), 1), Plan)
    plain = run(mesh, request(2000), 1)
    assert {c.shape for c in plain.candidates} == {ways.PlanShape.LOCAL, ways.PlanShape.CORE}
