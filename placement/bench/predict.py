"""`kvmesh bench predict`: how far off are predicted times, under steady load?

A node is simulated step by step, in virtual time: continuous batching with chunked prefill, a prefix cache that hits
now and then, step times of a made-up engine with noise, a few steps that take ten times as long, and a curve that is
not quite the model's (a step takes as long as the slower of reading the weights and computing, not their sum). Requests
arrive as a Poisson process. Beside it run the parts that a mesh has: the engine's own fit of its steps, a load report
every half second, the decision on the last report with what is in flight counted, and the entry's corrections. So the
predictions are those of the product; the engine is not. A node that claims to be `lie` times as fast as it is, and one
that slows down in the middle, show that measurement finds both out.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.node.engine import EngineLoad
from mesh.node.latency_model import LatencyCurve, LatencyModel
from placement.bench.decide import bench_node
from placement.decide.decide import decide
from placement.decide.types import Candidate, PlacementRequest, Plan
from placement.entry.mesh_view import NodeFacts
from placement.entry.snapshot_table import SnapshotTable
from placement.policy.model import parse_policy
from placement.predict.in_flight import Placed
from placement.predict.measured import Measured

_POLICY = "version: 1\nrules: {internal: {anywhere: true}}"
_CHUNK, _MOST_RUNNING, _REPORT_S = 256, 32, 0.5
_WARM_REQUESTS = 60  # before errors are counted
TRUE = LatencyCurve(
    prefill_base_s=6e-3, prefill_token_s=2.2e-4, prefill_growth_s=1.2e-8,
    decode_base_s=1.6e-2, decode_row_s=6e-4, decode_context_s=1.5e-7,
)  # fmt: skip
"""A small model on a few CPU cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One situation: load as a share of what the node can do, and what is wrong with it."""

    name: str
    load: float
    lie: float = 1.0  # it tells step times that are so many times shorter
    slows_to: float = 1.0  # from the middle on, steps take so many times longer
    steady: bool = True


SCENES = (
    Scene(name="light", load=0.3),
    Scene(name="half", load=0.5),
    Scene(name="busy", load=0.75),
    Scene(name="tells 4 times its speed", load=0.5, lie=4.0),
    Scene(name="slows down by half", load=0.4, slows_to=1.5, steady=False),
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    prompt: int
    cached: int
    output: int
    arrived_s: float
    choice: Candidate
    computed: int = 0
    made: int = 0
    first_s: float = math.nan


@dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    """The simulated engine."""

    rng: random.Random
    scene: Scene
    model: LatencyModel = field(default_factory=LatencyModel)
    waiting: deque[_Job] = field(default_factory=deque)
    running: list[_Job] = field(default_factory=list)
    slower: float = 1.0

    def step(self) -> tuple[float, list[_Job]]:
        """Compute one step: its duration, and the jobs that got a token."""
        while self.waiting and len(self.running) < _MOST_RUNNING:
            self.running.append(self.waiting.popleft())
        decoding = [j for j in self.running if j.computed == j.prompt]
        budget, prefill, attention, told = _CHUNK - len(decoding), 0, 0.0, list(decoding)
        for job in self.running:
            n = min(budget, job.prompt - job.computed)
            if n > 0:
                budget, prefill = budget - n, prefill + n
                attention += n * (job.computed + n / 2)
                job.computed += n
                told += [job] if job.computed == job.prompt else []
        context = sum(j.prompt + j.made for j in decoding)
        seconds = self._takes(prefill, attention, len(decoding), context)
        self.model.saw_step(
            prefill_tokens=prefill, prefill_attention=attention, decode_rows=len(decoding), decode_context=context,
            duration_s=seconds,
        )  # fmt: skip
        return seconds, told

    def _takes(self, prefill: int, attention: float, rows: int, context: int) -> float:
        beside_s = TRUE.decode_row_s * rows + TRUE.decode_context_s * context
        compute_s = TRUE.prefill_token_s * prefill + TRUE.prefill_growth_s * attention
        base_s = max(TRUE.decode_base_s, compute_s) if prefill else TRUE.decode_base_s
        noise = self.rng.lognormvariate(0.0, 0.06) * (10.0 if self.rng.random() < 0.002 else 1.0)
        return (base_s + beside_s) * noise * self.slower

    def load(self) -> EngineLoad:
        """What it reports; a liar's curve is shorter."""
        c, lie = self.model.curve, self.scene.lie
        told = replace(
            c, prefill_base_s=c.prefill_base_s / lie, prefill_token_s=c.prefill_token_s / lie,
            prefill_growth_s=c.prefill_growth_s / lie, decode_base_s=c.decode_base_s / lie,
            decode_row_s=c.decode_row_s / lie, decode_context_s=c.decode_context_s / lie,
        )  # fmt: skip
        to_prefill = sum(j.prompt - j.computed for j in (*self.waiting, *self.running))
        kv = sum(j.computed + j.made for j in self.running)
        return EngineLoad(
            running=len(self.running), waiting=len(self.waiting), waiting_prefill_tokens=to_prefill, kv_used_tokens=kv,
            kv_capacity_tokens=200_000, prefill_tokens_per_s=3000.0, decode_tokens_per_s=40.0, curve=told,
            context_tokens=kv, step_tokens=_CHUNK, most_running=_MOST_RUNNING,
        )  # fmt: skip


