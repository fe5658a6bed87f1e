"""Snapshots to sites as what changed: the other side always has the whole, and most of it travels once."""

from __future__ import annotations

import random

import pytest

from mesh.errors import RevisionMismatch
from mesh.rpc.uplink.snapshot_delta import HeardSnapshot, ToldSnapshot
from mesh.v1 import admin_pb2

MODEL = admin_pb2.NodeModel(id="m", layout_hash="h" * 64, digest="d" * 64)


def view(node_id: str, age_s: float = 0.0, **fields: object) -> admin_pb2.NodeView:
    return admin_pb2.NodeView(node_id=node_id, tier="core", age_s=age_s, models=[MODEL], **fields)  # type: ignore[arg-type]


def snapshot(*nodes: admin_pb2.NodeView, version: int = 1) -> admin_pb2.Snapshot:
    return admin_pb2.Snapshot(version=version, nodes=nodes, registry_age_s=0.5)


def test_the_first_is_whole_and_what_does_not_change_is_not_told_again() -> None:
    told, heard = ToldSnapshot(), HeardSnapshot()
    first = told.next(snapshot(view("a"), view("b", 7.0)), 100.0)
    assert not first.is_delta
    assert len(first.nodes) == 2
    heard.take(first, 50.0)
    second = told.next(snapshot(view("a", running=3), view("b", 9.0), version=2), 102.0)
    assert second.is_delta
    assert [(n.node_id, n.models_as_before, len(n.models)) for n in second.nodes] == [("a", True, 0)]
    whole = heard.take(second, 52.0)
    assert whole.version == 2
    assert [(n.node_id, n.running, n.age_s, list(n.models)) for n in whole.nodes] == [
        ("a", 3, 0.0, [MODEL]), ("b", 0, 9.0, [MODEL]),
    ]  # fmt: skip
    assert len(second.SerializeToString()) < len(first.SerializeToString()) / 3


def test_nodes_come_go_and_change_their_models() -> None:
    told, heard = ToldSnapshot(), HeardSnapshot()
    heard.take(told.next(snapshot(view("a"), view("b")), 0.0), 0.0)
    changed = view("a")
    changed.models[0].weights_dtype = "int8"
    message = told.next(snapshot(changed, view("c")), 1.0)
    assert message.gone == ["b"]
    whole = heard.take(message, 1.0)
    assert [(n.node_id, n.models[0].weights_dtype) for n in whole.nodes] == [("a", "int8"), ("c", "")]


def test_a_delta_that_is_missed_is_an_error() -> None:
    told, heard = ToldSnapshot(), HeardSnapshot()
    heard.take(told.next(snapshot(view("a")), 0.0), 0.0)
    told.next(snapshot(view("a", running=1)), 1.0)
    with pytest.raises(RevisionMismatch):
        heard.take(told.next(snapshot(view("a", running=2)), 2.0), 2.0)


def test_a_whole_one_of_an_older_placement_service_is_taken() -> None:
    heard = HeardSnapshot()
    for version in (1, 2):
        assert heard.take(snapshot(view("a"), version=version), 0.0).version == version


def test_models_that_were_never_told_are_an_error() -> None:
    heard = HeardSnapshot()
    bad = admin_pb2.Snapshot(sequence=1, nodes=[admin_pb2.NodeView(node_id="a", models_as_before=True)])
    with pytest.raises(RevisionMismatch):
        heard.take(bad, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_other_side_has_what_is_so(seed: int) -> None:
    """Random lives: fields equal, ages within what is no news."""
    rng = random.Random(seed)
    told, heard = ToldSnapshot(), HeardSnapshot()
    ages = {f"n{i}": rng.uniform(0, 5) for i in range(6)}
    running = dict.fromkeys(ages, 0)
    now_s = 0.0
    for _ in range(60):
        passed_s = rng.uniform(0.1, 1.5)
        now_s += passed_s
        for name in list(ages):
            ages[name] += passed_s * rng.choice((1.0, 1.0, 0.9))
            if rng.random() < 0.2:
                ages[name], running[name] = 0.0, running[name] + 1
        if rng.random() < 0.1 and len(ages) > 1:
            del ages[rng.choice(list(ages))]
        if rng.random() < 0.1:
            name = f"n{rng.randrange(9)}"
            ages[name], running[name] = 0.0, 0
        now = snapshot(*(view(name, ages[name], running=running[name]) for name in sorted(ages)))
        expected = {node.node_id: (node.running, node.age_s) for node in now.nodes}
        whole = heard.take(told.next(now, now_s), now_s + 1_000.0)
        assert [n.node_id for n in whole.nodes] == sorted(expected)
        for node in whole.nodes:
            assert node.running == expected[node.node_id][0]
            assert node.age_s == pytest.approx(expected[node.node_id][1], abs=0.26)
