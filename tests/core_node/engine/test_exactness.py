"""Greedy tokens equal a plain forward pass, however they were scheduled: alone, batched, preempted, from the cache.

Teacher-forced along the engine's own output (see reference.Agreement). Tokens that differ count as exceptions
only where the reference's two best logits are within 1e-3; they are counted and printed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from mesh.errors import MeshError
from mesh.node.engine import EngineLoad
from tests.conformance.engine_runs import Outcome, greedy, run, run_spec
from tests.core_node.engine.conftest import tiny_settings
from tests.core_node.engine.reference import Agreement, Reference

N_PROMPTS = 50
VARIANTS: dict[str, dict[str, object]] = {
    "alone": {},
    "batched": {},
    "preempted": {"kv_pool_tokens": 512},
    "small steps": {"max_step_tokens": 19, "max_running": 5},
    "prefix hits": {},
}


def prompts_of(vocab_size: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Half of them share a head with another one, off and on block borders."""
    rng = random.Random(seed)
    heads = [tuple(rng.randrange(vocab_size) for _ in range(n)) for n in (16, 37, 64)]
    prompts = []
    for i in range(N_PROMPTS):
        head = heads[i % 3] if i % 2 else ()
        tail = tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest)))
        prompts.append(head + tail)
    return prompts


async def generate(
    settings: CoreEngineSettings, prompts: Sequence[tuple[int, ...]], n_tokens: int, variant: str
) -> tuple[list[Outcome], EngineLoad]:
    engine = CoreEngine(settings)
    await engine.start()
    try:
        if variant == "prefix hits":
            for i, prompt in enumerate(prompts):
                await run(engine, run_spec(f"warm{i}", prompt, greedy(2)))
        specs = [run_spec(f"r{i}", prompt, greedy(n_tokens)) for i, prompt in enumerate(prompts)]
        if variant == "alone":
            outcomes = [await run(engine, spec) for spec in specs]
        else:
            outcomes = list(await asyncio.gather(*(run(engine, spec) for spec in specs)))
        await engine.check_integrity()
        return outcomes, await engine.load()
    finally:
        await engine.close()


def check(
    reference: Reference, prompts: Sequence[tuple[int, ...]], outcomes: Sequence[Outcome], n_tokens: int, variant: str
) -> Agreement:
    agreement = Agreement()
    with torch.inference_mode():
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert len(outcome.ids) == n_tokens
            agreement.add(reference.logits(prompt + outcome.ids), len(prompt), outcome.ids)
    print(f"\n{variant}: {agreement}")
    return agreement


@pytest.mark.parametrize("variant", list(VARIANTS))
async def test_tiny_model(variant: str, tiny_gguf: Path, tiny_reference: Reference) -> None:
    n_tokens = 24
    prompts = prompts_of(len(tiny_reference.weights["model.embed_tokens.weight"]), longest=150)
    changes = {"kv_pool_tokens": 8192, "max_running": 32, "max_step_tokens": 128, **VARIANTS[variant]}
    outcomes, load = await generate(tiny_settings(tiny_gguf, **changes), prompts, n_tokens, variant)
    agreement = check(tiny_reference, prompts, outcomes, n_tokens, variant)
    assert agreement.wrong == 0
    assert agreement.equal > 0.99 * N_PROMPTS * n_tokens
    assert (load.preempted_total > 0) == (variant == "preempted")
    if variant == "prefix hits":
        assert sum(o.prefilled[0].cached for o in outcomes) > 0.5 * sum(len(p) for p in prompts)


async def test_a_crowd_with_priorities_cancellations_and_a_tiny_pool(
    tiny_gguf: Path, tiny_reference: Reference
) -> None:
    """Whoever is left gets the reference's tokens."""
    rng = random.Random(1)
    prompts = prompts_of(len(tiny_reference.weights["model.embed_tokens.weight"]), longest=80, seed=2)
    engine = CoreEngine(tiny_settings(tiny_gguf, kv_pool_tokens=400, max_step_tokens=48, max_running=8))
    await engine.start()

    async def one(i: int) -> Outcome | None:
        task = asyncio.create_task(run(engine, run_spec(f"r{i}", prompts[i], greedy(30), priority=rng.randrange(3))))
        if i % 4 == 0:
            await asyncio.sleep(rng.random() * 0.2)
            if i % 8 == 0:
                task.cancel()
            else:
                await engine.release(run_spec(f"r{i}", (1,)).run_id)
        try:
            return await task
        except (asyncio.CancelledError, MeshError):
            return None

    outcomes = await asyncio.gather(*(one(i) for i in range(N_PROMPTS)))
    await engine.check_integrity()
    load = await engine.load()
    await engine.close()
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
    done = [(p, o) for p, o in zip(prompts, outcomes, strict=True) if o is not None]
    assert len(done) >= 37
    assert check(tiny_reference, [p for p, _ in done], [o for _, o in done], 30, "crowd").wrong == 0
