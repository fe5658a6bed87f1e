"""The rivals' formulae, each worked by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import simpy

from placement.decide.types import Plan, Refusal
from placement.sim.job import Job
from placement.sim.node import SimNode
from placement.sim.routers import BASELINES, Baseline, Fleet, Rank, Worker, dynamo, llm_d, round_robin, sglang
from placement.sim.traces import TraceRequest
from tests.placement.sim.helpers import CORES, mesh

REQUEST = TraceRequest(
    index=0, arrival_s=0.0, prompt_tokens=1000, output_tokens=10, blocks=tuple(range(10)), block_tokens=100
)


def fleet() -> Fleet:
    env, built = simpy.Environment(), mesh(CORES)
    nodes = [SimNode(env, s.place.node_id, s.profile, rng=random.Random(1)) for s in built.nodes]
    return Fleet(list(zip(built.nodes, nodes, strict=True)))


def cache(worker: Worker, n_blocks: int) -> None:
    pool = worker.node.pool
    pool.reserve((), 100, 100 * n_blocks)
    kept = pool.keep(REQUEST.blocks[:n_blocks], 0)
    pool.free(kept, 0)


def best(rank: Rank, workers: Sequence[Worker]) -> str:
    return rank(workers, REQUEST, random.Random(1))[0].spec.place.node_id


def test_dynamo_adds_uncached_prefill_and_decode_blocks() -> None:
    a, b, c = workers = list(fleet().workers.values())
    cache(b, 8)
    assert best(dynamo, workers) == b.spec.place.node_id  # 200 + 1000 against 1000 + 1000
    b.decode_tokens = 700
    assert best(dynamo, workers) == b.spec.place.node_id  # 1900 against 2000
    b.prefill_tokens = 200
    assert best(dynamo, workers) != b.spec.place.node_id  # 2100
    a.decode_tokens = c.decode_tokens = 500
    assert best(dynamo, workers) == b.spec.place.node_id


def test_sglang_follows_the_prefix_unless_loads_are_far_apart() -> None:
    a, b, c = workers = list(fleet().workers.values())
    b.tree.update(dict.fromkeys(REQUEST.blocks[:4]))
    assert best(sglang, workers) == b.spec.place.node_id
    b.active = 65  # more than 64 above the least, and more than 1.5 times it
    assert best(sglang, workers) != b.spec.place.node_id
    b.active = 64
    assert best(sglang, workers) == b.spec.place.node_id
    b.tree.popitem()
    b.tree.popitem()  # a match of 0.2: the smallest tree
    a.tree.update(dict.fromkeys(range(100, 101)))
    assert best(sglang, workers) == c.spec.place.node_id


def test_llm_d_weighs_prefix_queue_and_kv() -> None:
    a, b, c = workers = list(fleet().workers.values())
    cache(b, 5)
    assert best(llm_d, workers) == b.spec.place.node_id  # 1 + 2 + 1 against 0 + 2 + 1
    for worker, waiting in ((a, 0), (b, 4), (c, 2)):
        for i in range(waiting + 1):  # the first of them runs
            worker.node.submit(_job(f"{worker.spec.place.node_id}-{i}"))
    # a: 0 + 2; b: 1 + 0; c: 0 + 1; and about 1 for free KV
    assert best(llm_d, workers) == a.spec.place.node_id


def test_round_robin_takes_turns() -> None:
    workers = list(fleet().workers.values())
    rank = round_robin()
    assert [best(rank, workers) for _ in range(4)] == [w.spec.place.node_id for w in (*workers, workers[0])]


def test_counts_rise_and_fall_with_requests() -> None:
    counted = fleet()
    node_id, worker = next(iter(counted.workers.items()))
    counted.started(REQUEST, node_id)
    assert (worker.active, worker.prefill_tokens, worker.decode_tokens, len(worker.tree)) == (1, 1000, 1000, 10)
    counted.prefilled(REQUEST, node_id)
    assert (worker.active, worker.prefill_tokens, worker.decode_tokens) == (1, 0, 1000)
    counted.ended(REQUEST, node_id)
    counted.ended(REQUEST, node_id)
    assert (worker.active, worker.prefill_tokens, worker.decode_tokens) == (0, 0, 0)


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"edge-only"}))
def test_a_plan_has_fallbacks_and_leaves_out_what_is_not_reachable(name: str) -> None:
    counted = fleet()
    near = list(counted.workers)
    router = Baseline(BASELINES[name].rank(), counted, near, lambda node_id: node_id != near[1], random.Random(1))
    plan = router.plan(REQUEST, 0.0)
    assert isinstance(plan, Plan)
    assert {c.decode.node_id for c in plan.candidates} == {near[0], near[2]}
    nobody = Baseline(BASELINES[name].rank(), counted, near, lambda _: False, random.Random(1))
    assert isinstance(nobody.plan(REQUEST, 0.0), Refusal)


class _Silent:
    def on_prefilled(self, job: Job) -> None: ...
    def on_ended(self, job: Job) -> None: ...
    def on_held(self, job: Job) -> None: ...
    def on_failed(self, job: Job) -> None: ...


def _job(name: str) -> Job:
    return Job(run_id=name, prompt_tokens=5000, output_tokens=5, blocks=(), block_tokens=100, listener=_Silent())
