"""Small meshes and traces for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from placement.policy.model import parse_policy
from placement.sim.mesh import MeshSpec, SimMesh, make_mesh
from placement.sim.own_router import OwnSpec
from placement.sim.scenario import OWN, Scenario
from placement.sim.slo import SLO
from placement.sim.traces import Synthetic, TraceRequest, synthetic

POLICY = parse_policy("version: 1\nrules:\n  public: {anywhere: true}\n  internal: {sites: [own]}\n", version=1)
EDGES = MeshSpec(name="edges", hubs=1, per_hub=2, core="h100", sites=3)
CORES = MeshSpec(name="cores", hubs=1, per_hub=3, core="a100")


def mesh(spec: MeshSpec = EDGES) -> SimMesh:
    return make_mesh(spec, seed=3)


def trace(n: int = 150, rate: float = 6.0, **changes: object) -> list[TraceRequest]:
    return synthetic(Synthetic(n_requests=n, rate_per_s=rate, seed=5, **changes))  # type: ignore[arg-type]


def scenario(
    requests: Sequence[TraceRequest], *, router: str = OWN, on: SimMesh | None = None, **more: object
) -> Scenario:
    return Scenario(
        mesh=on or mesh(), trace=requests, router=router, own=OwnSpec(policy=POLICY, slo=SLO), seed=7, **more
    )  # type: ignore[arg-type]


def poisson(n: int, rate: float, seed: int) -> list[float]:
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(n):
        now += rng.expovariate(rate)
        times.append(now)
    return times
