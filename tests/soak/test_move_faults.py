"""Every blow at every step of a live move, in every direction: see tests/fakes/move_faults.py."""

from __future__ import annotations

import pytest

from tests.fakes.move_faults import Case, all_cases, play

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("case", all_cases(), ids=str)
async def test_one_outcome_and_nothing_left(case: Case) -> None:
    assert (await play(case)).struck
