"""Random policies, meshes, failures and requests, and what becomes of them under the code that decides. Seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mesh.errors import MeshError
from mesh.identity.place import Place, Role, Tier
from mesh.node.engine import EngineLoad
from mesh.node.serving_role import ServingRole
from placement.breach.checker import Happened
from placement.decide.decide import decide
from placement.decide.types import Candidate, PlacementRequest, Plan, PlanShape, Refusal, Wish
from placement.detect.guard import Guard
from placement.detect.label import Raised, raise_label
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState, build_snapshot
from placement.policy.model import parse_policy

REGIONS = ("eu-west", "eu-north", "ap-east")
JURISDICTIONS = ("FR", "NO", "CN", "DE")
LABELS = ("public", "internal", "confidential", "restricted")
LATTICE = {"open": ["legal", "health"], "legal": ["both"], "health": ["both"], "both": []}
MODELS = ("small", "large")
TEXTS = ("tell me a story", "pay with 4111 1111 1111 1111", "write to jo.berg@gmail.com", "about ZX-1234")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One drawn situation."""

    policy_yaml: str
    nodes: tuple[NodeFacts, ...]
    entry: Place
    claimed: str
    text: str
    model: str
    prompt_tokens: int
    wish: Wish
    exclude: frozenset[str]
    seed: int


def draw(rng: random.Random) -> World:
    """A world. Policies are valid; meshes may lack everything."""
    nodes = tuple(_node(rng, i) for i in range(rng.randint(2, 8)))
    at = rng.choice(nodes).place
    placement = replace(at, role=Role.PLACEMENT, tier=Tier.CORE, node_id="placement-1")
    entry = at if at.tier is Tier.EDGE else placement
    lattice = rng.random() < 0.3
    labels = tuple(LATTICE) if lattice else LABELS
    names = [n.place.node_id for n in nodes]
    return World(
        policy_yaml=yaml.safe_dump(_policy(rng, labels, lattice, nodes), sort_keys=False),
        nodes=nodes,
        entry=entry,
        claimed=rng.choice(("", *labels)),
        text=rng.choice(TEXTS),
        model=rng.choice(MODELS),
        prompt_tokens=rng.choice((1, 40, 600, 4_000)),
        wish=_wish(rng, names),
        exclude=frozenset(rng.sample(names, int(rng.random() < 0.1))),
        seed=rng.getrandbits(32),
    )


def _node(rng: random.Random, number: int) -> NodeFacts:
    edge = rng.random() < 0.5
    place = Place(
        mesh="m",
        role=Role.EDGE if edge else Role.CORE,
        tier=Tier.EDGE if edge else Tier.CORE,
        site=f"site-{rng.randint(1, 4)}",
        region=rng.choice(REGIONS),
        jurisdiction=rng.choice(JURISDICTIONS),
        node_id=f"node-{number}",
    )
    busy = rng.random() < 0.1
    load = EngineLoad(
        running=rng.randint(0, 4),
        waiting=80 if busy else 0,
        waiting_prefill_tokens=0,
        kv_used_tokens=0,
        kv_capacity_tokens=65_536,
        prefill_tokens_per_s=rng.choice((0.0, 200.0, 5_000.0)),
        decode_tokens_per_s=rng.choice((0.0, 20.0, 100.0)),
    )
    model = ModelFacts(
        model_id=MODELS[0], weights_dtype="bf16", max_context_tokens=8_192, layout_hash="0" * 64, weights_lineage="l",
        digest="0" * 64, kv_bytes_per_token=23_040,
    )  # fmt: skip
    served = [replace(model, model_id=m) for m in MODELS if rng.random() < 0.95]
    return NodeFacts(
        place=place,
        address="" if edge else "h:1",
        state=NodeState.READY if rng.random() < 0.92 else NodeState.DISCONNECTED,
        models=tuple(served),
        load=load,
        draining=rng.random() < 0.05,
        reachable=rng.random() < 0.95,
        rtt_s=rng.choice((None, 0.001, 0.2)),
        goodput_bytes_per_s=rng.choice((None, 1e6, 1e9)),
        role=ServingRole.BOTH if edge else rng.choice((ServingRole.BOTH, *ServingRole)),
    )


