"""Properties of the plan runner in a world where everything fails at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh import errors
from placement.entry.runner import PlanRunner
from placement.entry.runner_legs import Phase
from placement.entry.runner_types import Emit, EmitMigration, Fail, Finish, MoveCause, MoveFailed, MoveKv
from tests.placement.entry.plans import PROMPT, spec
from tests.properties.runner_world import World

WAYS = ("edge", "core", "core>edge", "edge>core", "core2", "core2>edge")


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=5, unique=True),
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 8),
    st.integers(0, 4),
)
# A replay's target whose stream broke when it had become a hold.
@example(ways=["edge"], seed=629, length=5, stops=False, faults=2, moves=1)
def test_one_outcome_every_token_once_nothing_left(
    ways: list[str], seed: int, length: int, stops: bool, faults: int, moves: int
) -> None:
    for game in range(30):
        world = World(
            spec(*ways, max_tokens=length),
            random.Random(f"{seed}/{game}"),
            end=len(PROMPT) + length,
            faults=faults,
            moves=moves,
            stops=stops,
        )
        world.play()
        check(world)
        if not (faults or moves or stops):
            assert any(isinstance(e, Finish) for e in world.effects)


def check(world: World) -> None:
    """What holds after every game."""
    outcomes = [e for e in world.effects if isinstance(e, Finish | Fail)]
    assert len(outcomes) == 1
    assert world.runner.phase is Phase.ENDED

    position = len(PROMPT)
    for emit in (e for e in world.effects if isinstance(e, Emit)):
        assert emit.offset_tokens == position - len(PROMPT)
        assert emit.ids == tuple(range(position, position + len(emit.ids)))
        position += len(emit.ids)
    assert outcomes[0].usage.completion_tokens == position - len(PROMPT)
    if isinstance(outcomes[0], Finish):
        assert position == world.end

    assert world.runs == {}
    assert world.holds == {}
    assert world.transfers == {}
    assert world.nodes_used <= world.nodes_known()

    shipped = sum(isinstance(e, MoveKv) for e in world.effects)
    failed = sum(isinstance(e, MoveFailed) for e in world.effects)
    arrived = sum(isinstance(e, EmitMigration) and bool(e.codec) for e in world.effects)
    asked = [e for e in world.effects if isinstance(e, EmitMigration | MoveFailed) and e.cause is MoveCause.OPERATOR]
    assert len(asked) == world.requested
    # Those refused at once shipped nothing, and those that are replayed ship nothing either.
    assert 0 <= failed + arrived - shipped <= world.requested


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_without_fallbacks_only_the_choice_and_moves_are_used(seed: int) -> None:
    world = World(spec("core", max_tokens=6), random.Random(seed), end=len(PROMPT) + 6, moves=0)
    world.play()
    assert world.nodes_used == {"core"}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12))
def test_the_same_events_give_the_same_effects(seeds: list[int]) -> None:
    def played() -> list[object]:
        world = World(spec("edge>core", "core2", max_tokens=6), random.Random(str(seeds)), end=len(PROMPT) + 6)
        world.play()
        return [e for e in world.effects if not isinstance(e, Fail | MoveFailed)]

    assert played() == played()


def test_an_unknown_run_is_a_bug_of_the_driver_not_a_crash_of_the_request() -> None:
    runner = PlanRunner(spec("core"))
    with pytest.raises(errors.Internal):
        runner.handle(object(), 0.0)  # type: ignore[arg-type]
    assert runner.phase is Phase.NEW
