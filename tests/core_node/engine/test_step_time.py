"""The fit of step times, and the prefill that it allows beside decoding. Durations are made up; no clock."""

from __future__ import annotations

import random

import pytest

from core_node.engine.blocks import BlockPool
from core_node.engine.scheduler import Scheduler, SchedulerLimits
from core_node.engine.sequence import Sequence
from core_node.engine.step_time import StepTimeFit, StepWork
from mesh.kv.hashing import root_hash
from mesh.node.engine import RunId


def true_s(work: StepWork) -> float:
    """A machine: 8 ms for the weights, 0.1 ms a decoding row, 0.3 ms a prompt token, and attention."""
    return (
        0.008
        + 1e-4 * work.decode_tokens
        + 1e-7 * work.decode_context
        + 3e-4 * work.prefill_tokens
        + 1e-8 * work.prefill_attention
    )


def work(decode: int, prefill: int, start: int = 0, context: int = 300) -> StepWork:
    return StepWork(
        decode_tokens=decode,
        decode_context=decode * context,
        prefill_tokens=prefill,
        prefill_attention=prefill * start + prefill * (prefill + 1) // 2,
    )


def fitted(n_steps: int = 200, noise_ratio: float = 0.0, seed: int = 0) -> StepTimeFit:
    rng, fit = random.Random(seed), StepTimeFit()
    for _ in range(n_steps):
        w = work(rng.randrange(17), rng.choice((0, 0, 16, 64, 256)), rng.randrange(4096), rng.randrange(1, 2000))
        fit.observe(w, true_s(w) * (1 + noise_ratio * (2 * rng.random() - 1)))
    return fit


@pytest.mark.parametrize("w", [work(1, 0), work(16, 0), work(16, 64, 2000), work(0, 256, 4000)])
def test_it_finds_the_machine(w: StepWork) -> None:
    assert fitted().predict_s(w) == pytest.approx(true_s(w), rel=0.01)
    assert fitted(noise_ratio=0.2).predict_s(w) == pytest.approx(true_s(w), rel=0.15)


def test_little_is_not_fitted() -> None:
    fit = StepTimeFit()
    assert fit.predict_s(work(1, 0)) is None
    assert fit.prefill_budget(0.02, work(16, 0), 0, 240) == 240


@pytest.mark.parametrize("target_s", [0.02, 0.03, 0.05])
@pytest.mark.parametrize("start", [0, 2048, 4000])
def test_the_budget_holds_the_target_and_wastes_little(target_s: float, start: int) -> None:
    fit, decoding = fitted(), work(16, 0)
    n = fit.prefill_budget(target_s, decoding, start, 4096)
    assert n % 16 == 0
    assert true_s(work(16, n, start)) <= target_s * 1.01
    assert true_s(work(16, n + 32, start)) > target_s


def test_noise_makes_it_careful() -> None:
    calm, noisy = (fitted(noise_ratio=r).prefill_budget(0.04, work(16, 0), 0, 4096) for r in (0.0, 0.3))
    assert noisy < calm


def test_a_prompt_always_gets_on_and_never_more_than_there_is() -> None:
    fit = fitted()
    assert fit.prefill_budget(0.001, work(16, 0), 0, 240) == 16
    assert fit.prefill_budget(0.001, work(16, 0), 0, 7) == 7
    assert fit.prefill_budget(10.0, work(16, 0), 0, 240) == 240


def test_one_stall_of_the_machine_changes_little() -> None:
    fit = fitted()
    before = fit.prefill_budget(0.05, work(16, 0), 0, 4096)
    fit.observe(work(16, 64), 5.0)
    assert fit.prefill_budget(0.05, work(16, 0), 0, 4096) >= 0.6 * before


def test_it_follows_a_machine_that_became_slower() -> None:
    fit, rng = fitted(), random.Random(1)
    for _ in range(800):
        w = work(rng.randrange(17), rng.choice((0, 16, 64, 256)), rng.randrange(4096))
        fit.observe(w, 2 * true_s(w))
    assert fit.predict_s(work(16, 64)) == pytest.approx(2 * true_s(work(16, 64)), rel=0.05)


def test_only_decoding_is_known_at_first() -> None:
    """Prefill looks free to a fit that never saw any; what it then sees corrects it at once."""
    fit = StepTimeFit()
    for _ in range(50):
        fit.observe(work(16, 0), true_s(work(16, 0)))
    for _ in range(3):
        n = fit.prefill_budget(0.03, work(16, 0), 0, 1024)
        fit.observe(work(16, n), true_s(work(16, n)))
    assert true_s(work(16, fit.prefill_budget(0.03, work(16, 0), 0, 1024))) <= 0.03 * 1.1


def test_a_long_prompt_beside_decoding_holds_the_target() -> None:
    """The scheduler on the made-up machine: 4,096 tokens among 16 that decode. Steps stay at the target once the fit
    has seen a few, and the prompt is computed all the same."""
    target_s = 0.03
    limits = SchedulerLimits(max_step_tokens=4200, max_running=32, max_waiting=32, tpot_target_s=target_s)
    s = Scheduler(BlockPool(600), limits)
    root = root_hash("layout", b"salt")

    def add(i: int, n: int) -> None:
        s.add(Sequence(run_id=RunId(f"s{i}"), token_ids=[i * 10_000 + j for j in range(n)], root=root, arrival=i))

    def step() -> float:
        chunks = s.schedule(0.0)
        w = StepWork.of(chunks)
        s.step_time.observe(w, true_s(w))
        for chunk in chunks:
            completes = chunk.completes
            s.computed(chunk)
            if completes:
                chunk.sequence.token_ids.append(7)
        return true_s(w)

    for i in range(16):
        add(i, 32 + 5 * i)
    for _ in range(30):
        step()
    add(99, 4096)
    durations_s = []
    while s.waiting or any(q.remaining > 1 for q in s.running):
        durations_s.append(step())
    assert len(durations_s) > 4096 * 3e-4 / target_s
    assert sorted(durations_s)[int(0.99 * len(durations_s)) - 1] <= 1.1 * target_s


def test_without_a_target_the_budget_is_the_setting() -> None:
    s = Scheduler(BlockPool(64), SchedulerLimits(max_step_tokens=128, max_running=4, max_waiting=4))
    root = root_hash("layout", b"salt")
    s.add(Sequence(run_id=RunId("a"), token_ids=list(range(4)), root=root, arrival=1))
    for chunk in s.schedule(0.0):
        s.computed(chunk)
        chunk.sequence.token_ids.append(5)
    s.add(Sequence(run_id=RunId("b"), token_ids=list(range(500, 900)), root=root, arrival=2))
    assert [c.n_tokens for c in s.schedule(0.0)] == [1, 127]
