"""`kvmesh bench breach`: random policies, meshes, failures and requests; every outcome is checked by code that shares
nothing with the code that decided. Then the deciding code is broken on purpose, to see that the checker notices."""

from __future__ import annotations

from collections.abc import Mapping

from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from placement.breach.mutations import MUTATIONS
from placement.breach.run import run_worlds


class BreachBench:
    """See the module's docstring."""

    name = "breach"
    question = "Does any random policy, mesh and failure lead to a breach, and would the checker notice one?"
    defaults: Mapping[str, Cell] = {"worlds": 10_000, "worlds_per_mutation": 2_000, "seed": 1}

    async def run(self, context: BenchContext) -> BenchResult:
        """About two minutes with the defaults."""
        seed = context.count("seed")
        clean = await run_worlds(context.count("worlds"), seed=seed, progress=context.progress)
        rows: list[Mapping[str, Cell]] = [
            _row("the code as it is", clean.worlds, clean.outcomes, clean.breached, clean.breaches)
        ]
        caught = 0
        for i, (name, mutation) in enumerate(MUTATIONS.items()):
            context.progress(i, len(MUTATIONS), name)
            with mutation():
                broken = await run_worlds(context.count("worlds_per_mutation"), seed=seed, until_breach=True)
            caught += bool(broken.breached)
            rows.append(_row(name, broken.worlds, broken.outcomes, broken.breached, broken.breaches))
        return BenchResult(
            rows=tuple(rows),
            goals=(
                Goal(name="breaches", value=clean.breached, goal=0),
                Goal(name="faults caught", value=caught, goal=len(MUTATIONS) - 1, direction=Direction.AT_LEAST),
            ),
            notes=(
                f"{clean.refused:,} of {clean.worlds:,} requests were refused; plans: "
                + ", ".join(f"{shape} {n:,}" for shape, n in sorted(clean.shapes.items())),
            ),
        )


def _row(name: str, worlds: int, outcomes: int, breached: int, kept: list[tuple[int, str]]) -> Mapping[str, Cell]:
    return {
        "code": name,
        "worlds": worlds,
        "outcomes": outcomes,
        "breaches": breached,
        "first": kept[0][1] if kept else "",
    }


BENCH = BreachBench()