def _policy(rng: random.Random, labels: tuple[str, ...], lattice: bool, nodes: tuple[NodeFacts, ...]) -> dict[str, Any]:
    policy: dict[str, Any] = {"version": 1}
    policy["labels"] = {"raises": LATTICE} if lattice else {"order": list(LABELS)}
    policy["labels"]["default"] = rng.choice(labels)
    for section, share in (("rules", 0.8), ("kv_rules", 0.3)):
        policy[section] = {label: _rules(rng, nodes) for label in labels if rng.random() < share}
    raise_to = {kind: rng.choice(labels) for kind in ("identifiers", "email", "payment_card") if rng.random() < 0.5}
    policy["detectors"] = {"raise_to": raise_to}
    if rng.random() < 0.5:
        policy["detectors"]["patterns"] = {"project": {"regex": r"ZX-\d{4}", "raise_to": rng.choice(labels)}}
    if rng.random() < 0.1:
        policy["models"] = {"allowed": [rng.choice(MODELS)]}
    policy["fallback"] = rng.choice(("allowed", "none"))
    policy["price"] = {"core_decode_per_s": rng.choice((0.0, 50.0)), "edge_prefill_per_s": rng.choice((0.0, 50.0))}
    return policy


def _rules(rng: random.Random, nodes: tuple[NodeFacts, ...]) -> Any:
    rules = [_rule(rng, nodes) for _ in range(rng.randint(1, 2))]
    return rules[0] if len(rules) == 1 and rng.random() < 0.5 else rules


def _rule(rng: random.Random, nodes: tuple[NodeFacts, ...]) -> dict[str, Any]:
    if rng.random() < 0.1:
        return {"anywhere": True}
    places = [n.place for n in nodes]
    choices: dict[str, list[str]] = {
        "tiers": ["core", "edge"],
        "regions": list(REGIONS),
        "jurisdictions": list(JURISDICTIONS),
        "sites": ["own", *sorted({p.site for p in places})],
        "nodes": sorted(p.node_id for p in places),
    }
    keys = rng.sample(sorted(choices), rng.randint(1, 2))
    return {key: rng.sample(choices[key], rng.randint(1, min(2, len(choices[key])))) for key in keys}


def _wish(rng: random.Random, names: list[str]) -> Wish:
    kind = rng.random()
    if kind < 0.75:
        return Wish()
    if kind < 0.8:
        return Wish(node_id=rng.choice(names))
    return Wish(shape=rng.choice(tuple(PlanShape))) if kind < 0.9 else Wish(tier=rng.choice(tuple(Tier)))


async def decided(world: World, guard: Guard) -> tuple[Raised, Plan] | None:
    """The label and the plan, or None where the request is refused."""
    policy = parse_policy(world.policy_yaml, version=1)
    raised = await raise_label(guard, policy, policy.check_label(world.claimed or policy.default_label), world.text)
    request = PlacementRequest(
        tenant="acme", model=world.model, label=raised.label, prompt_tokens=world.prompt_tokens, max_tokens=100,
        expected_tokens=100, wish=world.wish, exclude=world.exclude,
    )  # fmt: skip
    snapshot = build_snapshot(world.nodes, entry_node_id=world.entry.node_id, version=1)
    rng = random.Random(world.seed)
    try:
        policy.check_model(world.model)
        outcome = decide(snapshot, request, policy, entry_site=world.entry.site, now_s=float("nan"), rng=rng)
    except MeshError:
        return None
    return None if isinstance(outcome, Refusal) else (raised, outcome)


def outcomes(world: World, raised: Raised, plan: Plan) -> Iterator[Happened]:
    """What would have happened with each number of failures: the choice runs, or it fails and a fallback does."""
    ways = (plan.choice, *plan.fallbacks)
    for i in range(len(ways)):
        yield _happened(world, raised, ways[: i + 1])


def _happened(world: World, raised: Raised, tried: tuple[Candidate, ...]) -> Happened:
    nodes = {p.node_id for way in tried for p in (way.prefill, way.decode)}
    moved = {way.decode.node_id for way in tried if way.prefill.node_id != way.decode.node_id}
    return Happened(
        entry=world.entry,
        claimed=world.claimed,
        effective=raised.label,
        model=world.model,
        prompt_at=frozenset(nodes - {world.entry.node_id}),
        kv_moved_to=frozenset(moved),
        places={n.place.node_id: n.place for n in world.nodes},
        found_kinds=frozenset(f.kind for f in raised.findings),
        not_looked_at=bool(raised.failure),
        fallbacks=len(tried) - 1,
    )
