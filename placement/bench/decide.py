"""`kvmesh bench decide`: how long does one decision take, in small meshes and large ones?

Pure computing on one thread: no network, no engine. A mesh of `sites` remote sites with one edge node or three nodes
each and some core nodes, all with load that differs; requests of many lengths, labels and wishes under a policy with
several rules. Measured are whole decisions, the snapshot's update before them included: `changed` nodes have new
load figures at each decision, as a stream of load reports would give. CPU time is told beside wall-clock time, since
a busy machine lengthens only the latter.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.identity.place import Place, Role, Tier
from mesh.node.engine import EngineLoad
from placement.decide.decide import decide
from placement.decide.types import PlacementRequest, Plan
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState
from placement.entry.snapshot_table import SnapshotTable
from placement.policy.model import parse_policy

_MODEL = "smollm2-135m-instruct"
_POLICY = """\
version: 1
labels: {order: [public, internal, confidential, restricted], default: internal}
rules:
  public: {anywhere: true}
  internal:
    - {tiers: [core]}
    - {sites: [own]}
  confidential: {jurisdictions: [DE, FR]}
  restricted: {sites: [own]}
price: {core_decode_per_s: 5.0}
"""
_LABELS = ("public", "internal", "confidential", "restricted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Size of a mesh; `goal_ms` is what half of the decisions should take at most, if there is a goal."""

    name: str
    cores: int
    sites: int
    nodes_per_site: int
    goal_ms: float | None = None


MESHES = (
    Mesh(name="3 nodes", cores=1, sites=2, nodes_per_site=1),
    Mesh(name="1,000 nodes", cores=40, sites=960, nodes_per_site=1, goal_ms=0.2),
    Mesh(name="13,200 nodes", cores=60, sites=4_380, nodes_per_site=3, goal_ms=1.0),
)


class DecideBench:
    """See the module's docstring."""

    name = "decide"
    question = "One decision, from the snapshot's update to the plan: how long, by the size of the mesh?"
    defaults: Mapping[str, Cell] = {"decisions": 2000, "changed": 1, "entry": "placement,edge", "seed": 1}

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about a minute with the defaults."""
        rows: list[Mapping[str, Cell]] = []
        goals: list[Goal] = []
        entries = context.text("entry").split(",")
        for number, (mesh, entry) in enumerate((m, e) for m in MESHES for e in entries):
            context.progress(number, len(MESHES) * len(entries), f"{mesh.name}, {entry}")
            await asyncio.sleep(0)
            row = measure(mesh, entry, context)
            rows.append(row)
            if mesh.goal_ms is not None:
                name = f"{mesh.name}, {entry}: CPU p50, ms"
                goals.append(Goal(name=name, value=float(str(row["cpu_ms_p50"])), goal=mesh.goal_ms))
        return BenchResult(rows=tuple(rows), goals=tuple(goals))


def measure(mesh: Mesh, entry: str, context: BenchContext) -> Mapping[str, Cell]:
    """Times of decisions at one entry of one mesh."""
    rng = random.Random(context.count("seed"))
    facts = {node.place.node_id: node for node in make_nodes(mesh, rng)}
    own = "placement-1" if entry == "placement" else next(n for n, f in facts.items() if f.place.tier is Tier.EDGE)
    site = "dc1" if entry == "placement" else facts[own].place.site
    table = SnapshotTable(facts.get, entry_node_id=own)
    for node_id in facts:
        table.stale(node_id)
    policy, ids = parse_policy(_POLICY, version=1), list(facts)
    table.snapshot(version=1, now_s=0.0)
    wall_s, cpu_s, planned = [], [], 0
    for number in range(context.count("decisions")):
        for _ in range(context.count("changed")):
            node_id = rng.choice(ids)
            facts[node_id] = replace(facts[node_id], load=_load(rng), age_s=0.0)
            table.stale(node_id)
        request, now_s = make_request(rng), number * 1e-3
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        found = decide(table.snapshot(version=1, now_s=now_s), request, policy, entry_site=site, now_s=now_s, rng=rng)
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.thread_time() - began_cpu_s)
        planned += isinstance(found, Plan)
    return {
        "mesh": mesh.name,
        "entry": entry,
        "decisions": len(wall_s),
        "planned": planned,
        "cpu_ms_p50": _ms(cpu_s, 0.5),
        "cpu_ms_p99": _ms(cpu_s, 0.99),
        "wall_ms_p50": _ms(wall_s, 0.5),
        "wall_ms_p99": _ms(wall_s, 0.99),
    }


def make_nodes(mesh: Mesh, rng: random.Random) -> list[NodeFacts]:
    """Core nodes of one data centre and edge nodes of many sites, none of them quite like another."""
    cores = [_node(f"core-{i:03d}", Tier.CORE, "dc1", "DE", rng) for i in range(mesh.cores)]
    edges = [
        _node(f"edge-{s:05d}-{i}", Tier.EDGE, f"site-{s:05d}", rng.choice(("DE", "FR", "JP", "US")), rng)
        for s in range(mesh.sites)
        for i in range(mesh.nodes_per_site)
    ]
    return cores + edges


def bench_node(node_id: str, rng: random.Random) -> NodeFacts:
    """A core node of the one data centre."""
    return _node(node_id, Tier.CORE, "dc1", "DE", rng)


def _node(node_id: str, tier: Tier, site: str, jurisdiction: str, rng: random.Random) -> NodeFacts:
    model = ModelFacts(
        model_id=_MODEL, weights_dtype="Q4_1", max_context_tokens=8192, layout_hash="0", weights_lineage="l",
        digest="0" * 64, kv_bytes_per_token=23_040,
    )  # fmt: skip
    place = Place(
        mesh="bench", role=Role(tier.value), tier=tier, site=site, region="eu", jurisdiction=jurisdiction,
        node_id=node_id,
    )  # fmt: skip
    return NodeFacts(
        place=place, address="", state=NodeState.READY, models=(model,), load=_load(rng),
        age_s=rng.uniform(0.0, 2.0), rtt_s=rng.uniform(0.001, 0.2), goodput_bytes_per_s=rng.uniform(1e6, 1e9),
    )  # fmt: skip


def _load(rng: random.Random) -> EngineLoad:
    return EngineLoad(
        running=rng.randrange(8), waiting=rng.randrange(3), waiting_prefill_tokens=rng.randrange(2000),
        kv_used_tokens=rng.randrange(30_000), kv_capacity_tokens=32_768,
        prefill_tokens_per_s=rng.uniform(200.0, 5000.0), decode_tokens_per_s=rng.uniform(10.0, 60.0),
    )  # fmt: skip


def make_request(rng: random.Random) -> PlacementRequest:
    """One of many kinds."""
    return PlacementRequest(
        tenant="bench", model=_MODEL, label=rng.choice(_LABELS), prompt_tokens=int(10 ** rng.uniform(1.0, 3.6)),
        max_tokens=256, expected_tokens=rng.randrange(16, 256), ttft_s=rng.choice((None, 0.5)),
    )  # fmt: skip


def _ms(seconds: list[float], q: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3, 3)


BENCH = DecideBench()
"""Entry point of `kvmesh.benches`."""
