"""`kvmesh bench exactness`: do the tokens of a request depend on its company, and what does it cost if they do not?

Each way of computing (f32; bf16 as the engine chooses; bf16 in torch; the same with `exact`) runs the prompts alone and
then under schedules that must not show: all at once, in small steps, from a cached prefix, preempted, paused and
resumed, moved to another engine and back, and a random mixture. A token that differs where the two best were within
`margin` of each other, alone, is a near tie and counted apart.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from core_node.bench.company import Agreement, Alone, Fate, Hop, alone, random_fate, together
from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.model.catalogue import DEMO_MODEL, find_model

_WAYS: Mapping[str, Mapping[str, Any]] = {
    "f32": {"dtype": "f32", "backend": "torch"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "bf16 torch": {"dtype": "bf16", "backend": "torch"},
    "bf16 torch exact": {"dtype": "bf16", "backend": "torch", "exact": True},
}
_MUST_BE_EQUAL = ("f32", "bf16 torch exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A name, what the engines are told beyond the usual, and a fate for each prompt."""

    name: str
    changes: Mapping[str, Any]
    fates: tuple[Fate, ...]


class ExactnessBench:
    """See the module's docstring."""

    name = "exactness"
    question = "Do a request's tokens depend on its company?"
    defaults: Mapping[str, Cell] = {
        "model": DEMO_MODEL,
        "ways": "f32,bf16,bf16 torch,bf16 torch exact",
        "prompts": 32,
        "output_tokens": 24,
        "longest_prompt": 120,
        "margin": 1e-3,
        "threads": 0,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; some minutes with the defaults on two cores."""
        ways = [way.strip() for way in context.text("ways").split(",")]
        if unknown := sorted(set(ways) - _WAYS.keys()):
            raise InvalidRequest(f"ways are {', '.join(_WAYS)}; not {unknown[0]!r}", field="ways")
        n_prompts, n_tokens = context.count("prompts"), context.count("output_tokens")
        if n_prompts < 1 or n_tokens < 3 or context.count("longest_prompt") < BLOCK_TOKENS:
            raise InvalidRequest(
                f"at least 1 prompt, 3 output_tokens and {BLOCK_TOKENS} for longest_prompt", field="prompts"
            )
        rows: list[Mapping[str, Cell]] = []
        goals: list[Goal] = []
        builds: list[str] = []
        for number, way in enumerate(ways):
            base = _settings(context, way, n_prompts)
            async with _two_engines(base) as engines:
                rng = random.Random(context.count("seed"))
                prompts = made_prompts(rng, n_prompts, context.count("longest_prompt"), engines[0].info.vocab_size)
                context.progress(number, len(ways), f"{way}: alone")
                single = await alone(engines[0], prompts, n_tokens)
                speed = await engines[0].load()
                builds.append(f"{way}: {engines[0].info.build}")
            wrong = 0
            for schedule in schedules(rng, prompts, n_tokens):
                context.progress(number, len(ways), f"{way}: {schedule.name}")
                agreement, preempted = await compare(
                    replace(base, **schedule.changes), schedule, prompts, single, context.number("margin")
                )
                wrong += agreement.wrong
                rows.append(
                    {
                        "way": way,
                        "schedule": schedule.name,
                        "equal_tokens": agreement.equal,
                        "near_ties": agreement.near_ties,
                        "others_that_differ": agreement.wrong,
                        "not_compared": agreement.not_compared,
                        "preempted": preempted,
                        "alone_prefill_tokens_per_s": round(speed.prefill_tokens_per_s, 1),
                        "alone_decode_tokens_per_s": round(speed.decode_tokens_per_s, 2),
                    }
                )
            if way in _MUST_BE_EQUAL or "kernels" in builds[-1]:
                goals.append(Goal(name=f"{way}: tokens that differ beyond near ties", value=wrong, goal=0,
                                  direction=Direction.EQUAL))  # fmt: skip
        return BenchResult(rows=tuple(rows), goals=tuple(goals), notes=tuple(builds))


def made_prompts(rng: random.Random, n: int, longest: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Random ids; every other prompt begins as some others do, on and off block borders."""
    ids = range(min(1000, vocab_size // 2), min(40_000, vocab_size))  # ordinary tokens of the demo model
    heads = [tuple(rng.choice(ids) for _ in range(size)) for size in (longest // 4, longest // 3, longest // 2)]
    prompts = []
    for i in range(n):
        head = heads[i % 3] if i % 2 else ()
        tail = rng.randrange(1, longest - len(head) + 1)
        prompts.append(head + tuple(rng.choice(ids) for _ in range(tail)))
    return prompts


def schedules(rng: random.Random, prompts: list[tuple[int, ...]], n_tokens: int) -> list[Schedule]:
    """All that must not show."""
    n, third = len(prompts), max(1, n_tokens // 3)
    longest = max(map(len, prompts)) + n_tokens
    tight = (longest // BLOCK_TOKENS + 2) * BLOCK_TOKENS + sum(map(len, prompts)) // 4
    there = Hop(after_tokens=third, moves=True)
    back = replace(there, after_tokens=2 * third)
    return [
        Schedule(name="all at once", changes={}, fates=(Fate(),) * n),
        Schedule(name="small steps", changes={"max_step_tokens": 16, "max_running": 16}, fates=(Fate(),) * n),
        Schedule(name="cached prefix", changes={}, fates=tuple(Fate(warm_tokens=len(p) - 1) for p in prompts)),
        Schedule(name="preempted", changes={"kv_pool_tokens": tight}, fates=(Fate(),) * n),
        Schedule(name="paused", changes={}, fates=(Fate(hops=(Hop(after_tokens=third, moves=False),)),) * n),
        Schedule(name="moved and back", changes={}, fates=(Fate(hops=(there, back)),) * n),
        Schedule(
            name="random",
            changes={"kv_pool_tokens": 2 * tight, "max_step_tokens": rng.choice([32, 48, 64, 100])},
            fates=tuple(random_fate(rng, len(p), n_tokens) for p in prompts),
        ),
    ]  # fmt: skip


async def compare(
    settings: CoreEngineSettings,
    schedule: Schedule,
    prompts: list[tuple[int, ...]],
    single: list[Alone],
    margin: float,
) -> tuple[Agreement, int]:
    """Run one schedule on two new engines; how its tokens agree, and how many runs were preempted."""
    agreement = Agreement(margin=margin)
    async with _two_engines(settings) as engines:
        outcomes = await together(engines, prompts, schedule.fates, len(single[0].ids))
        for engine in engines:
            await engine.check_integrity()
        preempted = sum([(await engine.load()).preempted_total for engine in engines])
    for want, got in zip(single, outcomes, strict=True):
        agreement.add(want, got)
    return agreement, preempted


def _settings(context: BenchContext, way: str, n_prompts: int) -> CoreEngineSettings:
    tokens = n_prompts * (context.count("longest_prompt") + context.count("output_tokens") + 2 * BLOCK_TOKENS)
    base = CoreEngineSettings(
        model_path=find_model(context.text("model")),
        model_id="exactness",
        n_threads=context.count("threads"),
        kv_pool_tokens=2 * tokens,
        max_context_tokens=context.count("longest_prompt") + context.count("output_tokens") + BLOCK_TOKENS,
        max_waiting=4 * n_prompts,
    )
    kv = KvDtype.F32 if way == "f32" else KvDtype.BF16
    return replace(base, kv_dtype=kv, **_WAYS[way])


@asynccontextmanager
async def _two_engines(settings: CoreEngineSettings) -> AsyncIterator[tuple[CoreEngine, CoreEngine]]:
    engines = CoreEngine(settings), CoreEngine(settings)
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.close()


BENCH = ExactnessBench()
