"""A live move survives one fault at each of its steps: one outcome, no token lost or twice, no block leaked.

A sample that has every step and every blow; all of them are in tests/soak/test_move_faults.py.
"""

from __future__ import annotations

import pytest

from tests.fakes.move_faults import Blow, Case, Step, all_cases, play


def sample() -> list[Case]:
    """Every step, and every blow, at least once."""
    cases, chosen = all_cases(), []
    steps, blows = set(Step), set(Blow)
    for i, case in enumerate(sorted(cases, key=lambda c: hash_of(str(c)))):
        if case.step in steps or case.blow in blows or (i % 40 == 0):
            chosen.append(case)
            steps.discard(case.step)
            blows.discard(case.blow)
    return chosen


def hash_of(name: str) -> int:
    """A fixed shuffle."""
    return sum((i + 7) * ord(c) * 2654435761 for i, c in enumerate(name)) % 1_000_003


def test_the_sample_is_large_enough() -> None:
    assert len(sample()) >= 20
    assert len(all_cases()) >= 200


@pytest.mark.parametrize("case", sample(), ids=str)
async def test_one_outcome_and_nothing_left(case: Case) -> None:
    assert (await play(case)).struck
