"""Many random worlds through the code that decides and past the checker."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.breach.checker import breaches
from placement.breach.worlds import decided, draw, outcomes
from placement.detect.guard import Guard


@dataclass(slots=True)
class Tally:
    """`shapes`: plans by shape; `breaches`: (world's number, what was found), the first MAX_KEPT."""

    worlds: int = 0
    refused: int = 0
    outcomes: int = 0
    breached: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    breaches: list[tuple[int, str]] = field(default_factory=list)


MAX_KEPT = 20


async def run_worlds(
    n: int, *, seed: int, until_breach: bool = False, progress: Callable[[int, int, str], None] | None = None
) -> Tally:
    """Draw, decide, check. `until_breach`: stop at the first one."""
    tally, rng, guard = Tally(), random.Random(seed), Guard()
    for number in range(n):
        if progress is not None and number % 50 == 0:
            progress(number, n, f"{tally.breached} breaches")
        world = draw(rng)
        tally.worlds += 1
        outcome = await decided(world, guard)
        if outcome is None:
            tally.refused += 1
            continue
        tally.shapes[outcome[1].choice.shape.name.lower()] += 1
        for happened in outcomes(world, *outcome):
            tally.outcomes += 1
            if found := breaches(happened, world.policy_yaml):
                tally.breached += 1
                if len(tally.breaches) < MAX_KEPT:
                    tally.breaches.append((number, "; ".join(found)))
        if until_breach and tally.breached:
            break
    return tally
