"""What a step computes: the batching policy, as functions of numbers. Pure; knows no run, cache or llama.cpp.

Each step has a token budget. Runs that decode come first, one token each, so that a long prompt never stalls
them by more than a step; what is left of the budget goes to prompts, in order of (priority, arrival). When cells
run out, the run that is last in that order is preempted: it gives up its cells and is computed again later.
New runs are admitted in order and never overtake each other, and not in a step that preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ADMIT_HEADROOM_RATIO: Final = 0.01
"""Share of all cells that admission leaves free while others run, so that a new run is not preempted at once."""

MIN_CHUNK_TOKENS: Final = 64
"""The smallest chunk a prompt is cut to for the sake of others: what llama.cpp's tiled attention starts at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One running run. `outstanding`: tokens without KV, at least 1. `decoding`: the one outstanding token was
    sampled or is the last of its prompt. `frees`: cells that preempting it would give back."""

    key: int
    priority: int
    arrival: int
    outstanding: int
    decoding: bool
    frees: int

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority, self.arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """`compute`: (run, number of tokens) in the order of the batch, decodes first. `preempt`: in this order, before."""

    compute: tuple[tuple[int, int], ...]
    preempt: tuple[int, ...] = ()


def plan_step(runs: Sequence[RunState], *, budget_tokens: int, room_cells: int) -> StepPlan:
    """Share one step out. Every token computed takes a cell of the room.

    If there are runs, the plan computes at least one token or preempts all of them."""
    left = sorted(runs, key=lambda r: r.order)
    preempt: list[int] = []
    while left:
        compute = _share_out(left, budget_tokens, room_cells)
        if compute is not None:
            return StepPlan(compute=compute, preempt=tuple(preempt))
        victim = left.pop()
        preempt.append(victim.key)
        room_cells += victim.frees
    return StepPlan(compute=(), preempt=tuple(preempt))


def _share_out(runs: Sequence[RunState], budget: int, room: int) -> tuple[tuple[int, int], ...] | None:
    """None if a decode finds no cell, or nothing at all can be computed."""
    decodes = [r for r in runs if r.decoding]
    if len(decodes) > room:
        return None
    compute = [(r.key, 1) for r in decodes[:budget]]
    budget -= len(compute)
    room -= len(compute)
    for run in runs:
        if not run.decoding and (n := min(run.outstanding, budget, room)) > 0:
            compute.append((run.key, n))
            budget -= n
            room -= n
    return tuple(compute) or None


def step_budget(*, max_step_tokens: int, n_decoding: int, prefill_tokens_per_s: float, max_stall_s: float) -> int:
    """Tokens of the next step. Where sequences are decoding, prompts may hold them up for `max_stall_s` at the
    speed that was measured (0.0: not yet), but always get MIN_CHUNK_TOKENS, so that they end."""
    if n_decoding == 0 or prefill_tokens_per_s == 0.0:
        return max_step_tokens
    chunk = max(MIN_CHUNK_TOKENS, int(prefill_tokens_per_s * max_stall_s))
    return min(max_step_tokens, n_decoding + chunk)


def may_admit(*, need_cells: int, room_cells: int, capacity_cells: int, n_running: int, max_running: int) -> bool:
    """Whether the next waiting run may start. `need_cells`: all of its tokens and one more, less what it shares."""
    if n_running >= max_running:
        return False
    headroom = n_running + int(ADMIT_HEADROOM_RATIO * capacity_cells) if n_running else 0
    return need_cells + headroom <= room_cells
