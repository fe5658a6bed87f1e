"""Routers to compare: kvmesh's own decision, and rivals' published formulae. The rivals are written from their
documents, not from their code, and see more than ours does: their counts are those of all entries at once and without
delay, and where a rival is told of its nodes' caches by events, it sees them as they are now.

    round-robin      each in turn
    least-loaded     fewest requests under way
    sglang           (max - min) > 64 and max > 1.5 min: shortest queue; else, with a match of at least 0.3 of the
                     prompt, the longest match; else the smallest tree (SGLang model gateway, cache_aware)
    dynamo           least of prefill (active and incoming, less the overlap) + decode blocks (NVIDIA Dynamo KV router)
    llm-d            most of 2 prefix + 2 queue + 1 KV, each in [0, 1] (llm-d router; ties drawn)
    cloud-only       least-loaded over core nodes
    edge-only        least-loaded over the nodes of the entry's site
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mesh.identity.place import Tier
from placement.decide.types import Candidate, Plan, PlanShape, Refusal
from placement.predict.measured import Measured
from placement.sim.mesh import SimNodeSpec
from placement.sim.node import SimNode
from placement.sim.traces import TraceRequest

_KEPT_FALLBACKS = 3


class Router(Protocol):
    """One entry's choice of nodes. What happens to its requests is told to it as the entry hears of it."""

    def plan(self, request: TraceRequest, now_s: float) -> Plan | Refusal:
        """Where a request goes; or a refusal."""
        ...

    def started(self, request: TraceRequest, node_id: str, now_s: float) -> None:
        """A leg was sent to a node."""
        ...

    def prefilled(self, request: TraceRequest, node_id: str, cached_tokens: int, now_s: float) -> None:
        """The node has the prompt's KV, of which so many tokens were cached."""
        ...

    def ended(self, request: TraceRequest, node_id: str, now_s: float) -> None:
        """A leg ended there, well or not."""
        ...

    def finished(self, request: TraceRequest, plan: Plan, measured: Measured | None, now_s: float) -> None:
        """The request ended; `measured` if it ran as planned and ended well."""
        ...


@dataclass(slots=True)
class Worker:
    """What the rivals know of a node: their own counts, and the node as it is now."""

    spec: SimNodeSpec
    node: SimNode
    active: int = 0
    prefill_tokens: int = 0  # sent and not prefilled yet, less what was thought to be cached
    decode_tokens: int = 0  # of requests under way
    tree: OrderedDict[int, None] = field(default_factory=OrderedDict)  # blocks sent there


class Fleet:
    """Counts over all entries; the rivals' entries of one simulation share it."""

    def __init__(self, nodes: Sequence[tuple[SimNodeSpec, SimNode]]) -> None:
        self.workers = {spec.place.node_id: Worker(spec=spec, node=node) for spec, node in nodes}
        self._sent: dict[tuple[int, str], tuple[int, int]] = {}  # (request, node) -> prefill and decode tokens

    def started(self, request: TraceRequest, node_id: str) -> None:
        worker = self.workers[node_id]
        uncached = request.prompt_tokens - overlap_tokens(worker, request)
        self._sent[request.index, node_id] = uncached, request.prompt_tokens
        worker.active += 1
        worker.prefill_tokens += uncached
        worker.decode_tokens += request.prompt_tokens
        for block in request.blocks:
            worker.tree[block] = None
            worker.tree.move_to_end(block)
        while len(worker.tree) * request.block_tokens > worker.spec.profile.kv_capacity_tokens:
            worker.tree.popitem(last=False)

    def prefilled(self, request: TraceRequest, node_id: str) -> None:
        key = request.index, node_id
        if key in self._sent:
            uncached, decode = self._sent[key]
            self.workers[node_id].prefill_tokens -= uncached
            self._sent[key] = 0, decode

    def ended(self, request: TraceRequest, node_id: str) -> None:
        sent = self._sent.pop((request.index, node_id), None)
        if sent is not None:
            worker = self.workers[node_id]
            worker.active -= 1
            worker.prefill_tokens -= sent[0]
            worker.decode_tokens -= sent[1]


def overlap_tokens(worker: Worker, request: TraceRequest) -> int:
    """Prompt tokens that the node has in its cache now."""
    return worker.node.pool.match(request.blocks) * request.block_tokens


def tree_tokens(worker: Worker, request: TraceRequest) -> int:
    """Prompt tokens that were sent to the node before, as far as the tree remembers."""
    n = 0
    for block in request.blocks:
        if block not in worker.tree:
            break
        n += 1
    return n * request.block_tokens


Rank = Callable[[Sequence[Worker], TraceRequest, random.Random], list[Worker]]
"""Workers, the best first."""


def least_loaded(workers: Sequence[Worker], _: TraceRequest, rng: random.Random) -> list[Worker]:
    return _by(workers, lambda w: w.active, rng)


