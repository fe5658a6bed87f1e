"""What a simulated run depends on. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.sim.mesh import SimMesh
from placement.sim.net import Cut
from placement.sim.own_router import OwnSpec
from placement.sim.slo import SLO, Slo
from placement.sim.traces import TraceRequest

OWN = "kvmesh"
"""Name of our own router, beside those of BASELINES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDown:
    """A node loses everything at `start_s` and is up again, empty, at `end_s`."""

    node_id: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleMetrics:
    """A node goes on, but nothing is heard of its load in [start_s, end_s)."""

    node_id: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, and when."""

    down: tuple[NodeDown, ...] = ()
    stale: tuple[StaleMetrics, ...] = ()
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a run depends on. `report_s`: pace of load reports; `push_s`: of snapshots to remote entries;
    `detect_s`: after how long a link is known to be cut, and a node to be down."""

    mesh: SimMesh
    trace: Sequence[TraceRequest]
    router: str
    own: OwnSpec
    slo: Slo = SLO
    faults: Faults = Faults()
    seed: int = 1
    noise: float = 0.05
    report_s: float = 0.5
    push_s: float = 1.0
    detect_s: float = 3.0
