"""Random lives of a whole engine core against a naive model: no leak, no double owner, no wrong token.

500 operations here, 10,000 with `make soak` (and as many in one seeded life, which Hypothesis is too careful for).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from core_node.engine import core
from tests.core_node.engine.engine_world import World

ANY = st.integers(0, 50)
SMALL = st.integers(0, 2)


class _Silent:
    def exception(self, event: str, **fields: object) -> None:
        return


@pytest.fixture(autouse=True)
def _no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps fail here on purpose, and each traceback takes longer to print than a hundred steps."""
    monkeypatch.setattr(core, "_log", _Silent())


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(branch=SMALL, n=st.integers(1, 90), salt=SMALL, priority=SMALL, more=st.integers(1, 60), sampled=SMALL)
    def add(self, branch: int, n: int, salt: int, priority: int, more: int, sampled: int) -> None:
        self.world.add(branch, n, salt, priority, more, sampled)

    @rule(which=ANY, more=st.integers(1, 30), sampled=SMALL)
    def fork(self, which: int, more: int, sampled: int) -> None:
        self.world.fork(which, more, sampled)

    @rule(branch=SMALL, n_tokens=st.integers(1, 70), n=st.integers(2, 4))
    def samples(self, branch: int, n_tokens: int, n: int) -> None:
        self.world.samples(branch, n_tokens, n)

    @rule(branch=SMALL, n_tokens=st.integers(1, 60), salt=SMALL)
    def prefill(self, branch: int, n_tokens: int, salt: int) -> None:
        self.world.prefill(branch, n_tokens, salt)

    @rule(n=st.integers(1, 12))
    def step(self, n: int) -> None:
        self.world.step(n)

    @rule(n=st.integers(13, 60))
    def many_steps(self, n: int) -> None:
        self.world.step(n)

    @rule()
    def fail_a_step(self) -> None:
        self.world.fail_a_step()

    @rule(which=ANY, by_consumer=st.booleans())
    def abort(self, which: int, by_consumer: bool) -> None:
        self.world.abort(which, by_consumer)

    @rule(which=ANY)
    def pause(self, which: int) -> None:
        self.world.pause(which)

    @rule(which=ANY, priority=SMALL)
    def resume(self, which: int, priority: int) -> None:
        self.world.resume(which, priority)

    @rule(which=ANY)
    def release(self, which: int) -> None:
        self.world.release(which)

    @rule(which=ANY, whole=st.booleans(), more=st.integers(0, 40))
    def export_and_import(self, which: int, whole: bool, more: int) -> None:
        self.world.export_and_import(which, whole, more)

    @rule(which=ANY)
    def refused_write(self, which: int) -> None:
        self.world.refused_write(which)

    @invariant()
    def sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


def test_random_lives() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=12, stateful_step_count=45, deadline=None))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_lives_for_long() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))


def walk(world: World, rng: random.Random, n_operations: int) -> None:
    """Weights that keep the pool full without ending everything at once."""
    for _ in range(n_operations):
        match rng.choices(range(9), (12, 5, 3, 3, 40, 5, 6, 6, 6))[0]:
            case 0:
                n, more = rng.randrange(1, 90), rng.randrange(1, 60)
                world.add(rng.randrange(3), n, rng.randrange(2), rng.randrange(3), more, rng.randrange(3))
            case 1:
                world.fork(rng.randrange(50), rng.randrange(1, 30), rng.randrange(3))
            case 2:
                world.samples(rng.randrange(3), rng.randrange(1, 70), rng.randrange(2, 5))
            case 3:
                world.prefill(rng.randrange(3), rng.randrange(1, 60), rng.randrange(2))
            case 4:
                world.step(rng.randrange(1, 20))
            case 5:
                world.abort(rng.randrange(50), rng.random() < 0.5)
            case 6:
                world.pause(rng.randrange(50))
            case 7:
                world.resume(rng.randrange(50), rng.randrange(3))
            case _:
                if rng.random() < 0.4:
                    world.release(rng.randrange(50))
                else:
                    world.export_and_import(rng.randrange(50), rng.random() < 0.6, rng.randrange(40))
        world.check()
    world.finish()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seeded_life(seed: int) -> None:
    world = World()
    walk(world, random.Random(seed), 250)
    assert world.core.load().preempted_total > 0
    assert world.core._scheduler.swapped_total > 0
    assert world.ended_by_themselves > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_long_seeded_life() -> None:
    world = World()
    walk(world, random.Random(3), 10_000)
    assert world.core.load().preempted_total > 50
