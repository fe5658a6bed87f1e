"""`kvmesh bench sim`: how many requests are answered in time, by our decisions and by rivals' formulae?

A comparison of models, not a measurement of any product: nodes are published GPU profiles (placement.sim.profiles),
rivals are their published formulae (placement.sim.routers). Our side is the real `decide`, its notes and memory and the
real plan runner. The SLO is fixed (placement.sim.slo). Capacity is the highest rate of arrivals at which the best rival
serves 99 % within it; then every router is run at shares of it. At 90 % of capacity the best rival serves nearly all
by this definition, so that nobody can be 10 % better there.

`trace`: a Mooncake (.jsonl) or Azure (.csv) file; empty: synthetic conversations. `arrivals`: a file of which only the
times count. `rate`: requests/s that count as capacity; 0: search it.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest
from placement.policy.model import parse_policy
from placement.sim.capacity import Capacity, best_capacity
from placement.sim.mesh import SimMesh, make_mesh, mesh_spec
from placement.sim.own_router import OwnSpec
from placement.sim.results import Summary, summarise
from placement.sim.routers import BASELINES
from placement.sim.scenario import OWN, Scenario
from placement.sim.simulation import simulate
from placement.sim.slo import SLO
from placement.sim.traces import (
    Synthetic,
    TraceRequest,
    mean_rate,
    read_trace,
    repeated,
    scaled,
    synthetic,
    with_arrivals,
)

POLICY = "version: 1\nrules:\n  public: {anywhere: true}\n"
_GAIN = 1.10
_SEARCH_ORDER = ("dynamo", "llm-d", "sglang", "cloud-only", "least-loaded", "round-robin", "edge-only")


class SimBench:
    """See the module's docstring."""

    name = "sim"
    question = "Model comparison: requests answered within the SLO, by router and load"
    defaults: Mapping[str, Cell] = {
        "mesh": "cluster",
        "trace": "",
        "arrivals": "",
        "requests": 0,  # of the trace; 0: all. More than it has: it is repeated
        "routers": ",".join((OWN, *_SEARCH_ORDER)),
        "loads": "0.7,0.9,1.1",
        "rate": 0.0,
        "seed": 1,
        "plot": "",  # goodput over load, as PNG
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Simulate; about 20 minutes for the conversation trace over all routers, most of it the search."""
        if context.text("plot") and importlib.util.find_spec("matplotlib") is None:
            raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot")
        runs = _Runs(context)
        found = await runs.capacity()
        rows: list[Mapping[str, Cell]] = []
        summaries: dict[tuple[float, str], Summary] = {}
        for load in _numbers(context, "loads"):
            for router in runs.routers:
                summary = await runs.summary(router, load * found.rate_per_s)
                summaries[load, router] = summary
                rows.append(_row(load, load * found.rate_per_s, router, summary))
        notes = [
            "a comparison of models: nodes are published GPU profiles, rivals their published formulae",
            f"SLO: first token within {SLO.ttft_s:g} s + {SLO.ttft_token_s * 1000:g} ms a prompt token, then "
            f"{SLO.tpot_s * 1000:g} ms a token; refused and failed requests are misses",
            f"capacity: {found.rate_per_s:.2f} requests/s" + (f", of {found.router}" if found.router else ", as set"),
            *runs.notes,
        ]
        if path := context.text("plot"):
            _plot(rows, Path(path))
            notes.append(f"plot: {path}")
        return BenchResult(rows=tuple(rows), goals=tuple(_goals(summaries)), notes=tuple(notes))


class _Runs:
    """Runs of one invocation; each (router, rate) once."""

    def __init__(self, context: BenchContext) -> None:
        self._context = context
        self.mesh: SimMesh = make_mesh(mesh_spec(context.text("mesh")), seed=context.count("seed"))
        self._trace = _trace(context)
        self._done: dict[tuple[str, float], Summary] = {}
        self.notes: list[str] = []
        self.routers = self._known(context.text("routers").split(","))

    def _known(self, names: Sequence[str]) -> list[str]:
        for name in names:
            if name != OWN and name not in BASELINES:
                raise InvalidRequest(f"no router {name!r}; there are {', '.join((OWN, *BASELINES))}", field="routers")
        has_edges = any(
            spec.place.site in self.mesh.entries for spec in self.mesh.nodes if spec.place.tier.value == "edge"
        )
        if "edge-only" in names and not has_edges:
            self.notes.append(f"edge-only: mesh {self.mesh.name} has no edge nodes")
        return [name for name in names if name != "edge-only" or has_edges]

    async def capacity(self) -> Capacity:
        if rate := self._context.number("rate"):
            return Capacity(router="", rate_per_s=rate)
        rivals = [name for name in _SEARCH_ORDER if name in self.routers]
        if not rivals:
            raise InvalidRequest(
                "capacity is that of the best rival: give one among the routers, or a rate", field="rate"
            )

        def goodput(router: str, rate_per_s: float) -> float:
            return self._run(router, rate_per_s).goodput_ratio

        start = mean_rate(self._trace)
        return await asyncio.to_thread(lambda: best_capacity(goodput, rivals, start_per_s=start))

    async def summary(self, router: str, rate_per_s: float) -> Summary:
        return await asyncio.to_thread(self._run, router, rate_per_s)

    def _run(self, router: str, rate_per_s: float) -> Summary:
        key = router, rate_per_s
        if key not in self._done:
            what = f"{router}, {rate_per_s:.2f} requests/s"
            scenario = Scenario(
                mesh=self.mesh,
                trace=scaled(self._trace, rate_per_s),
                router=router,
                own=OwnSpec(policy=parse_policy(POLICY, version=1), slo=SLO),
                seed=self._context.count("seed"),
            )
            n = len(self._trace)

            def progress(done: int) -> None:
                if done % 256 == 0 or done == n:
                    self._context.progress(done, n, what)

            self._done[key] = summarise(simulate(scenario, progress))
        return self._done[key]


def _trace(context: BenchContext) -> list[TraceRequest]:
    n = context.count("requests")
    if not 0 <= n <= 5_000_000:
        raise InvalidRequest(f"requests must be 0 (all) to 5,000,000, got {n}", field="requests")
    if path := context.text("trace"):
        trace = read_trace(Path(path))
    else:
        trace = synthetic(Synthetic(n_requests=n or 2000, seed=context.count("seed")))
    if n:
        trace = trace[:n] if n <= len(trace) else repeated(trace, n)
    if arrivals := context.text("arrivals"):
        trace = with_arrivals(trace, read_trace(Path(arrivals)))
    return trace


def _numbers(context: BenchContext, key: str) -> list[float]:
    try:
        values = [float(part) for part in context.text(key).split(",")]
    except ValueError:
        raise InvalidRequest(f"{key} are numbers like 0.7,0.9, got {context.text(key)!r}", field="set") from None
    if any(not 0 < value < 100 for value in values):
        raise InvalidRequest(f"{key} are shares of capacity above 0, got {context.text(key)!r}", field="set")
    return values


def _row(load: float, rate_per_s: float, router: str, s: Summary) -> Mapping[str, Cell]:
    return {
        "router": router,
        "load": round(load, 3),
        "requests_per_s": round(rate_per_s, 3),
        "goodput_ratio": round(s.goodput_ratio, 4),
        "ttft_p50_s": round(s.ttft_p50_s, 3),
        "ttft_p95_s": round(s.ttft_p95_s, 3),
        "tpot_p95_ms": round(s.tpot_p95_s * 1000, 1),
        "hit_ratio": round(s.hit_ratio, 3),
        "refused_ratio": round(s.refused_ratio, 4),
        "failed_ratio": round(s.failed_ratio, 4),
        "fallbacks": s.fallbacks,
        "shapes": ", ".join(f"{name} {count}" for name, count in s.shapes),
    }


def _goals(summaries: Mapping[tuple[float, str], Summary]) -> list[Goal]:
    goals = []
    for load in sorted({load for load, _ in summaries}):
        rivals = {name: s for (at, name), s in summaries.items() if at == load and name != OWN}
        own = summaries.get((load, OWN))
        if own is None or not rivals:
            continue
        best = max(rivals.values(), key=lambda s: s.goodput_ratio)
        wanted = 1.0 if load < 0.8 else _GAIN
        goals.append(
            Goal(
                name=f"load {load:g}: goodput to that of the best rival, ratio",
                value=own.goodput_ratio / max(best.goodput_ratio, 1e-9),
                goal=wanted,
                direction=Direction.AT_LEAST,
            )
        )
        goals.append(
            Goal(
                name=f"load {load:g}: p95 TTFT to that rival's, ratio", value=own.ttft_p95_s / best.ttft_p95_s, goal=1.0
            )
        )
    return goals


def _plot(rows: Sequence[Mapping[str, Cell]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5))
    panels = figure.subplots(1, 2)
    for axes, column, words in (
        (panels[0], "goodput_ratio", "requests within the SLO, of all"),
        (panels[1], "ttft_p95_s", "p95 TTFT of those answered, s"),
    ):
        for router in dict.fromkeys(str(row["router"]) for row in rows):
            points = [(float(str(r["load"])), float(str(r[column]))) for r in rows if r["router"] == router]
            style = {"linewidth": 2.5, "color": "black"} if router == OWN else {"linewidth": 1.0}
            axes.plot(*zip(*points, strict=True), marker="o", label=router, **style)
        axes.set_xlabel("load, of the best rival's capacity")
        axes.set_ylabel(words)
        axes.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[0].legend(fontsize=8)
    figure.suptitle("Model comparison: published GPU profiles and router formulae")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCH = SimBench()
"""Entry point of `kvmesh.benches`."""
