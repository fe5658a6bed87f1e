"""Who should leave a node, and whether another one is any better."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from placement.decide.moves import Progress
from placement.decide.relocate import Departure, Pressure, Resident, departures, is_relief
from placement.decide.types import Snapshot
from tests.placement.decide.meshes import core, snapshot


def mesh(**columns: Any) -> Snapshot:
    """Rows 0 and 1 are core-1 and core-2."""
    made = snapshot([core("core-1"), core("core-2")])
    return replace(made, **{name: np.array(values) for name, values in columns.items()})


def resident(name: str = "r", **changes: Any) -> Resident:
    values: dict[str, Any] = {
        "request_id": name, "node_id": "core-1", "progress": Progress(tokens=100, left_tokens=100), "rtt_s": 0.01,
        "tried_ago_s": math.inf,
    }  # fmt: skip
    return Resident(**{**values, **changes})


def leaving(made: Snapshot, *residents: Resident, **node_tried_ago_s: float) -> list[tuple[str, Pressure]]:
    tried = {name.replace("_", "-"): ago for name, ago in node_tried_ago_s.items()}
    found = departures(made, residents, node_tried_ago_s=tried)
    assert all(isinstance(d, Departure) for d in found)
    return [(d.request_id, d.pressure) for d in found]


def test_nobody_leaves_a_node_that_is_well() -> None:
    assert leaving(mesh(), resident()) == []


def test_all_leave_a_node_that_drains() -> None:
    made = mesh(draining=[True, False])
    both = (resident("a"), resident("b"), resident("c", node_id="core-2"))
    assert leaving(made, *both) == [("a", Pressure.DRAIN), ("b", Pressure.DRAIN)]


def test_not_again_at_once_and_not_for_the_last_few_tokens() -> None:
    made = mesh(draining=[True, False])
    nearly_done = Progress(tokens=100, left_tokens=3)
    assert leaving(made, resident("a", tried_ago_s=1.0), resident("b", progress=nearly_done)) == []
    assert leaving(made, resident("c", node_id="gone")) == []


def test_one_leaves_an_overloaded_node_the_one_with_the_most_to_do() -> None:
    full = mesh(waiting=[1, 0], kv_capacity_tokens=[1000, 1000], kv_free_tokens=[50, 900])
    longer = resident("b", progress=Progress(tokens=50, left_tokens=400))
    assert leaving(full, resident("a"), longer) == [("b", Pressure.OVERLOAD)]
    assert leaving(full, resident("a"), longer, core_1=0.5) == []


@pytest.mark.parametrize(
    ("columns", "leaves"),
    [
        ({"waiting": [0, 0], "kv_capacity_tokens": [1000, 1000], "kv_free_tokens": [10, 900]}, False),
        ({"waiting": [1, 0], "kv_capacity_tokens": [1000, 1000], "kv_free_tokens": [500, 900]}, False),
        ({"waiting": [4, 0], "kv_capacity_tokens": [1000, 1000], "kv_free_tokens": [500, 900]}, True),
        ({"waiting": [4, 0], "age_s": [60.0, 0.0]}, False),
    ],
)
def test_what_overload_is(columns: dict[str, Any], leaves: bool) -> None:
    assert bool(leaving(mesh(**columns), resident())) is leaves


@pytest.mark.parametrize(
    ("then_s", "now_s", "leaves"),
    [(0.01, 0.5, True), (0.01, 0.05, False), (0.2, 0.5, False), (0.2, 0.9, True), (math.nan, 9.0, False)],
)
def test_a_link_that_got_much_worse(then_s: float, now_s: float, leaves: bool) -> None:
    made = mesh(rtt_s=[now_s, 0.01])
    assert leaving(made, resident(rtt_s=then_s)) == ([("r", Pressure.LINK)] if leaves else [])
    assert leaving(mesh(rtt_s=[math.nan, 0.01]), resident(rtt_s=then_s)) == []


def test_what_relief_is() -> None:
    made = mesh(waiting=[4, 1], rtt_s=[0.5, 0.4])
    assert is_relief(made, 0, 1, Pressure.DRAIN)
    assert not is_relief(made, 0, 1, Pressure.OVERLOAD)
    assert not is_relief(made, 0, 1, Pressure.LINK)
    better = mesh(waiting=[4, 0], rtt_s=[0.5, 0.1])
    assert is_relief(better, 0, 1, Pressure.OVERLOAD)
    assert is_relief(better, 0, 1, Pressure.LINK)
    assert is_relief(replace(made, entry_row=1), 0, 1, Pressure.LINK)
