"""`kvmesh bench ship`: ship KV, compute it where it is needed, or both at once: is the planner's choice the fastest?

A core and an edge, each pinned to a core of its own, behind a link of known rate and round trip. The prompt's KV is at
the core beforehand. In each cell (link, round trip, prompt) every allowed way is measured in turn, each on a fresh
prompt: prefill at the edge, and each codec, shipped whole or beside the edge's own prefill of the head. The planner
is asked before each round, with what the edge has measured of link and speeds by then. A way that takes much longer
than prefill is stopped and counts as that long.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mesh.bench.link import Direction, LinkShape
from mesh.bench.pinning import pin
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.bench.types import Direction as Better
from mesh.client import MeshClient
from mesh.errors import Expired, InvalidRequest, NoCapableNode
from mesh.v1 import inference_pb2 as pb
from placement.bench.testbed import Testbed, running_testbed

_VOCAB_RANGE = (1000, 40_000)  # ordinary tokens of the demo model
_SITE, _LABEL = "osaka", "public"
_LOCAL = "prefill here"
_SETTLE_S = 20.0  # for the edge's link model to see a link that was changed
_LOAD_LAG_S = 1.5  # the edge hears of the core's load every second; the prompt just prepared must not count as load
_STOP_AFTER = 3.0  # times the prefill at the edge

Way = tuple[str, str]
"""Codec and shipment; both empty: prefill at the edge."""


@dataclass(slots=True)
class _CellRun:
    """What was measured in one cell; seconds to the first token."""

    mbit: float
    rtt_ms: float
    tokens: int
    seen_s: dict[Way, list[float]] = field(default_factory=dict)
    choices: Counter[Way] = field(default_factory=Counter)
    predicted_s: list[float] = field(default_factory=list)
    seen_link: tuple[float, float] = (0.0, 0.0)  # round trip in seconds and goodput in bytes/s, by the edge's probes
    stopped: set[Way] = field(default_factory=set)
    why: str = ""  # the planner's sentence of the last round

    @property
    def choice(self) -> Way:
        return self.choices.most_common(1)[0][0]

    def median_s(self, way: Way) -> float:
        return statistics.median(self.seen_s[way])

    @property
    def best(self) -> Way:
        return min(self.seen_s, key=self.median_s)

    def within(self, way: Way) -> bool:
        """Whether the choice is no more than a tenth, or 50 ms, behind this way."""
        other_s = self.median_s(way)
        return self.median_s(self.choice) <= other_s + max(0.1 * other_s, 0.05)


class ShipBench:
    """See the module's docstring."""

    name = "ship"
    question = "Ship KV, prefill at the edge, or both at once: is what the planner chooses the fastest, over any link?"
    defaults: Mapping[str, Cell] = {
        "link_mbit_per_s": "5,20,100,1000",
        "round_trip_ms": "2,40,150",
        "prompt_tokens": "256,1024,4096",
        "cells": 0,  # so many of them, spread over all; 0: all
        "rounds": 3,
        "codecs": "",  # empty: all that policy allows
        "max_loss_ratio": 0.01,
        "goal_ratio": 0.9,
        "plot": "",  # write the heat map here, as PNG
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about two hours with all cells on two cores, minutes with `cells=4 rounds=1`."""
        rng = random.Random(context.count("seed"))
        cells = _cells(context)
        found: list[_CellRun] = []
        async with running_testbed(sites=_SITE) as bed:
            pin({bed.pids["core-1"]: {0}, bed.pids[f"edge-{_SITE}"]: {1}})
            await bed.admin.put_policy("dev", _policy(context.number("max_loss_ratio")))
            edge = bed.edges[_SITE]
            await _warm_up(edge, max(tokens for _, _, tokens in cells), rng)
            ways = await _ways(edge, context, rng)
            last_rtt_ms = -1.0
            for number, (mbit, rtt_ms, tokens) in enumerate(cells):
                context.progress(number, len(cells), f"{mbit:g} Mbit/s, {rtt_ms:g} ms, {tokens} tokens")
                await _reshape(bed, mbit, rtt_ms, same_rtt=rtt_ms == last_rtt_ms, rng=rng)
                last_rtt_ms = rtt_ms
                found.append(await _measure(edge, (mbit, rtt_ms, tokens), ways, context.count("rounds"), rng))
        return _result(found, ways, context)


def _cells(context: BenchContext) -> list[tuple[float, float, int]]:
    links, rtts, prompts = (_numbers(context, k) for k in ("link_mbit_per_s", "round_trip_ms", "prompt_tokens"))
    cells = [(mbit, rtt_ms, int(tokens)) for tokens in prompts for mbit in links for rtt_ms in rtts]
    wanted = context.count("cells")
    if not 0 < wanted < len(cells):
        return cells
    step = len(cells) / wanted
    return [cells[int((i + 0.5) * step)] for i in range(wanted)]


def _policy(max_loss_ratio: float) -> str:
    return f"""\
version: 1
labels: {{order: [public], default: public}}
rules: {{public: {{anywhere: true}}}}
kv_max_loss_ratio: {max_loss_ratio:g}
"""


async def _warm_up(edge: MeshClient, tokens: int, rng: random.Random) -> None:
    """Let both ends measure how their prefill grows with the context."""
    for shape in ("local", "core"):
        await edge.complete(_prompt(tokens, rng), shape=shape, label=_LABEL, max_tokens=1, temperature=0.0)


async def _ways(edge: MeshClient, context: BenchContext, rng: random.Random) -> list[Way]:
    """Prefill here, and each allowed codec both ways."""
    plan = (await edge.explain(_prompt(256, rng), site=_SITE, label=_LABEL)).decision.plan
    allowed = list(dict.fromkeys(o.codec for o in plan.shipping if o.codec and not o.refused))
    wanted = [c for c in context.text("codecs").split(",") if c]
    if unknown := set(wanted) - set(allowed):
        raise InvalidRequest(
            f"codecs not allowed here: {', '.join(sorted(unknown))}; {', '.join(allowed)} are", field="set"
        )
    return [("", ""), *((codec, way) for codec in wanted or allowed for way in ("ship", "both"))]


async def _reshape(bed: Testbed, mbit: float, rtt_ms: float, *, same_rtt: bool, rng: random.Random) -> None:
    """Another link, and the edge has seen that it is another."""
    for direction in Direction:
        bed.link.reshape(direction, LinkShape(rate_bit_per_s=mbit * 1e6, delay_s=rtt_ms / 2000))
    edge = bed.edges[_SITE]
    if same_rtt:  # nothing but a transfer shows that the rate is another
        await edge.complete(_prompt(256, rng), shape="split", codec="f16", label=_LABEL, max_tokens=1, temperature=0.0)
    with suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_S):
            while not _is_seen(await _core_view(edge), mbit, rtt_ms):  # noqa: ASYNC110 - the edge tells nobody
                await asyncio.sleep(1.0)


async def _core_view(edge: MeshClient) -> tuple[float, float]:
    """Round trip in seconds and goodput in bytes/s, as the edge's decisions read them."""
    snapshot = await edge.snapshot()
    core = next(node for node in snapshot.nodes if node.tier == "core")
    return core.rtt_s, core.goodput_bytes_per_s


def _is_seen(view: tuple[float, float], mbit: float, rtt_ms: float) -> bool:
    rtt_s, goodput = view
    rate = goodput * 8e-6 / mbit
    # A probe is too short for a fat link; that it is not the bottleneck shows all the same.
    return abs(rtt_s - rtt_ms / 1000) < max(0.2 * rtt_ms / 1000, 0.004) and (
        0.7 < rate < 1.3 or goodput * 8 > 3e8 < mbit * 1e6
    )


async def _measure(
    edge: MeshClient, cell: tuple[float, float, int], ways: Sequence[Way], rounds: int, rng: random.Random
) -> _CellRun:
    run = _CellRun(*cell)
    for number in range(rounds):
        prompt = await _prepared(edge, run.tokens, rng)
        await asyncio.sleep(_LOAD_LAG_S)
        run.seen_link = await _core_view(edge)
        plan = (await edge.explain(prompt, site=_SITE, label=_LABEL, max_tokens=1)).decision.plan
        run.choices[_way_of(plan)] += 1
        run.why = plan.why
        run.predicted_s.append(plan.predicted_ttft_s)
        open_ways = [w for w in ways if w not in run.stopped and _is_open(plan, w)]
        for way in [("", ""), *(open_ways[1:] if number % 2 == 0 else reversed(open_ways[1:]))]:
            await _one(edge, run, way, rng)
    return run


async def _one(edge: MeshClient, run: _CellRun, way: Way, rng: random.Random) -> None:
    prompt = await _prepared(edge, run.tokens, rng)
    codec, shipment = way
    if not codec:
        done = await edge.complete(prompt, shape="local", label=_LABEL, max_tokens=1, temperature=0.0)
    else:
        patience_s = _STOP_AFTER * run.median_s(("", "")) + 1.0
        try:
            done = await edge.complete(
                prompt, shape="split", codec=codec, shipment=shipment, label=_LABEL, max_tokens=1, temperature=0.0,
                deadline_s=patience_s, resume=False,
            )  # fmt: skip
        except Expired:
            run.seen_s.setdefault(way, []).append(patience_s)
            run.stopped.add(way)
            return
        except NoCapableNode:
            return  # by now the planner sees that it cannot help
        if not any(m.codec == codec for m in done.migrations):
            return  # a fallback answered; it says nothing of this way
    run.seen_s.setdefault(way, []).append(done.finish.ttft_s)


async def _prepared(edge: MeshClient, tokens: int, rng: random.Random) -> list[int]:
    """A fresh prompt whose KV the core has."""
    prompt = _prompt(tokens, rng)
    await edge.complete(prompt, shape="core", label=_LABEL, max_tokens=1, temperature=0.0)
    return prompt


def _is_open(plan: pb.Plan, way: Way) -> bool:
    """Whether the planner knows this way; one that it refuses, or that it says cannot help, is none."""
    codec, shipment = way
    return not codec or any(
        o.codec == codec and bool(o.own_tokens) == (shipment == "both") and not o.refused for o in plan.shipping
    )


def _way_of(plan: pb.Plan) -> Way:
    for leg in plan.legs:
        if leg.kind == "move_kv":
            return leg.codec, "both" if leg.own_tokens else "ship"
    return "", ""


def _result(found: Sequence[_CellRun], ways: Sequence[Way], context: BenchContext) -> BenchResult:
    judged = [run for run in found if run.choice in run.seen_s]
    good = sum(run.within(run.best) for run in judged)
    no_worse = sum(run.within(("", "")) for run in judged)
    notes = [f"{run.mbit:g} Mbit/s, {run.rtt_ms:g} ms, {run.tokens} tokens: {run.why}" for run in found]
    if len(judged) < len(found):
        notes.append(f"{len(found) - len(judged)} cells could not be judged: the choice was never measured")
    if context.text("plot"):
        notes.append(plot(Path(context.text("plot")), found))
    return BenchResult(
        rows=tuple(_row(run, ways) for run in found),
        goals=(
            Goal(
                name="cells in which the choice is within max(10 %, 50 ms) of the best measured way, ratio",
                value=good / max(len(found), 1),
                goal=context.number("goal_ratio"),
                direction=Better.AT_LEAST,
            ),
            Goal(
                name="cells in which it is no worse than prefill at the edge by more than that, ratio",
                value=no_worse / max(len(found), 1),
                goal=1.0,
                direction=Better.AT_LEAST,
            ),
        ),
        notes=tuple(notes),
    )


def _row(run: _CellRun, ways: Sequence[Way]) -> Mapping[str, Cell]:
    chosen_s = run.median_s(run.choice) if run.choice in run.seen_s else None
    row: dict[str, Cell] = {
        "link_mbit_per_s": run.mbit,
        "round_trip_ms": run.rtt_ms,
        "seen_mbit_per_s": round(run.seen_link[1] * 8e-6, 1),
        "seen_round_trip_ms": round(run.seen_link[0] * 1000, 1),
        "prompt_tokens": run.tokens,
        "choice": words(run.choice),
        "predicted_s": round(statistics.median(run.predicted_s), 3),
        "choice_s": None if chosen_s is None else round(chosen_s, 3),
        "best": words(run.best),
        "best_s": round(run.median_s(run.best), 3),
        "ok": run.choice in run.seen_s and run.within(run.best),
    }
    for way in ways:
        row[f"{words(way)}_s"] = round(run.median_s(way), 3) if way in run.seen_s else None
    return row


def words(way: Way) -> str:
    """ "kvtc 30x, both"; a kvtc codec by its setting."""
    codec, shipment = way
    if not codec:
        return _LOCAL
    return f"{'kvtc ' + codec.rpartition(':')[2] if codec.startswith('kvtc:') else codec}, {shipment}"


def plot(path: Path, found: Sequence[_CellRun]) -> str:
    """The heat map: which way wins where, and where the planner took another. Says what it did."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: install kvmesh[bench]"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({words(run.best) for run in found})
    rows = sorted({run.mbit for run in found})
    columns = sorted({(run.tokens, run.rtt_ms) for run in found})
    figure, axes = pyplot.subplots(figsize=(2.0 + 1.3 * len(columns), 1.5 + 0.9 * len(rows)))
    colours = pyplot.get_cmap("tab10")
    for run in found:
        x, y = columns.index((run.tokens, run.rtt_ms)), rows.index(run.mbit)
        axes.add_patch(pyplot.Rectangle((x, y), 1, 1, color=colours(names.index(words(run.best)) % 10), alpha=0.6))
        missed = "" if run.choice == run.best else f"\nchose {words(run.choice)}"
        axes.text(x + 0.5, y + 0.5, f"{run.median_s(run.best):.2f} s{missed}", ha="center", va="center", fontsize=7)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, len(rows))
    axes.set_xticks([i + 0.5 for i in range(len(columns))], [f"{t} tokens\n{r:g} ms" for t, r in columns])
    axes.set_yticks([i + 0.5 for i in range(len(rows))], [f"{r:g} Mbit/s" for r in rows])
    axes.legend(
        handles=[
            pyplot.Rectangle((0, 0), 1, 1, color=colours(i % 10), alpha=0.6, label=name) for i, name in enumerate(names)
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    axes.set_title("Fastest way to the first token at the edge, KV being at the core")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return f"heat map: {path}"


def _prompt(tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(*_VOCAB_RANGE) for _ in range(tokens)]


def _numbers(context: BenchContext, key: str) -> list[float]:
    text = context.text(key) if isinstance(context.settings[key], str) else str(context.settings[key])
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{key} is a list of numbers like 20,100; got {text!r}", field="set") from None
    if any(not 0 < value < 1e6 for value in values):
        raise InvalidRequest(f"{key} is out of range: {text!r}", field="set")
    return values


BENCH = ShipBench()
"""Entry point of `kvmesh.benches`."""
