"""The modelled node against worked examples, queueing theory, and a plain step-by-step model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.sim.job import Job
from placement.sim.node import SimNode
from placement.sim.profiles import NodeProfile
from tests.placement.sim.helpers import poisson

PLAIN = NodeProfile(
    name="plain", base_s=0.01, context_s=0.0, chunk_tokens=100, most_running=64, kv_capacity_tokens=1_000_000
)
ATTENDING = NodeProfile(
    name="attending", base_s=0.01, context_s=1e-6, chunk_tokens=64, most_running=4, kv_capacity_tokens=5_000
)


@dataclass
class Told:
    """A listener that notes times."""

    env: simpy.Environment
    first_s: dict[str, float] = field(default_factory=dict)
    end_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def on_prefilled(self, job: Job) -> None:
        self.first_s[job.run_id] = self.env.now
        self.cached[job.run_id] = job.cached_tokens

    def on_ended(self, job: Job) -> None:
        assert job.run_id not in self.end_s
        self.end_s[job.run_id] = self.env.now

    def on_held(self, job: Job) -> None:
        self.held[job.run_id] = job.made

    def on_failed(self, job: Job) -> None:
        self.failed[job.run_id] = job.made


class Bench:
    def __init__(self, profile: NodeProfile) -> None:
        self.env = simpy.Environment()
        self.told = Told(self.env)
        self.node = SimNode(self.env, "n", profile, rng=random.Random(1), noise=0.0)

    def submit(self, at_s: float, name: str, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Job:
        job = Job(
            run_id=name, prompt_tokens=prompt, output_tokens=output, blocks=blocks, block_tokens=10, listener=self.told
        )
        self.at(at_s, lambda: self.node.submit(job))
        return job

    def at(self, at_s: float, then: object) -> None:
        event = self.env.timeout(at_s - self.env.now)
        event.callbacks.append(lambda _: then())  # type: ignore[operator,union-attr]


def test_one_request_takes_its_prefill_steps_and_a_step_for_each_further_token() -> None:
    bench = Bench(PLAIN)
    bench.submit(1.0, "a", prompt=250, output=11)
    bench.env.run()
    assert bench.told.first_s["a"] == pytest.approx(1.0 + 3 * 0.01)
    assert bench.told.end_s["a"] == pytest.approx(1.0 + 3 * 0.01 + 10 * 0.01)
    assert bench.node.pool.private_tokens == 0


def test_steps_grow_with_the_positions_attended_to() -> None:
    bench = Bench(ATTENDING)
    bench.submit(0.0, "a", prompt=64, output=3)
    bench.env.run()
    steps = [0.01 + 1e-6 * context for context in (64, 66, 67)]
    assert bench.told.end_s["a"] == pytest.approx(sum(steps))


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_single_chunk_requests_wait_as_in_an_m_d_1_queue(load: float) -> None:
    """Mean wait of M/D/1: load * service / (2 (1 - load)), by Pollaczek and Khinchine."""
    bench, service_s, n = Bench(PLAIN), PLAIN.base_s, 40_000
    arrivals = poisson(n, load / service_s, seed=11)
    for i, at_s in enumerate(arrivals):
        bench.submit(at_s, str(i), prompt=100, output=1)
    bench.env.run()
    waits = [bench.told.end_s[str(i)] - at_s - service_s for i, at_s in enumerate(arrivals)]
    assert sum(waits) / n == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    bench = Bench(PLAIN)
    blocks = tuple(range(50))
    bench.submit(0.0, "a", prompt=500, output=1, blocks=blocks)
    bench.submit(1.0, "b", prompt=550, output=1, blocks=blocks)
    bench.env.run()
    assert bench.told.end_s["a"] == pytest.approx(0.05)
    assert bench.told.cached == {"a": 0, "b": 500}
    assert bench.told.end_s["b"] == pytest.approx(1.01)


def test_a_request_without_room_waits_and_one_that_never_fits_fails() -> None:
    bench = Bench(ATTENDING)
    bench.submit(0.0, "big", prompt=4_000, output=10)
    bench.submit(0.001, "next", prompt=2_000, output=10)
    bench.submit(0.002, "never", prompt=5_000, output=10)
    bench.env.run()
    assert bench.told.failed == {"never": 0}
    assert bench.told.first_s["next"] > bench.told.end_s["big"]


def test_a_crash_fails_all_with_the_tokens_they_had() -> None:
    bench = Bench(PLAIN)
    bench.submit(0.0, "a", prompt=100, output=100)
    bench.submit(0.5, "b", prompt=100_000, output=5)
    bench.at(0.515, bench.node.crash)
    bench.at(0.6, bench.node.restart)
    bench.submit(0.55, "c", prompt=100, output=2)
    bench.submit(0.7, "d", prompt=100, output=2)
    bench.env.run()
    # 0.01 s for the first token, then one a step: 51 whole steps ended by 0.515 s.
    assert bench.told.failed == {"a": 51, "b": 0, "c": 0}
    assert set(bench.told.end_s) == {"d"}
    assert bench.node.pool.used_tokens == 0


def test_a_run_can_be_cancelled_and_stopped_between_steps() -> None:
    bench = Bench(PLAIN)
    one, two = bench.submit(0.0, "a", 100, 100), bench.submit(0.0, "b", 100, 100)
    three = bench.submit(0.0, "c", 100, 30)
    bench.at(0.205, lambda: bench.node.cancel(one))
    bench.at(0.3, lambda: bench.node.stop(two))
    bench.env.run()
    assert one.gone
    assert set(bench.told.end_s) == {"c"}
    assert set(bench.told.held) == {"b"}
    assert three.made == 30
    assert bench.told.held["b"] == 28
    assert bench.node.n_running == 0
    assert bench.node.pool.private_tokens == 0


def test_it_fits_its_own_profile() -> None:
    bench = Bench(ATTENDING)
    for i in range(40):
        bench.submit(i * 0.5, str(i), prompt=200 + 37 * (i % 7), output=50)
    bench.env.run()
    curve = bench.node.load().curve
    assert curve.decode_base_s == pytest.approx(0.01, rel=0.02)
    assert curve.decode_context_s == pytest.approx(1e-6, rel=0.2)
    assert curve.prefill_s(0, 64, chunk_tokens=64) == pytest.approx(0.01 + 64e-6, rel=0.03)


Work = list[tuple[float, int, int]]


def plainly(profile: NodeProfile, work: Work) -> dict[str, float]:
    """End times, one step after the other: first come first served, as the node's docstring says."""
    waiting = [(at_s, str(i), prompt, output) for i, (at_s, prompt, output) in enumerate(work)]
    waiting.sort(key=lambda w: (w[0], int(w[1])))
    prompts: list[list[object]] = []  # name, position, prompt, output
    rows: dict[str, list[int]] = {}  # name -> context, tokens left, total
    ends: dict[str, float] = {}
    now_s = 0.0
    while waiting or prompts or rows:
        if not prompts and not rows and waiting[0][0] > now_s:
            now_s = waiting[0][0]
        budget = max(1, profile.chunk_tokens - len(rows))
        free = budget - sum(int(str(p[2])) - int(str(p[1])) for p in prompts)
        taken = sum(r[2] for r in rows.values()) + sum(int(str(p[2])) + int(str(p[3])) for p in prompts)
        while free > 0 and waiting and waiting[0][0] <= now_s and len(prompts) + len(rows) < profile.most_running:
            _, name, prompt, output = waiting[0]
            if taken + prompt + output > profile.kv_capacity_tokens:
                break
            waiting.pop(0)
            prompts.append([name, 0, prompt, output])
            free, taken = free - prompt, taken + prompt + output
        attended = 0
        for row in rows.values():
            row[0], row[1] = row[0] + 1, row[1] - 1
            attended += row[0]
        done = []
        for p in prompts:
            part = min(budget, int(str(p[2])) - int(str(p[1])))
            if part <= 0:
                break
            p[1], budget = int(str(p[1])) + part, budget - part
            attended += int(str(p[1]))
            if p[1] == p[2]:
                done.append(p)
        now_s += profile.step_s(attended)
        for name in [name for name, row in rows.items() if row[1] == 0]:
            ends[name] = now_s
            del rows[name]
        for p in done:
            prompts.remove(p)
            name, prompt, output = str(p[0]), int(str(p[2])), int(str(p[3]))
            if output == 1:
                ends[name] = now_s
            else:
                rows[name] = [prompt + 1, output - 1, prompt + output]
    return ends


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 3.0, allow_nan=False).map(lambda t: round(t, 3) + 1e-4),
            st.integers(1, 400),
            st.integers(1, 60),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda w: w[0],
    )
)
def test_segments_are_the_same_as_single_steps(work: Work) -> None:
    bench = Bench(ATTENDING)
    for i, (at_s, prompt, output) in enumerate(work):
        bench.submit(at_s, str(i), prompt, output)
    bench.env.run()
    expected = plainly(ATTENDING, work)
    assert set(bench.told.end_s) == set(expected)
    for name, end_s in expected.items():
        assert bench.told.end_s[name] == pytest.approx(end_s, abs=1e-9)
