"""The snapshot that is kept up to date is the one that would be built anew."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np

from mesh.node.engine import EngineLoad
from placement.decide.types import Snapshot
from placement.entry.mesh_view import NodeFacts, NodeState, build_snapshot
from placement.entry.snapshot_table import SnapshotTable
from tests.fakes.mesh import place_of
from tests.placement.entry.test_mesh_view import CORE, EDGE, LOAD, MODEL


class World:
    """Facts by node; counts how often the table asks."""

    def __init__(self, *nodes: NodeFacts) -> None:
        self.nodes = {node.place.node_id: node for node in nodes}
        self.reads: list[str] = []
        self.now_s = 0.0
        self.heard_s: dict[str, float] = {}  # of nodes whose age grows
        self.table = SnapshotTable(self.read, entry_node_id="paris")
        for node_id in self.nodes:
            self.table.stale(node_id)

    def read(self, node_id: str) -> NodeFacts | None:
        self.reads.append(node_id)
        node = self.nodes.get(node_id)
        if node is None or node_id not in self.heard_s:
            return node
        return replace(node, age_s=self.now_s - self.heard_s[node_id])

    def set(self, node: NodeFacts) -> None:
        self.nodes[node.place.node_id] = node
        self.table.stale(node.place.node_id)


def same(a: Snapshot, b: Snapshot) -> None:
    for field in fields(Snapshot):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            np.testing.assert_allclose(left, right, atol=1e-6, err_msg=field.name)
            assert left.dtype == right.dtype
        elif field.name in ("version", "places", "entry_row", "model_ids"):
            assert left == right, field.name


def test_nothing_is_read_again_while_nothing_changes() -> None:
    world = World(CORE, EDGE)
    first = world.table.snapshot(version=1, now_s=10.0)
    assert sorted(world.reads) == ["core-1", "paris"]
    assert world.table.snapshot(version=1, now_s=11.0) is first
    assert len(world.reads) == 2
    assert first.made_s == 10.0  # from which a decision knows how old the figures are


def test_only_what_changed_is_read_and_written() -> None:
    world = World(CORE, EDGE)
    first = world.table.snapshot(version=1, now_s=10.0)
    world.reads.clear()
    world.set(replace(CORE, load=replace(LOAD, running=9), age_s=0.0))
    second = world.table.snapshot(version=1, now_s=12.0)
    assert world.reads == ["core-1"]
    assert (first.running.tolist(), second.running.tolist()) == ([1, 0], [9, 0])  # who has the old one keeps it
    assert second.age_s.tolist() == [0.0, 2.0]  # the other has aged
    assert second.waiting is first.waiting


def test_a_node_that_is_gone_or_new_or_has_other_models() -> None:
    world = World(CORE, EDGE)
    world.table.snapshot(version=1, now_s=0.0)
    del world.nodes["paris"]
    world.table.stale("paris")
    world.table.stale("never-there")
    gone = world.table.snapshot(version=2, now_s=1.0)
    assert ([p.node_id for p in gone.places], gone.entry_row, gone.version) == (["core-1"], -1, 2)
    assert gone.age_s.tolist() == [1.5]
    world.set(replace(CORE, models=(MODEL, replace(MODEL, model_id="more"))))
    assert world.table.snapshot(version=3, now_s=1.0).model_ids == ("more", "toy")
    world.set(EDGE)
    assert world.table.snapshot(version=4, now_s=1.0).entry_row == 1


def test_after_any_changes_it_is_what_would_be_built_anew() -> None:
    rng = random.Random(3)
    names = ["core-1", "core-2", "paris", "osaka", "lima"]
    world = World()
    for step in range(300):
        now_s, name = step * 0.5, rng.choice(names)
        world.now_s = now_s
        if rng.random() < 0.1:
            world.nodes.pop(name, None)
            world.table.stale(name)
        else:
            load = EngineLoad(
                running=rng.randrange(5), waiting=rng.randrange(5), waiting_prefill_tokens=rng.randrange(99),
                kv_used_tokens=rng.randrange(500), kv_capacity_tokens=500, prefill_tokens_per_s=rng.random(),
                decode_tokens_per_s=rng.random(),
            )  # fmt: skip
            models = (MODEL,) if rng.random() < 0.8 else (replace(MODEL, model_id="b"),)
            world.set(
                NodeFacts(
                    place=place_of(name),
                    address="",
                    state=rng.choice(list(NodeState)),
                    models=models,
                    load=load,
                    draining=rng.random() < 0.5,
                    reachable=rng.random() < 0.5,
                    rtt_s=rng.choice((None, rng.random())),
                )
            )
            world.heard_s[name] = now_s
        if rng.random() < 0.6:
            got = world.table.snapshot(version=step, now_s=now_s)
            aged = [replace(n, age_s=now_s - world.heard_s[n.place.node_id]) for n in world.nodes.values()]
            same(got, build_snapshot(aged, entry_node_id="paris", version=step))
