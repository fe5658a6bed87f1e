"""`kvmesh bench disagg`: two core nodes that do both, against one that prefills and one that decodes.

Real processes: a placement service and two core nodes with one thread each, whose roles are changed while they run, so
that both ways are measured on the same processes, round by round in turn, with the same arrivals. The load is open:
requests come when they come (Poisson), long prompts with short answers mixed with short chats. The objective is fixed
before any load: time to first token and time per token at most so many times what a request of its kind takes alone,
on the two nodes that do both. Goodput counts requests within it over all requests that came: what was refused or ran
into its deadline was missed, not left out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.client import MeshClient
from mesh.client_types import Decision, Tokens
from mesh.errors import InvalidRequest, MeshError, NodeUnreachable
from mesh.local.commands import make_plan
from mesh.local.local_mesh import LocalMesh
from mesh.model.catalogue import DEMO_MODEL

_VOCAB_RANGE = (1000, 40_000)  # ordinary tokens of the demo model
_POLICY = "version: 1\nlabels: {order: [public], default: public}\nrules: {public: {tiers: [core]}}\n"
_MODES: Mapping[str, tuple[str, str]] = {"colocated": ("both", "both"), "apart": ("prefill", "decode")}
_ROLE_TIMEOUT_S = 10.0
_ALONE_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request; `share` of all."""

    name: str
    prompt_tokens: int
    output_tokens: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that comes at `at_s` from the start of a round."""

    at_s: float
    kind: Kind
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request, seconds; `error` is the reason word of one that got no answer."""

    kind: str
    ttft_s: float = math.nan
    tpot_s: float = math.nan
    shape: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The most that a request of a kind may take, seconds."""

    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]

    def met(self, outcome: Outcome) -> bool:
        """Whether the request was answered in time; a refused one was not."""
        in_time = outcome.ttft_s <= self.ttft_s[outcome.kind] and outcome.tpot_s <= self.tpot_s[outcome.kind]
        return not outcome.error and in_time


class DisaggBench:
    """See the module's docstring."""

    name = "disagg"
    question = "Prefill and decode apart against together: which share of all requests is within its objective?"
    defaults: Mapping[str, Cell] = {
        "long_tokens": 1024,
        "long_output": 8,
        "long_share": 0.25,
        "short_tokens": 64,
        "short_output": 48,
        "loads": "0.3,0.6,0.9",  # of what two nodes could do at best, by what one request takes alone
        "requests": 24,  # in each round
        "rounds": 2,
        "ttft_factor": 5.0,
        "tpot_factor": 2.0,
        "deadline_s": 60.0,
        "core_dtype": "bf16",  # the compiled step, where the CPU has one
        "plot": "",  # write goodput over load here, as PNG
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about ten minutes with the defaults on two cores."""
        kinds, loads = _kinds(context), _loads(context)
        if context.text("plot") and importlib.util.find_spec("matplotlib") is None:
            raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot")
        rng = random.Random(context.count("seed"))
        rounds, count = context.count("rounds"), context.count("requests")
        found: dict[tuple[str, float], list[Outcome]] = {(mode, load): [] for mode in _MODES for load in loads}
        total, done = rounds * len(loads) * len(_MODES), 0
        async with _two_nodes(context.text("core_dtype")) as nodes:
            context.progress(0, total, "alone")
            await nodes.become("colocated")
            alone = await _alone(nodes, kinds, rng)
            objective = _objective(alone, context)
            rate_at_full = 2.0 / sum(k.share * _work_s(alone[k.name], k) for k in kinds)
            for number in range(rounds):
                for load in loads:
                    arrivals = plan_arrivals(kinds, count, load * rate_at_full, rng)
                    for mode in (tuple(_MODES), tuple(_MODES)[::-1])[number % 2]:
                        context.progress(done, total, f"{mode}, load {load:g}")
                        await nodes.become(mode)
                        found[mode, load] += await _play(nodes.client, arrivals, context.number("deadline_s"))
                        done += 1
        rows = tuple(_row(mode, load, outcomes, objective) for (mode, load), outcomes in found.items())
        if path := context.text("plot"):
            _plot(rows, Path(path))
        return BenchResult(rows=rows, goals=_goals(rows, loads), notes=_notes(objective, rate_at_full, kinds))


@dataclass(slots=True)
class _Nodes:
    """The mesh; `client` asks its entry, `admin` gives roles."""

    client: MeshClient
    admin: MeshClient

    async def become(self, mode: str) -> None:
        """Give the two nodes the roles of a mode; returns when placement sees them."""
        roles = dict(zip(("core-1", "core-2"), _MODES[mode], strict=True))
        for node_id, role in roles.items():
            await self.admin.set_node_role(node_id, role)
        async with asyncio.timeout(_ROLE_TIMEOUT_S):
            while {n.node_id: n.role for n in (await self.admin.snapshot()).nodes} != roles:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@asynccontextmanager
async def _two_nodes(dtype: str) -> AsyncIterator[_Nodes]:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        plan = make_plan(core=2, edge="", state=Path(folder), model=DEMO_MODEL, device="cpu", core_threads=1)
        plan = replace(plan, core_dtype=dtype)
        async with (
            LocalMesh.running(plan, lambda line: None) as (_, ready),
            MeshClient(ready.core.grpc, ready.api_key) as client,
            MeshClient(ready.core.grpc, ready.admin_key) as admin,
        ):
            await admin.put_policy("dev", _POLICY)
            yield _Nodes(client, admin)


def plan_arrivals(kinds: Sequence[Kind], count: int, rate_per_s: float, rng: random.Random) -> list[Arrival]:
    """`count` requests of Poisson arrivals, each kind as often as its share says, prompts that nobody has seen."""
    drawn = [kind for kind in kinds for _ in range(max(1, round(kind.share * count)))]
    rng.shuffle(drawn)
    at_s, arrivals = 0.0, []
    for kind in drawn:
        at_s += rng.expovariate(rate_per_s)
        arrivals.append(Arrival(at_s=at_s, kind=kind, prompt=_prompt(kind, rng)))
    return arrivals


async def _play(client: MeshClient, arrivals: Sequence[Arrival], deadline_s: float) -> list[Outcome]:
    """Send each request at its time, whatever became of those before; all outcomes."""
    started_s = time.perf_counter()

    async def one(arrival: Arrival) -> Outcome:
        await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - started_s)))
        return await _ask(client, arrival.kind, arrival.prompt, deadline_s)

    return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))


async def _ask(client: MeshClient, kind: Kind, prompt: tuple[int, ...], deadline_s: float) -> Outcome:
    sent_s, shape = time.perf_counter(), ""
    first_s = last_s = math.nan
    got = 0
    try:
        async for event in client.generate(
            prompt, max_tokens=kind.output_tokens, temperature=0.0, ignore_eos=True, deadline_s=deadline_s
        ):
            match event:
                case Decision():
                    shape = event.shape
                case Tokens():
                    last_s = time.perf_counter()
                    first_s = last_s if not got else first_s
                    got += len(event.ids)
    except MeshError as error:
        return Outcome(kind=kind.name, shape=shape, error=error.reason)
    tpot_s = (last_s - first_s) / max(1, got - 1)
    return Outcome(kind=kind.name, ttft_s=first_s - sent_s, tpot_s=tpot_s, shape=shape)


async def _alone(nodes: _Nodes, kinds: Sequence[Kind], rng: random.Random) -> dict[str, Outcome]:
    """Each kind on an idle mesh: medians of three after one that is not counted."""
    found = {}
    for kind in kinds:
        tries = []
        for _ in range(4):
            tries.append(await _ask(nodes.client, kind, _prompt(kind, rng), _ALONE_DEADLINE_S))
        failed = [outcome.error for outcome in tries if outcome.error]
        if failed:
            raise NodeUnreachable(f"a request alone failed: {failed[0]}")
        found[kind.name] = Outcome(
            kind=kind.name,
            ttft_s=statistics.median(o.ttft_s for o in tries[1:]),
            tpot_s=statistics.median(o.tpot_s for o in tries[1:]),
        )
    return found


def _prompt(kind: Kind, rng: random.Random) -> tuple[int, ...]:
    """Random tokens: no prefix that a cache could know."""
    return tuple(rng.randrange(*_VOCAB_RANGE) for _ in range(kind.prompt_tokens))


def _work_s(alone: Outcome, kind: Kind) -> float:
    return alone.ttft_s + (kind.output_tokens - 1) * alone.tpot_s


def _objective(alone: Mapping[str, Outcome], context: BenchContext) -> Objective:
    return Objective(
        ttft_s={name: context.number("ttft_factor") * o.ttft_s for name, o in alone.items()},
        tpot_s={name: context.number("tpot_factor") * o.tpot_s for name, o in alone.items()},
    )


def _row(mode: str, load: float, outcomes: Sequence[Outcome], objective: Objective) -> Mapping[str, Cell]:
    answered = [o for o in outcomes if not o.error]
    row: dict[str, Cell] = {
        "mode": mode,
        "load": load,
        "requests": len(outcomes),
        "no_answer": len(outcomes) - len(answered),
        "goodput_ratio": round(sum(objective.met(o) for o in outcomes) / len(outcomes), 3),
        "kv_moved": sum(o.shape == "disaggregated" for o in outcomes),
    }
    for kind in ("short", "long"):
        of_kind = [o for o in answered if o.kind == kind]
        every = [o for o in outcomes if o.kind == kind]
        row[f"{kind}_goodput_ratio"] = round(sum(objective.met(o) for o in every) / max(1, len(every)), 3)
        for name, values in (("ttft_s", [o.ttft_s for o in of_kind]), ("tpot_s", [o.tpot_s for o in of_kind])):
            row[f"{kind}_{name}_p50"] = round(_quantile(values, 0.5), 3)
            row[f"{kind}_{name}_p95"] = round(_quantile(values, 0.95), 3)
    return row


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


def _goals(rows: Sequence[Mapping[str, Cell]], loads: Sequence[float]) -> tuple[Goal, ...]:
    def cell(mode: str, load: float, column: str) -> float:
        return next(float(str(r[column])) for r in rows if r["mode"] == mode and r["load"] == load)

    return tuple(
        Goal(
            name=f"{name}, apart over colocated, load {load:g}",
            value=cell("apart", load, column) / cell("colocated", load, column),
            goal=1.0,
            direction=direction,
        )
        for load in loads
        for name, column, direction in (
            ("TPOT p95 of short chats", "short_tpot_s_p95", Direction.AT_MOST),
            ("goodput", "goodput_ratio", Direction.AT_LEAST),
        )
        if cell("colocated", load, column) > 0
    )


def _notes(objective: Objective, rate_per_s: float, kinds: Sequence[Kind]) -> tuple[str, ...]:
    return (
        *(
            f"{k.name}: {k.prompt_tokens} + {k.output_tokens} tokens, {k.share:.0%} of requests, within "
            f"{objective.ttft_s[k.name]:.2f} s to the first token and {objective.tpot_s[k.name] * 1000:.0f} ms a token"
            for k in kinds
        ),
        f"load 1 is {rate_per_s:.2f} requests/s; all requests count, those without an answer as missed",
    )


def _kinds(context: BenchContext) -> tuple[Kind, Kind]:
    share = context.number("long_share")
    if not 0.0 < share < 1.0:
        raise InvalidRequest(f"long_share must be between 0 and 1, got {share:g}", field="set")
    return (
        Kind(
            name="short",
            prompt_tokens=context.count("short_tokens"),
            output_tokens=context.count("short_output"),
            share=1.0 - share,
        ),
        Kind(
            name="long",
            prompt_tokens=context.count("long_tokens"),
            output_tokens=context.count("long_output"),
            share=share,
        ),
    )


def _loads(context: BenchContext) -> list[float]:
    try:
        loads = [float(part) for part in context.text("loads").split(",")]
    except ValueError:
        raise InvalidRequest(f"loads is a list of numbers, got {context.text('loads')!r}", field="set") from None
    if not all(0.0 < load <= 10.0 for load in loads):
        raise InvalidRequest("each of the loads must be above 0 and at most 10", field="set")
    return loads


def _plot(rows: Sequence[Mapping[str, Cell]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4))
    for axes, column, label in zip(
        figure.subplots(1, 2),
        ("goodput_ratio", "short_tpot_s_p95"),
        ("requests within the objective / all requests", "p95 time per token of short chats, s"),
        strict=True,
    ):
        for mode in _MODES:
            points = sorted((float(str(r["load"])), float(str(r[column]))) for r in rows if r["mode"] == mode)
            axes.plot([load for load, _ in points], [value for _, value in points], marker="o", label=mode)
        axes.set_xlabel("load (1: what two nodes could do at best)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCH = DisaggBench()
"""Entry point of `kvmesh.benches`."""
