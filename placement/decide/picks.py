"""The built-in picks: which of the candidates that are about as good as the best is taken. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement.decide.types import Candidate


class PowerOfTwo:
    """The cheaper of two that are drawn (Mitzenmacher, IEEE TPDS 12(10), 2001): a burst is spread, and still goes to
    the better ones more often."""

    name = "power_of_two"

    def pick(self, near: Sequence[Candidate], rng: random.Random) -> Candidate:
        if len(near) == 1:
            return near[0]
        first, second = rng.sample(range(len(near)), 2)
        if near[first].cost_s == near[second].cost_s:
            return near[first]
        return near[min(first, second)]


class Uniform:
    """Any of them, each as likely as the others."""

    name = "uniform"

    def pick(self, near: Sequence[Candidate], rng: random.Random) -> Candidate:
        return near[rng.randrange(len(near))]


class Best:
    """The cheapest; equals in the order drawn for this decision."""

    name = "best"

    def pick(self, near: Sequence[Candidate], rng: random.Random) -> Candidate:
        return near[0]


POWER_OF_TWO, UNIFORM, BEST = PowerOfTwo(), Uniform(), Best()
"""Entry points of `kvmesh.picks`."""
