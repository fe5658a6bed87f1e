"""`kvmesh bench moves`: how long does a client wait when its running generation moves, and is a token lost or repeated?

One generation at a time starts at the edge or at the core, and moves to the other one at a token drawn at random, over
a link of a given rate and round trip; the ways to move take turns in one run. Every prompt is new, so that no cache
has any of its KV. The pause is what the client sees: the time between the last token before the move and the first
after it. It is set against two of the intervals that its tokens had around the move (the slower of both sides) and one
round trip. `busy` generations of other clients run beside it at both ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mesh.bench.link import Direction as Way
from mesh.bench.link import LinkShape
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.client import MeshClient
from mesh.client_types import Decision, Finish, Migration, Tokens
from mesh.errors import InvalidRequest, MeshError
from placement.bench.testbed import Testbed, running_testbed

_MAIN = "precopy"
_OTHERS = ("stop_and_copy", "replay")
_TARGET_INTERVALS = 2.0
_WORDS = ("river", "stone", "bread", "winter", "house", "letter", "garden", "market", "window", "candle", "bridge")


@dataclass(slots=True)
class Moved:
    """What a client saw of one generation with one move. Times are of the client's clock."""

    how: str
    start: str
    ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    migration: Migration | None = None
    before: int = 0  # tokens before the move
    finish: Finish | None = None
    refused: str = ""

    def take(self, tokens: Tokens) -> None:
        """Tokens came."""
        gap = tokens.offset_tokens - len(self.ids)
        if tokens.ids:
            self.lost += max(0, gap)
            self.twice += max(0, -gap)
        self.ids += tokens.ids
        self.at_s += [time.perf_counter()] * len(tokens.ids)

    @property
    def pause_s(self) -> float:
        """Between the last token before the move and the first after it."""
        return self.at_s[self.before] - self.at_s[self.before - 1]

    @property
    def token_s(self) -> float:
        """Interval of tokens away from the move: the slower of both sides, which are different engines."""
        sides = (self.at_s[: self.before], self.at_s[self.before :])
        medians = [statistics.median(_gaps(side)) for side in sides if len(side) >= 3]
        return max(medians, default=0.0)

    @property
    def counts(self) -> bool:
        """Whether it moved, with tokens on both sides."""
        return self.migration is not None and 0 < self.before < len(self.ids) and self.token_s > 0


def _gaps(at_s: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(at_s)]


