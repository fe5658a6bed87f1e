"""Random schedules do not show in a request's tokens: engines of a tiny model, many fates.

f32 may differ where the two best logits are within 1e-3 (counted and printed); what computes rows the same to the bit
in any company (`exact` in torch, the compiled kernels) may not differ at all.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_node.bench.company import Agreement, Alone, alone
from core_node.bench.exactness import Schedule, compare, made_prompts, schedules
from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from core_node.kernels.build import best_variant, library
from mesh.errors import NotImplementedHere
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf
from tests.core_node.engine.conftest import tiny_settings

N_PROMPTS, N_TOKENS, LONGEST = 20, 10, 90
WAYS: dict[str, dict[str, object]] = {
    "f32": {"dtype": "f32"},
    "bf16 exact": {"dtype": "bf16", "backend": "torch", "exact": True},
    "bf16 kernels": {"dtype": "bf16", "backend": "kernels"},
    "int8 kernels": {"dtype": "int8", "backend": "kernels"},
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A way to compute, prompts, and their tokens alone."""

    way: str
    settings: CoreEngineSettings
    prompts: list[tuple[int, ...]]
    single: list[Alone]


@pytest.fixture(scope="module", params=list(WAYS))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    way = WAYS[request.param]
    if way.get("backend") == "kernels":
        try:
            library(best_variant())
        except NotImplementedHere as exc:
            pytest.skip(str(exc))
    torch.set_num_threads(1)
    config = TinyConfig(n_layers=2, head_dim=32)
    path: Path = write_gguf(tmp_path_factory.mktemp("m") / "tiny.gguf", random_weights(config), config)
    base = tiny_settings(
        path, kv_pool_tokens=8192, max_running=32, max_step_tokens=256, **way, max_context_tokens=LONGEST + 32
    )
    prompts = made_prompts(random.Random(0), N_PROMPTS, LONGEST, config.vocab_size)

    async def measure() -> list[Alone]:
        engine = CoreEngine(base)
        await engine.start()
        try:
            return await alone(engine, prompts, N_TOKENS)
        finally:
            await engine.close()

    return Subject(request.param, base, prompts, asyncio.run(measure()))


def check(subject: Subject, schedule: Schedule) -> tuple[Agreement, int]:
    changed = replace(subject.settings, **schedule.changes)
    agreement, preempted = asyncio.run(compare(changed, schedule, subject.prompts, subject.single, 1e-3))
    print(f"\n{subject.way}, {schedule.name}: {agreement}, {preempted} preempted")
    assert agreement.wrong == 0
    if subject.way != "f32":
        assert agreement.near_ties == 0
    assert agreement.equal >= 0.9 * N_PROMPTS * N_TOKENS
    return agreement, preempted


@pytest.mark.parametrize("number", range(6))
def test_each_schedule(subject: Subject, number: int) -> None:
    schedule = schedules(random.Random(1), subject.prompts, N_TOKENS)[number]
    _, preempted = check(subject, schedule)
    assert preempted > 0 or schedule.name != "preempted"


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_schedules(subject: Subject, seed: int) -> None:
    check(subject, schedules(random.Random(seed), subject.prompts, N_TOKENS)[-1])


@pytest.mark.soak
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_random_schedules(subject: Subject, seed: int) -> None:
    check(subject, schedules(random.Random(seed), subject.prompts, N_TOKENS)[-1])


def test_a_difference_is_counted_and_told_apart() -> None:
    agreement = Agreement()
    agreement.add(Alone(ids=(1, 2, 3, 4), gaps=(1.0, 5e-4, 1.0, 1.0)), (1, 9, 9, 9))
    agreement.add(Alone(ids=(1, 2), gaps=(1.0, 0.5)), (1, 9))
    agreement.add(Alone(ids=(1, 2), gaps=(1.0, 0.5)), (1, 2))
    assert (agreement.equal, agreement.near_ties, agreement.wrong, agreement.not_compared) == (4, 1, 1, 2)
