"""Requests in company: the same prompts under schedules that must not show in their tokens.

A *fate* is what happens to one request on its way: pauses, moves to another engine and back, a start from a cached
prefix. `together` runs many requests at once over two engines, each to its own fate; `alone` runs them one by one and
notes how far apart the two best tokens were at each place. Works on anything that is an Engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from mesh.errors import NotFound, Overloaded
from mesh.node.engine import Engine, Held, ImportSpec, RunId, RunSpec, Tokens
from mesh.node.sampling import SamplingParams

_SALT = b"company"
_PAUSE_SLACK_TOKENS = 2  # a pause takes effect a little after the token that it is asked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Greedy tokens of a request that had the engine to itself, and at each the gap between the two best
    log-probabilities, which is that between their logits."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """After `after_tokens` tokens the request pauses; then it goes on at once, on the other engine if `moves`, from
    its KV if `keeps_kv`, else from its tokens."""

    after_tokens: int
    moves: bool
    keeps_kv: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Of one request. `warm_tokens`: so much of its prompt was computed before it comes. `late_turns`: how often
    others get a turn before it is sent."""

    warm_tokens: int = 0
    late_turns: int = 0
    hops: tuple[Hop, ...] = ()


@dataclass(slots=True)
class Agreement:
    """Tokens of requests in company against the same requests alone. A request is compared up to its first
    difference: what follows has another past."""

    equal: int = 0
    near_ties: int = 0  # first differences where the two best were within `margin`
    wrong: int = 0
    not_compared: int = 0
    margin: float = 1e-3

    def add(self, alone: Alone, ids: Sequence[int]) -> None:
        for i, (want, got) in enumerate(zip(alone.ids, ids, strict=True)):
            if want != got:
                if alone.gaps[i] <= self.margin:
                    self.near_ties += 1
                else:
                    self.wrong += 1
                self.not_compared += len(ids) - i - 1
                return
            self.equal += 1

    def __str__(self) -> str:
        return (
            f"{self.equal} tokens equal, {self.near_ties} near ties and {self.wrong} others differ, "
            f"{self.not_compared} after a difference"
        )


async def alone(engine: Engine, prompts: Sequence[tuple[int, ...]], n_tokens: int) -> list[Alone]:
    """One by one, each under a salt of its own: nothing is cached."""
    results = []
    for i, prompt in enumerate(prompts):
        spec = _spec(RunId(f"alone-{i}"), prompt, len(prompt), n_tokens, salt=b"alone %d" % i, logprobs=2)
        ids: list[int] = []
        gaps: list[float] = []
        async with aclosing(engine.generate(spec)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Tokens):
                    ids += event.ids
                    gaps += [top[0][1] - top[1][1] for _, top in event.logprobs]
        results.append(Alone(ids=tuple(ids), gaps=tuple(gaps)))
    return results


async def together(
    engines: tuple[Engine, Engine], prompts: Sequence[tuple[int, ...]], fates: Sequence[Fate], n_tokens: int
) -> list[tuple[int, ...]]:
    """All at once, each to its fate, starting on the first engine. Their tokens."""
    for i, (prompt, fate) in enumerate(zip(prompts, fates, strict=True)):
        if fate.warm_tokens:
            await _warm(engines[0], RunId(f"warm-{i}"), prompt[: fate.warm_tokens])
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_follow(engines, f"r{i}", prompt, fate, n_tokens))
            for i, (prompt, fate) in enumerate(zip(prompts, fates, strict=True))
        ]
    return [task.result() for task in tasks]


def random_fate(rng: random.Random, prompt_tokens: int, n_tokens: int) -> Fate:
    """A bit of everything."""
    places = sorted(rng.sample(range(1, n_tokens), min(rng.choice([0, 0, 1, 2, 3]), n_tokens - 1)))
    return Fate(
        warm_tokens=rng.randrange(prompt_tokens) if rng.random() < 0.3 else 0,
        late_turns=rng.randrange(200),
        hops=tuple(Hop(after_tokens=at, moves=rng.random() < 0.7, keeps_kv=rng.random() < 0.8) for at in places),
    )


async def _follow(
    engines: tuple[Engine, Engine], name: str, prompt: tuple[int, ...], fate: Fate, n_tokens: int
) -> tuple[int, ...]:
    for _ in range(fate.late_turns):
        await asyncio.sleep(0)
    at, kv_from = 0, None
    ids: list[int] = []
    for number, hop in enumerate((*fate.hops, None)):
        run_id, most = RunId(f"{name}-{number}"), n_tokens if hop is None else hop.after_tokens + _PAUSE_SLACK_TOKENS
        if len(ids) >= min(most, n_tokens):
            continue
        spec = _spec(run_id, (*prompt, *ids), len(prompt), min(most, n_tokens), kv_from=kv_from)
        held = await _run(engines[at], spec, ids, None if hop is None else hop.after_tokens)
        kv_from = None
        if hop is None or len(ids) >= n_tokens:
            if held:
                await engines[at].release(run_id)
            continue
        if held is None:  # it was over before the pause came: its KV is in the cache
            known = (*prompt, *ids[:-1])
            held = await _run(engines[at], _spec(run_id, known, len(prompt), 1, prefill_only=True), [], None)
        kv_from = run_id
        if hop.moves and hop.keeps_kv and await _moved(engines[at], engines[1 - at], run_id, (*prompt, *ids), held):
            at = 1 - at
        elif not hop.keeps_kv:
            await engines[at].release(run_id)
            at, kv_from = (1 - at if hop.moves else at), None
    return tuple(ids)


async def _run(engine: Engine, spec: RunSpec, ids: list[int], pause_after: int | None) -> int | None:
    """Add its tokens to `ids`; positions of KV that it is held with, or None if it ended."""
    asked = False
    async with aclosing(engine.generate(spec)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Tokens):
                ids += event.ids
                if pause_after is not None and not asked and len(ids) >= pause_after:
                    asked = True
                    with suppress(NotFound):  # it has just ended
                        await engine.pause(spec.run_id)
            elif isinstance(event, Held):
                return event.kv_tokens
    return None


async def _moved(
    source: Engine, target: Engine, run_id: RunId, token_ids: tuple[int, ...], kv_tokens: int | None
) -> bool:
    """Carry a hold over, under the same name. False, with the hold where it was, if the target has no room."""
    if not kv_tokens:
        return False
    try:
        known = await target.open_import(
            ImportSpec(run_id=run_id, token_ids=token_ids, max_tokens=len(token_ids), salt=_SALT)
        )
        if known < kv_tokens:
            await target.write_kv(run_id, await source.export_kv(run_id, known, kv_tokens))
    except Overloaded:
        await target.release(run_id)
        return False
    await source.release(run_id)
    return True


async def _warm(engine: Engine, run_id: RunId, token_ids: tuple[int, ...]) -> None:
    async with aclosing(engine.generate(_spec(run_id, token_ids, len(token_ids), 1))) as events:  # type: ignore[type-var]
        async for _ in events:
            pass


def _spec(
    run_id: RunId,
    token_ids: tuple[int, ...],
    prompt_tokens: int,
    n_tokens: int,
    *,
    kv_from: RunId | None = None,
    prefill_only: bool = False,
    salt: bytes = _SALT,
    logprobs: int | None = None,
) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
        sampling=SamplingParams(max_tokens=n_tokens, seed=0, temperature=0.0, ignore_eos=True, logprobs=logprobs),
        salt=salt,
        kv_from=kv_from,
        prefill_only=prefill_only,
    )