class PredictBench:
    """See the module's docstring."""

    name = "predict"
    question = "Predicted TTFT, time per token and completion: how far are they from what happens?"
    defaults: Mapping[str, Cell] = {"requests": 500, "prompt_tokens": 700, "output_tokens": 80, "seed": 1}

    async def run(self, context: BenchContext) -> BenchResult:
        """Simulate; under half a minute with the defaults."""
        rows, goals = [], []
        for number, scene in enumerate(SCENES):
            context.progress(number, len(SCENES), scene.name)
            await asyncio.sleep(0)
            row = simulate(scene, context)
            rows.append(row)
            if scene.steady:
                for kind in ("ttft", "tpot", "total"):
                    value = float(str(row[f"{kind}_median_error_ratio"]))
                    goals.append(Goal(name=f"{scene.name}: median error of {kind}, share", value=value, goal=0.15))
        note = "the engine is a simulation with noise and a curve of its own; fit, reports, decisions are the product's"
        return BenchResult(rows=tuple(rows), goals=tuple(goals), notes=(note,))


def simulate(scene: Scene, context: BenchContext) -> Mapping[str, Cell]:
    """Errors of one situation."""
    run = _Run(scene, context)
    run.go()
    row: dict[str, Cell] = {"scene": scene.name, "requests": len(run.errors["ttft"])}
    for kind in ("ttft", "tpot", "total"):
        errors = sorted(run.errors[kind])
        row[f"{kind}_median_error_ratio"] = round(median(errors), 3)
        row[f"{kind}_p90_error_ratio"] = round(errors[int(0.9 * len(errors))], 3)
    row["told_error_ratio"] = round(median(run.told), 3)
    return row | {"found_liar": bool(run.table.notes.liars)}


