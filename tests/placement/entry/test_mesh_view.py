"""Facts of nodes over the wire and into the snapshot that decisions read."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mesh.node.engine import EngineLoad
from placement.entry.mesh_view import (
    IDLE,
    ModelFacts,
    NodeFacts,
    NodeState,
    build_snapshot,
    from_wire,
    models_from_wire,
    models_to_wire,
    to_wire,
)
from tests.fakes.mesh import place_of

MODEL = ModelFacts(
    model_id="toy", weights_dtype="Q4", max_context_tokens=512, layout_hash="ab", weights_lineage="l", digest="cd",
    kv_bytes_per_token=100,
)  # fmt: skip
LOAD = EngineLoad(
    running=1, waiting=2, waiting_prefill_tokens=30, kv_used_tokens=40, kv_capacity_tokens=500,
    prefill_tokens_per_s=64.0, decode_tokens_per_s=8.0,
)  # fmt: skip
CORE = NodeFacts(
    place=place_of("core-1"), address="10.0.0.1:7", state=NodeState.READY, models=(MODEL,), load=LOAD, age_s=0.5,
    rtt_s=0.25, goodput_bytes_per_s=1024.0,
)  # fmt: skip
EDGE = NodeFacts(
    place=place_of("paris"), address="", state=NodeState.DISCONNECTED, models=(replace(MODEL, model_id="b"),),
    draining=True, reachable=False,
)  # fmt: skip


def test_a_snapshot_has_a_row_per_node_by_id() -> None:
    snapshot = build_snapshot([EDGE, CORE], entry_node_id="paris", version=7)
    assert [p.node_id for p in snapshot.places] == ["core-1", "paris"]
    assert (snapshot.version, snapshot.entry_row, snapshot.model_ids) == (7, 1, ("b", "toy"))
    np.testing.assert_array_equal(snapshot.models, [[False, True], [True, False]])
    columns = {
        "tier_edge": [False, True], "ready": [True, False], "draining": [False, True], "reachable": [True, False],
        "running": [1, 0], "waiting": [2, 0], "waiting_prefill_tokens": [30, 0], "kv_free_tokens": [460, 0],
        "kv_capacity_tokens": [500, 0], "max_context_tokens": [512, 512], "kv_bytes_per_token": [100, 100],
        "prefill_tokens_per_s": [64, 0], "decode_tokens_per_s": [8, 0], "age_s": [0.5, 0],
        "rtt_s": [0.25, math.nan], "goodput_bytes_per_s": [1024, math.nan],
    }  # fmt: skip
    for name, want in columns.items():
        np.testing.assert_array_equal(getattr(snapshot, name), want, err_msg=name)


def test_an_entry_without_an_engine_has_no_row() -> None:
    assert build_snapshot([CORE], entry_node_id="placement-1", version=1).entry_row == -1
    assert build_snapshot([], entry_node_id="placement-1", version=1).n_nodes == 0


def test_facts_survive_the_wire_but_for_the_pusher_s_links() -> None:
    wire = to_wire([EDGE, CORE], version=3, registry_age_s=1.5, made_unix_s=2.5)
    assert (wire.version, wire.registry_age_s, wire.made_unix_s) == (3, 1.5, 2.5)
    core, edge = from_wire(wire, mesh="toy")
    assert core == replace(CORE, rtt_s=None, goodput_bytes_per_s=None)
    assert edge == replace(EDGE, reachable=True, load=IDLE)
    assert (wire.nodes[0].rtt_s, wire.nodes[0].goodput_bytes_per_s) == (0.25, 1024.0)


def test_models_survive_the_wire() -> None:
    assert models_from_wire(models_to_wire((MODEL,))) == (MODEL,)


@pytest.mark.parametrize(
    ("field", "value"), [("tier", "moon"), ("state", "dreaming"), ("site", ""), ("node_id", "a b")]
)
def test_nodes_of_a_kind_that_is_not_known_here_are_left_out(field: str, value: str) -> None:
    wire = to_wire([CORE, EDGE], version=1, registry_age_s=0, made_unix_s=0)
    setattr(wire.nodes[1], field, value)
    assert [n.place.node_id for n in from_wire(wire, mesh="toy")] == ["core-1"]