def sglang(workers: Sequence[Worker], request: TraceRequest, rng: random.Random) -> list[Worker]:
    loads = [w.active for w in workers]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return least_loaded(workers, request, rng)
    match = {w.spec.place.node_id: tree_tokens(w, request) for w in workers}
    if max(match.values()) >= 0.3 * request.prompt_tokens:
        return _by(workers, lambda w: -match[w.spec.place.node_id], rng)
    return _by(workers, lambda w: len(w.tree), rng)


def dynamo(workers: Sequence[Worker], request: TraceRequest, rng: random.Random) -> list[Worker]:
    def cost(worker: Worker) -> float:
        incoming = request.prompt_tokens - overlap_tokens(worker, request)
        return float(max(worker.prefill_tokens + incoming, 0) + worker.decode_tokens + request.prompt_tokens)

    return _by(workers, cost, rng)


def llm_d(workers: Sequence[Worker], request: TraceRequest, rng: random.Random) -> list[Worker]:
    queues = [w.node.n_waiting for w in workers]
    least, most = min(queues), max(queues)
    n_blocks = max(1, len(request.blocks))

    def score(worker: Worker) -> float:
        pool = worker.node.pool
        prefix = pool.match(request.blocks) / n_blocks
        queue = (most - worker.node.n_waiting) / (most - least) if most > least else 1.0
        return 2 * prefix + 2 * queue + 1.0 - pool.taken_tokens / pool.capacity_tokens

    return _by(workers, lambda w: -score(w), rng)


def _by(workers: Sequence[Worker], key: Callable[[Worker], float], rng: random.Random) -> list[Worker]:
    """Ascending; ties drawn."""
    keyed = [(key(w), rng.random(), w) for w in workers]
    keyed.sort(key=lambda entry: entry[:2])
    return [w for _, _, w in keyed]


class Baseline:
    """A rival at one entry. `near`: what it may choose; `reachable`: whether one is up and not known to be cut off."""

    def __init__(
        self, rank: Rank, fleet: Fleet, near: Sequence[str], reachable: Callable[[str], bool], rng: random.Random
    ) -> None:
        self._rank = rank
        self._fleet = fleet
        self._workers = [fleet.workers[node_id] for node_id in near]
        self._reachable = reachable
        self._rng = rng

    def plan(self, request: TraceRequest, now_s: float) -> Plan | Refusal:
        up = [w for w in self._workers if self._reachable(w.spec.place.node_id)]
        if not up:
            return Refusal(permanent=False, denied=False, rule="", missing=(), refused=(), message="no node is up")
        ranked = self._rank(up, request, self._rng)[: 1 + _KEPT_FALLBACKS]
        ways = tuple(_way(worker) for worker in ranked)
        return Plan(choice=ways[0], fallbacks=ways[1:], candidates=ways, refused=(), rule="", policy_version=0)

    def started(self, request: TraceRequest, node_id: str, now_s: float) -> None:
        self._fleet.started(request, node_id)

    def prefilled(self, request: TraceRequest, node_id: str, cached_tokens: int, now_s: float) -> None:
        self._fleet.prefilled(request, node_id)

    def ended(self, request: TraceRequest, node_id: str, now_s: float) -> None:
        self._fleet.ended(request, node_id)

    def finished(self, request: TraceRequest, plan: Plan, measured: Measured | None, now_s: float) -> None:
        pass


def round_robin() -> Rank:
    """With a counter of its own."""
    turns: dict[int, int] = defaultdict(int)

    def rank(workers: Sequence[Worker], _: TraceRequest, rng: random.Random) -> list[Worker]:
        at = turns[0] % len(workers)
        turns[0] += 1
        return [*workers[at:], *workers[:at]]

    return rank


def _way(worker: Worker) -> Candidate:
    place = worker.spec.place
    shape = PlanShape.LOCAL if place.tier is Tier.EDGE else PlanShape.CORE
    return Candidate(shape=shape, prefill=place, decode=place, cost_s=0.0, ttft_s=0.0, total_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSpec:
    """A rival by name: how it ranks, and which nodes it may use."""

    rank: Callable[[], Rank]
    tiers: frozenset[Tier] = frozenset(Tier)


BASELINES: Mapping[str, BaselineSpec] = {
    "round-robin": BaselineSpec(rank=round_robin),
    "least-loaded": BaselineSpec(rank=lambda: least_loaded),
    "sglang": BaselineSpec(rank=lambda: sglang),
    "dynamo": BaselineSpec(rank=lambda: dynamo),
    "llm-d": BaselineSpec(rank=lambda: llm_d),
    "cloud-only": BaselineSpec(rank=lambda: least_loaded, tiers=frozenset((Tier.CORE,))),
    "edge-only": BaselineSpec(rank=lambda: least_loaded, tiers=frozenset((Tier.EDGE,))),
}
"""By name; see the module's docstring."""