class _Run:
    """One node, one entry, virtual time."""

    def __init__(self, scene: Scene, context: BenchContext) -> None:
        self.rng = random.Random(context.count("seed"))
        self.scene, self.total = scene, context.count("requests")
        self.prompt_tokens, self.output_tokens = context.count("prompt_tokens"), context.count("output_tokens")
        self.node = _Node(rng=self.rng, scene=scene)
        self.facts = replace(bench_node("core-1", self.rng), rtt_s=0.0, load=self.node.load(), age_s=0.0)
        self.reported_s = 0.0
        self.table = SnapshotTable(self._read, entry_node_id="placement-1")
        self.table.stale("core-1")
        self.policy = parse_policy(_POLICY, version=1)
        self.errors: dict[str, list[float]] = {"ttft": [], "tpot": [], "total": []}
        self.told: list[float] = []
        self.done, self.now_s = 0, 0.0

    def _read(self, node_id: str) -> NodeFacts:
        return replace(self.facts, age_s=self.now_s - self.reported_s)

    def go(self) -> None:
        """Arrivals, reports and steps in the order of their times."""
        mean_s = self._service_s() / self.scene.load
        events: list[tuple[float, int, str]] = [(0.0, 0, "step"), (0.0, 1, "report"), (self.rng.random(), 2, "arrival")]
        number, arrived = 3, 0
        while self.done < self.total:
            self.now_s, _, what = heapq.heappop(events)
            if what == "arrival":
                self._arrive(f"r{arrived}")
                arrived += 1
                after_s = self.rng.expovariate(1.0 / mean_s)
            elif what == "report":
                self.facts, self.reported_s = replace(self.facts, load=self.node.load()), self.now_s
                self.table.stale("core-1")
                after_s = _REPORT_S
            else:
                self.node.slower = self.scene.slows_to if self.done > self.total / 2 else 1.0
                after_s = self._step()
            heapq.heappush(events, (self.now_s + after_s, number, what))
            number += 1

    def _service_s(self) -> float:
        """Engine time that a request takes, in a batch of a few."""
        n, out, rows = self.prompt_tokens, self.output_tokens, 8
        decode_s = out * (TRUE.decode_base_s / rows + TRUE.decode_row_s + TRUE.decode_context_s * (n + out / 2))
        return TRUE.prefill_s(0, n, chunk_tokens=_CHUNK) + decode_s

    def _arrive(self, key: str) -> None:
        prompt = min(6000, max(16, int(self.rng.lognormvariate(math.log(self.prompt_tokens), 0.7))))
        output = max(4, int(self.rng.expovariate(1.0 / self.output_tokens)))
        cached = prompt * 3 // 4 if self.rng.random() < 0.25 else 0
        request = PlacementRequest(
            tenant="bench", model="smollm2-135m-instruct", label="internal", prompt_tokens=prompt, max_tokens=512,
            expected_tokens=output, cached={"core-1": cached} if cached else {},
        )  # fmt: skip
        snapshot = self.table.snapshot(version=1, now_s=self.now_s)
        plan = decide(snapshot, request, self.policy, entry_site="dc1", now_s=self.now_s, rng=self.rng)
        assert isinstance(plan, Plan), "one node is always free here"
        job = _Job(
            prompt=prompt, cached=cached, output=output, arrived_s=self.now_s, choice=plan.choice, computed=cached
        )
        self.node.waiting.append(job)
        placed = Placed(runs=1, prefill_tokens=prompt - cached, kv_tokens=prompt)
        self.table.notes.placed("core-1", key, placed, self.now_s)

    def _step(self) -> float:
        if not self.node.waiting and not self.node.running:
            return 0.001
        seconds, told = self.node.step()
        ended_s = self.now_s + seconds
        for job in told:
            job.made += 1
            if job.made == 1:
                job.first_s = ended_s
            if job.made == job.output:
                self.node.running.remove(job)
                self._ended(job, ended_s)
        return seconds

    def _ended(self, job: _Job, ended_s: float) -> None:
        self.done += 1
        measured = Measured(
            ttft_s=job.first_s - job.arrived_s, total_s=ended_s - job.arrived_s, tokens=job.output,
            prompt_tokens=job.prompt, cached_tokens=job.cached,
        )  # fmt: skip
        ttft, tpot = measured.ratios(job.choice)
        self.table.notes.answered("core-1", ttft_ratio=ttft, tpot_ratio=tpot, now_s=ended_s)
        if self.done > _WARM_REQUESTS:
            self.told.append(job.choice.error_ratio)
            for kind, error_ratio in measured.errors(job.choice):
                self.errors[kind.value].append(error_ratio)


BENCH = PredictBench()
"""Entry point of `kvmesh.benches`."""
