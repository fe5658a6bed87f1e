"""The batching policy: rows of numbers."""

from __future__ import annotations

import random

import pytest

from edge_node.engine.schedule import RunState, StepPlan, may_admit, plan_step, step_budget


def run(key: int, outstanding: int = 1, *, priority: int = 0, arrival: int | None = None, frees: int = 10) -> RunState:
    return RunState(
        key=key,
        priority=priority,
        arrival=key if arrival is None else arrival,
        outstanding=outstanding,
        decoding=outstanding == 1,
        frees=frees,
    )


@pytest.mark.parametrize(
    ("runs", "budget", "room", "want"),
    [
        ([], 8, 8, StepPlan(compute=())),
        ([run(1)], 8, 8, StepPlan(compute=((1, 1),))),
        # Decodes come first, whatever the order.
        ([run(1, 20), run(2)], 8, 100, StepPlan(compute=((2, 1), (1, 7)))),
        # Prompts share what is left, in order of arrival, then by priority.
        ([run(1, 3), run(2, 20)], 8, 100, StepPlan(compute=((1, 3), (2, 5)))),
        ([run(1, 20), run(2, 20, priority=-1)], 8, 100, StepPlan(compute=((2, 8),))),
        # Cells bound a prompt's chunk too.
        ([run(1, 20)], 8, 5, StepPlan(compute=((1, 5),))),
        # No cell for a decode: the last in order gives way, and only as many as it takes.
        ([run(1), run(2), run(3)], 8, 2, StepPlan(compute=((1, 1), (2, 1)), preempt=(3,))),
        ([run(1), run(2, priority=-1), run(3)], 8, 0, StepPlan(compute=((2, 1), (1, 1)), preempt=(3,))),
        # A prompt that got no cell, with nothing else to do.
        ([run(1, 20, frees=5), run(2, 20, frees=3)], 8, 0, StepPlan(compute=((1, 3),), preempt=(2,))),
        # Nobody can go on.
        ([run(1, frees=0)], 8, 0, StepPlan(compute=(), preempt=(1,))),
        # More decodes than budget: the first in order.
        ([run(1), run(2), run(3)], 2, 100, StepPlan(compute=((1, 1), (2, 1)))),
    ],
)
def test_a_step(runs: list[RunState], budget: int, room: int, want: StepPlan) -> None:
    assert plan_step(runs, budget_tokens=budget, room_cells=room) == want


def test_bounds_hold_for_any_runs() -> None:
    rng = random.Random(0)
    for _ in range(500):
        runs = [
            run(k, rng.choice([1, 1, 1, 2, 30]), priority=rng.randint(0, 2), frees=rng.randint(0, 20))
            for k in range(rng.randint(1, 8))
        ]
        budget, room = rng.randint(1, 40), rng.randint(0, 40)
        plan = plan_step(runs, budget_tokens=budget, room_cells=room)
        by_key = {r.key: r for r in runs}
        total = sum(n for _, n in plan.compute)
        assert total <= min(budget, room + sum(by_key[k].frees for k in plan.preempt))
        assert all(1 <= n <= by_key[k].outstanding for k, n in plan.compute)
        assert not {k for k, _ in plan.compute} & set(plan.preempt)
        assert total > 0 or len(plan.preempt) == len(runs)
        # Whoever was preempted comes after everybody who goes on.
        stay = [r.order for r in runs if r.key not in plan.preempt]
        assert all(by_key[k].order >= max(stay) for k in plan.preempt if stay)
        assert plan_step(runs[::-1], budget_tokens=budget, room_cells=room) == plan


@pytest.mark.parametrize(
    ("need", "room", "running", "want"),
    [
        (10, 10, 0, True),  # alone it may have everything
        (11, 10, 0, False),
        (10, 10, 1, False),  # beside others it leaves them room to grow: 1 each and 1 % of 200
        (10, 12, 1, False),
        (10, 13, 1, True),
        (1, 200, 4, False),  # no slot
    ],
)
def test_admission(need: int, room: int, running: int, want: bool) -> None:
    got = may_admit(need_cells=need, room_cells=room, capacity_cells=200, n_running=running, max_running=4)
    assert got is want


@pytest.mark.parametrize(
    ("n_decoding", "speed", "want"),
    [
        (0, 10.0, 256),  # nobody waits
        (3, 0.0, 256),  # nothing is known yet
        (3, 10.0, 67),  # slow: the least chunk
        (3, 300.0, 153),
        (3, 5000.0, 256),
    ],
)
def test_prompts_hold_up_decodes_for_a_bounded_time(n_decoding: int, speed: float, want: int) -> None:
    got = step_budget(max_step_tokens=256, n_decoding=n_decoding, prefill_tokens_per_s=speed, max_stall_s=0.5)
    assert got == want