class MovesBench:
    """See the module's docstring."""

    name = "moves"
    question = "Pause of a live move as the client sees it: pre-copy, against stop-and-copy and replay?"
    defaults: Mapping[str, Cell] = {
        "moves": 100,
        "other_moves": 34,
        "prompt_words": 200,
        "output_tokens": 48,
        "rate_mbit": 100.0,
        "rtt_ms": 10.0,
        "busy": 0,
        "seed": 1,
        "plot": "",
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about ten minutes with the defaults on two cores."""
        rng = random.Random(context.count("seed"))
        plan = _plan(context.count("moves"), context.count("other_moves"))
        seen: list[Moved] = []
        async with running_testbed(sites="paris") as bed:
            for way in Way:
                shape = LinkShape(
                    rate_bit_per_s=context.number("rate_mbit") * 1e6, delay_s=context.number("rtt_ms") / 2000
                )
                bed.link.reshape(way, shape)
            busy = [asyncio.create_task(_keep_busy(bed, rng.random())) for _ in range(context.count("busy"))]
            try:
                for number, how in enumerate(plan):
                    context.progress(number, len(plan), how)
                    start = ("edge", "core")[number % 2]
                    seen.append(await _moved(bed, how, start, context, rng))
            finally:
                for task in busy:
                    task.cancel()
                await asyncio.gather(*busy, return_exceptions=True)
        result = _result(seen, rtt_s=context.number("rtt_ms") / 1000)
        if context.text("plot"):
            _plot(Path(context.text("plot")), seen)
        return result


def _plan(moves: int, other_moves: int) -> list[str]:
    """Ways in turn, spread evenly: the machine's moods fall on all of them."""
    marked = [((i + 0.5) / moves, _MAIN) for i in range(moves)]
    for how in _OTHERS:
        marked += [((i + 0.5) / other_moves, how) for i in range(other_moves)]
    return [how for _, how in sorted(marked)]


async def _moved(bed: Testbed, how: str, start: str, context: BenchContext, rng: random.Random) -> Moved:
    """One greedy generation that moves once."""
    n_tokens = context.count("output_tokens")
    at = rng.randrange(6, n_tokens // 2)
    prompt = " ".join(rng.choice(_WORDS) for _ in range(context.count("prompt_words")))
    client, shape, target = bed.edges["paris"], "local" if start == "edge" else "core", "core"
    if start == "core":
        target = "edge"
    seen = Moved(how=how, start=start)
    moving: asyncio.Task[None] | None = None
    request_id = ""
    try:
        async for event in client.generate(
            prompt, shape=shape, max_tokens=n_tokens, temperature=0.0, ignore_eos=True, label="public"
        ):
            match event:
                case Decision():
                    request_id = event.request_id
                case Tokens():
                    seen.take(event)
                case Migration():
                    seen.migration, seen.before = event, len(seen.ids)
                case Finish():
                    seen.finish = event
            if moving is None and len(seen.ids) >= at:
                moving = asyncio.create_task(_move(client, request_id, target, how, seen))
    finally:
        if moving is not None:
            await moving
    return seen


async def _move(client: MeshClient, request_id: str, tier: str, how: str, seen: Moved) -> None:
    try:
        await client.migrate(request_id, tier=tier, how=how)
    except MeshError as error:
        seen.refused = error.reason


async def _keep_busy(bed: Testbed, draw: float) -> None:
    shape = "local" if draw < 0.5 else "core"
    while True:
        with suppress(MeshError):
            await bed.edges["paris"].complete("Tell me about the sea.", shape=shape, max_tokens=64, label="public")


def _result(seen: list[Moved], *, rtt_s: float) -> BenchResult:
    rows = tuple(_row(how, [m for m in seen if m.how == how], rtt_s) for how in (_MAIN, *_OTHERS))
    lost = sum(m.lost + _missing(m) for m in seen)
    main = [m for m in seen if m.how == _MAIN and m.counts]
    ratios = [m.pause_s / (_TARGET_INTERVALS * m.token_s + rtt_s) for m in main]
    return BenchResult(
        rows=rows,
        goals=(
            Goal(
                name=f"p95 of pause / (2 token intervals + round trip), {len(main)} pre-copies",
                value=_quantile(ratios, 0.95),
                goal=1.0,
            ),
            Goal(name="tokens lost", value=lost, goal=0, direction=Direction.EQUAL),
            Goal(name="tokens twice", value=sum(m.twice for m in seen), goal=0, direction=Direction.EQUAL),
        ),
        notes=tuple(
            f"{how}: {sum(m.refused != '' for m in seen if m.how == how)} refused or too late "
            f"({', '.join(sorted({m.refused for m in seen if m.how == how and m.refused})) or 'none'})"
            for how in (_MAIN, *_OTHERS)
        ),
    )


def _missing(moved: Moved) -> int:
    counted = moved.finish.usage.completion_tokens if moved.finish is not None else 0
    return max(0, counted - len(moved.ids))


def _row(how: str, seen: list[Moved], rtt_s: float) -> Mapping[str, Cell]:
    good = [m for m in seen if m.counts]
    pauses = [1000 * m.pause_s for m in good]
    allowed = [1000 * (_TARGET_INTERVALS * m.token_s + rtt_s) for m in good]
    shipped = [m.migration.kv_wire_bytes / 1e6 for m in good if m.migration is not None]
    return {
        "how": how,
        "moves": len(good),
        "pause_p50_ms": round(_quantile(pauses, 0.5), 1),
        "pause_p95_ms": round(_quantile(pauses, 0.95), 1),
        "pause_most_ms": round(max(pauses, default=float("nan")), 1),
        "allowed_p50_ms": round(_quantile(allowed, 0.5), 1),
        "token_p50_ms": round(1000 * _quantile([m.token_s for m in good], 0.5), 1),
        "within_ratio": round(sum(p <= a for p, a in zip(pauses, allowed, strict=True)) / max(1, len(good)), 3),
        "kv_mb": round(_quantile(shipped, 0.5), 2),
        "lost": sum(m.lost + _missing(m) for m in seen),
        "twice": sum(m.twice for m in seen),
    }


def _quantile(values: Sequence[float], q: float) -> float:
    """The nearest rank; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _plot(path: Path, seen: list[Moved]) -> None:
    """Pauses of each way as distributions."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any
    axes: Any
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for how in (_MAIN, *_OTHERS):
        pauses = sorted(1000 * m.pause_s for m in seen if m.how == how and m.counts)
        if pauses:
            axes.step(pauses, [(i + 1) / len(pauses) for i in range(len(pauses))], where="post", label=how)
    axes.set_xscale("log")
    axes.set_xlabel("pause that the client sees, ms")
    axes.set_ylabel("share of moves")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


BENCH = MovesBench()
"""Entry point of `kvmesh.benches`."""
