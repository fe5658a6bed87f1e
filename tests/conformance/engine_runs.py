"""Helpers of the engine conformance suite: specs, runs and what came of them, and the fixtures to override."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from mesh.errors import NotFound
from mesh.node.engine import (
    Engine,
    Finished,
    Held,
    Prefilled,
    RunEvent,
    RunId,
    RunSpec,
    Tokens,
)
from mesh.node.sampling import SamplingParams
from mesh.node.stop import TextStream

SALT = b"tenant-a/public"
OTHER_SALT = b"tenant-b/public"
THIRD_SALT = b"tenant-a/internal"

TextStreams = Callable[[], TextStream]


@dataclass(slots=True)
class Outcome:
    """All events of one run, sorted by kind."""

    events: list[RunEvent] = field(default_factory=list)

    @property
    def prefilled(self) -> list[Prefilled]:
        return [e for e in self.events if isinstance(e, Prefilled)]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for e in self.events if isinstance(e, Tokens) for i in e.ids)

    @property
    def logprobs(self) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        return [p for e in self.events if isinstance(e, Tokens) for p in e.logprobs]

    @property
    def last(self) -> RunEvent:
        return self.events[-1]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.last, Finished), self.last
        return self.last

    @property
    def held(self) -> Held:
        assert isinstance(self.last, Held), self.last
        return self.last


def prompt_of(engine: Engine, n_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """`n_tokens` seeded random ids, none of which ends a sequence."""
    rng = random.Random(seed)
    plain = [i for i in range(min(engine.info.vocab_size, 4096)) if i not in engine.info.eos_token_ids]
    return tuple(rng.choice(plain) for _ in range(n_tokens))


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    """Greedy sampling that ends by length only."""
    values: dict[str, object] = {"max_tokens": max_tokens, "seed": 7, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**{**values, **changes})  # type: ignore[arg-type]


def run_spec(
    run_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    salt: bytes = SALT,
    prompt_tokens: int | None = None,
    kv_from: str | None = None,
    prefill_only: bool = False,
    priority: int = 0,
) -> RunSpec:
    return RunSpec(
        run_id=RunId(run_id),
        token_ids=tuple(token_ids),
        prompt_tokens=len(token_ids) if prompt_tokens is None else prompt_tokens,
        sampling=sampling or greedy(8),
        salt=salt,
        priority=priority,
        kv_from=None if kv_from is None else RunId(kv_from),
        prefill_only=prefill_only,
    )


async def collect(events: AsyncIterator[RunEvent], into: Outcome | None = None) -> Outcome:
    """Run to the end. `into` can be watched while the run goes on."""
    outcome = into if into is not None else Outcome()
    async for event in events:
        outcome.events.append(event)
    return outcome


async def run(engine: Engine, spec: RunSpec) -> Outcome:
    return await collect(engine.generate(spec))


async def hold_prefix(engine: Engine, run_id: str, token_ids: Sequence[int], salt: bytes = SALT) -> None:
    """Leave a hold with KV of all `token_ids`."""
    outcome = await run(engine, run_spec(run_id, token_ids, salt=salt, prefill_only=True))
    assert outcome.held.kv_tokens == len(token_ids)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until it holds; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for: the engine's queues are its own
        await asyncio.sleep(0.001)


async def pause_run(engine: Engine, run_id: str) -> None:
    """Pause a run whose iterator was just started in another task."""
    while True:
        try:
            return await engine.pause(RunId(run_id))
        except NotFound:
            await asyncio.sleep(0)


async def run_until_paused(
    engine: Engine, run_id: str, prompt: Sequence[int], sampling: SamplingParams, after_tokens: int
) -> Outcome:
    """Start a run and pause it once it gave `after_tokens`; again if it was faster (on a busy machine)."""
    for _ in range(20):
        seen = Outcome()
        task = asyncio.create_task(collect(engine.generate(run_spec(run_id, prompt, sampling)), seen))
        await until(lambda seen=seen: len(seen.ids) >= after_tokens)  # type: ignore[misc]
        try:
            await engine.pause(RunId(run_id))
        except NotFound:
            await task
            continue
        if isinstance((await task).last, Held):
            return seen
    pytest.fail("the run always ended before it could be paused")


class EngineFixtures:
    """What a subclass overrides, and the check after each test."""

    recompute_is_exact: ClassVar[bool] = True

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        raise NotImplementedError("the subclass gives the engine")
        yield  # noqa: PT022 - a subclass tears down

    @pytest.fixture
    def text_streams(self) -> TextStreams:
        raise NotImplementedError("the subclass gives its tokenizer's streams")

    @pytest.fixture(autouse=True)
    async def _sound_after_each_test(self, engine: Engine) -> AsyncIterator[None]:
        self.closed = False
        yield
        if not self.closed:
            await engine.check_integrity()
