from __future__ import annotations

import random

import pytest

from mesh.rpc.uplink.backoff import FullJitter


class Highest(random.Random):
    """Draws the upper end, so that the ceiling shows."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_the_ceiling_doubles_up_to_the_cap() -> None:
    backoff = FullJitter(Highest(), base_s=0.2, cap_s=5.0)
    assert [backoff.next_s() for _ in range(7)] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_low_cap_lowers_the_first_delay() -> None:
    backoff = FullJitter(Highest(), cap_s=0.05)
    assert [backoff.next_s() for _ in range(3)] == pytest.approx([0.05, 0.05, 0.05])


def test_reset_starts_over() -> None:
    backoff = FullJitter(Highest(), base_s=0.2, cap_s=5.0)
    for _ in range(4):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.2)


def test_jitter_is_full_and_seeded() -> None:
    backoff = FullJitter(random.Random(1), base_s=1.0, cap_s=1.0)
    delays = [backoff.next_s() for _ in range(1000)]
    assert min(delays) < 0.05
    assert max(delays) > 0.95
    again = FullJitter(random.Random(1), base_s=1.0, cap_s=1.0)
    assert delays == [again.next_s() for _ in range(1000)]


@pytest.mark.parametrize(("base_s", "cap_s"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_bad_bounds_are_refused(base_s: float, cap_s: float) -> None:
    with pytest.raises(ValueError, match="base_s"):
        FullJitter(random.Random(1), base_s=base_s, cap_s=cap_s)
