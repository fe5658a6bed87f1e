"""`kvmesh bench moves`: does a running generation move between edge and core without losing or repeating a token?

Greedy generations at one edge entry go to the core at a random token and back at a later one, while other requests
keep both nodes busy. Counted from what the client got: gaps and repeats in the token offsets, and where the text
first differs from an undisturbed run at the edge (the two engines round differently, so it may; inside one engine
it may not).
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.client import MeshClient
from mesh.client_types import Decision, Finish, Migration, Tokens
from mesh.errors import MeshError
from placement.bench.testbed import Testbed, running_testbed

_PROMPTS = (
    "Once upon a time in a small village by the sea,",
    "The history of bread begins with",
    "To build a house of stone one needs",
    "In the year 1492 a fleet of three ships",
    "A good teacher is somebody who",
)


@dataclass(slots=True)
class _Seen:
    """What a client got of one generation."""

    ids: list[int] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    migrations: list[Migration] = field(default_factory=list)
    finish: Finish | None = None
    refused_moves: list[str] = field(default_factory=list)

    def take(self, tokens: Tokens) -> None:
        gap = tokens.offset_tokens - len(self.ids)
        self.lost += max(0, gap)
        self.twice += max(0, -gap)
        self.ids += tokens.ids


class MovesBench:
    """See the module's docstring."""

    name = "moves"
    question = "Live moves edge to core and back: tokens lost or repeated, pause, and where the text first differs?"
    defaults: Mapping[str, Cell] = {
        "moves": 50,
        "output_tokens": 96,
        "background_requests": 2,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about five minutes with the defaults on two cores."""
        rng = random.Random(context.count("seed"))
        rows: list[Mapping[str, Cell]] = []
        async with running_testbed(sites="paris") as bed:
            edge = bed.edges["paris"]
            tokens, wanted = context.count("output_tokens"), context.count("moves")
            plain = {p: (await _generate(edge, p, tokens, {})).ids for p in _PROMPTS}
            background = [
                asyncio.create_task(_keep_busy(bed, shape, tokens))
                for shape in ("local", "core")
                for _ in range(context.count("background_requests"))
            ]
            try:
                while (done := sum(int(str(r["moves"])) for r in rows)) < wanted:
                    context.progress(done, wanted, "moves")
                    prompt = rng.choice(_PROMPTS)
                    there = rng.randrange(1, tokens - 30)
                    back = rng.randrange(there + 8, tokens - 8)
                    seen = await _generate(edge, prompt, tokens, {there: "core", back: "edge"})
                    rows.append(_row(prompt, there, back, seen, plain[prompt]))
                    if len(rows) > 2 * wanted:
                        break  # moves keep being refused: the rows say why
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
        return _result(rows)


async def _generate(client: MeshClient, prompt: str, tokens: int, moves: dict[int, str]) -> _Seen:
    """One greedy generation at the edge; at each token count in `moves` it is told to go to that tier."""
    seen = _Seen()
    moving: asyncio.Task[None] | None = None
    due = sorted(moves)
    request_id = ""
    async for event in client.generate(
        prompt, shape="local", max_tokens=tokens, temperature=0.0, ignore_eos=True, label="public"
    ):
        match event:
            case Decision():
                request_id = event.request_id
            case Tokens():
                seen.take(event)
            case Migration():
                seen.migrations.append(event)
            case Finish():
                seen.finish = event
        if due and len(seen.ids) >= due[0] and (moving is None or moving.done()):
            moving = asyncio.create_task(_move(client, request_id, moves[due.pop(0)], seen))
    if moving is not None:
        await moving
    return seen


async def _move(client: MeshClient, request_id: str, tier: str, seen: _Seen) -> None:
    try:
        await client.migrate(request_id, tier=tier)
    except MeshError as error:
        seen.refused_moves.append(error.reason)


async def _keep_busy(bed: Testbed, shape: str, tokens: int) -> None:
    while True:
        with suppress(MeshError):
            await bed.edges["paris"].complete("Tell me about the sea.", shape=shape, max_tokens=tokens, label="public")


def _row(prompt: str, there: int, back: int, seen: _Seen, plain: list[int]) -> Mapping[str, Cell]:
    differs = next((i for i, (a, b) in enumerate(zip(seen.ids, plain, strict=False)) if a != b), None)
    counted = seen.finish.usage.completion_tokens if seen.finish is not None else 0
    return {
        "prompt": prompt[:24],
        "to_core_at": there,
        "back_at": back,
        "moves": len(seen.migrations),
        "refused": ",".join(seen.refused_moves),
        "recomputed": sum(m.recomputed for m in seen.migrations),
        "tokens": len(seen.ids),
        "lost": seen.lost + max(0, counted - len(seen.ids)),
        "twice": seen.twice,
        "first_difference": differs,
        "kv_wire_bytes": sum(m.kv_wire_bytes for m in seen.migrations),
        "pause_s": round(max((m.pause_s for m in seen.migrations), default=0.0), 3),
    }


def _result(rows: list[Mapping[str, Cell]]) -> BenchResult:
    def total(column: str) -> int:
        return sum(int(str(row[column])) for row in rows)

    pauses = [float(str(row["pause_s"])) for row in rows if row["moves"]]
    differing = [row for row in rows if row["first_difference"] is not None]
    early = [row for row in differing if int(str(row["first_difference"])) < int(str(row["to_core_at"]))]
    return BenchResult(
        rows=tuple(rows),
        goals=(
            Goal(name="tokens lost", value=total("lost"), goal=0, direction=Direction.EQUAL),
            Goal(name="tokens twice", value=total("twice"), goal=0, direction=Direction.EQUAL),
            Goal(name="moves that recomputed instead of shipping KV", value=total("recomputed"), goal=0),
        ),
        notes=(
            f"{total('moves')} moves in {len(rows)} generations",
            f"longest pause of a generation: median {statistics.median(pauses or [0.0]):.3f} s, "
            f"most {max(pauses, default=0.0):.3f} s",
            f"{len(differing)} of {len(rows)} texts differ from the undisturbed run, {len(early)} of them before the "
            "first move (llama.cpp rounds differently in other company; see the first_difference column)",
        ),
    )


BENCH = MovesBench()
"""Entry point of `kvmesh.benches`."""
