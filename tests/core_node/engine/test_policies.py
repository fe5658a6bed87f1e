"""The order of admissions, how long anybody waits at most (in virtual time), and how a policy is chosen."""

from __future__ import annotations

import random
from importlib.metadata import EntryPoint

import pytest

from core_node.engine import policies
from core_node.engine.blocks import BlockPool
from core_node.engine.policies import POLICIES, Policy, find_policy
from core_node.engine.scheduler import Scheduler, SchedulerLimits
from core_node.engine.sequence import Sequence
from mesh.errors import InvalidRequest
from mesh.kv.hashing import root_hash
from mesh.node.engine import RunId

ROOT = root_hash("layout", b"salt")
STEP_S = 0.1
AGEING_S, STARVATION_S = 2.0, 5.0


class Clocked:
    """A scheduler for one request at a time, in virtual time; each request takes two steps."""

    def __init__(self, policy: Policy, max_running: int = 1) -> None:
        limits = SchedulerLimits(
            max_step_tokens=64,
            max_running=max_running,
            max_waiting=10_000,
            policy=policy,
            ageing_s=AGEING_S,
            starvation_s=STARVATION_S,
        )
        self.scheduler = Scheduler(BlockPool(64), limits)
        self.now_s = 0.0
        self.arrivals = 0
        self.waited_s: dict[str, float] = {}
        self.order: list[str] = []

    def add(self, name: str, *, n_tokens: int = 8, priority: int = 0, **known: int | None) -> None:
        self.arrivals += 1
        first = known.pop("first_id", None)
        start = self.arrivals * 1000 if first is None else first
        sequence = Sequence(
            run_id=RunId(name),
            token_ids=[start + i for i in range(n_tokens)],
            root=ROOT,
            priority=priority,
            arrival=self.arrivals,
            arrived_s=self.now_s,
            **known,  # type: ignore[arg-type]
        )
        self.scheduler.add(sequence)

    def step(self) -> None:
        chunks = self.scheduler.schedule(self.now_s)
        self.scheduler.take_copies()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.run_id not in self.waited_s:
                self.waited_s[sequence.run_id] = self.now_s - sequence.arrived_s
                self.order.append(sequence.run_id)
            completes = chunk.completes
            self.scheduler.computed(chunk)
            if completes and chunk.n_tokens == 1:
                self.scheduler.remove(sequence)
            elif completes:
                sequence.token_ids.append(1)
        self.now_s += STEP_S

    def run(self) -> list[str]:
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
        return self.order


def test_fcfs_does_not_look_at_priorities() -> None:
    c = Clocked(policies.fcfs)
    c.add("a", priority=5)
    c.add("b", priority=0)
    assert c.run() == ["a", "b"]


def test_the_better_priority_goes_first() -> None:
    c = Clocked(policies.priority)
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        c.add(name, priority=priority)
    assert c.run() == ["b", "d", "c", "a"]


def test_the_longest_prefix_goes_first() -> None:
    c = Clocked(policies.longest_prefix)
    c.add("first", n_tokens=40, first_id=0)
    c.run()
    c.add("none", n_tokens=40)
    c.add("some", n_tokens=20, first_id=0)
    c.add("most", n_tokens=40, first_id=0)
    assert c.run() == ["first", "most", "some", "none"]


def test_the_shortest_prediction_goes_first() -> None:
    c = Clocked(policies.shortest_predicted)
    c.add("long", max_new_tokens=50, predicted_tokens=40)
    c.add("unknown", max_new_tokens=30)
    c.add("short", max_new_tokens=50, predicted_tokens=5)
    assert c.run() == ["short", "unknown", "long"]


def overload(policy: Policy, victim: dict[str, int], others: dict[str, int], duration_s: float = 60.0) -> Clocked:
    """The victim comes first into a queue that is never empty; others that the policy likes better keep coming, as
    fast as they are served."""
    c = Clocked(policy)
    c.add("warm", n_tokens=40, first_id=0)
    c.run()
    c.add("running")
    c.step()
    c.add("victim", **victim)
    for i in range(int(duration_s / STEP_S / 2)):
        c.add(f"o{i}", **others)
        c.step()
        c.step()
    return c


SERVICE_S = 2 * STEP_S


@pytest.mark.parametrize(
    ("name", "victim", "others", "bound_s"),
    [
        ("priority", {"priority": 3}, {"priority": 0}, 3 * AGEING_S),
        ("longest_prefix", {"n_tokens": 40}, {"n_tokens": 40, "first_id": 0}, STARVATION_S),
        ("shortest_predicted", {"max_new_tokens": 90}, {"max_new_tokens": 2}, STARVATION_S),
        ("fcfs", {"priority": 9}, {"priority": 0}, 0.0),
    ],
)
def test_nobody_starves(name: str, victim: dict[str, int], others: dict[str, int], bound_s: float) -> None:
    c = overload(POLICIES[name], victim, others)
    assert c.waited_s["victim"] <= bound_s + 2 * SERVICE_S
    if bound_s:  # and the policy did prefer the others until then
        assert c.waited_s["victim"] >= bound_s - 2 * SERVICE_S


def test_without_the_bound_the_victim_would_starve() -> None:
    """That the test above can fail."""

    def for_ever(request: policies.Queued, snapshot: policies.Snapshot) -> policies.Key:
        return (request.max_new_tokens, request.arrival)

    c = overload(for_ever, {"max_new_tokens": 90}, {"max_new_tokens": 2})
    assert "victim" not in c.waited_s


def test_nobody_who_comes_late_enough_overtakes() -> None:
    """Of any two: one of priority p is overtaken by one of priority q < p only within (p - q) * ageing_s."""
    rng = random.Random(5)
    c = Clocked(policies.priority)
    arrived_s, priority = {}, {}
    for i in range(120):
        name = f"r{i}"
        priority[name], arrived_s[name] = rng.randrange(4), c.now_s
        c.add(name, priority=priority[name])
        for _ in range(rng.randrange(4)):
            c.step()
    order = c.run()
    for at, late in enumerate(order):
        for early in order[at + 1 :]:
            if arrived_s[late] > arrived_s[early]:
                lead_s = (priority[early] - priority[late]) * AGEING_S
                assert arrived_s[late] - arrived_s[early] <= lead_s + 1e-9


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidRequest, match="no scheduling policy 'best'; there are fcfs, longest_prefix, priority,"):
        find_policy("best")


def plugged(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    entries = [EntryPoint(name, f"{__name__}:shortest_prompt", policies.GROUP) for name in names]
    monkeypatch.setattr(policies, "entry_points", lambda group: entries if group == policies.GROUP else [])


def shortest_prompt(request: policies.Queued, snapshot: policies.Snapshot) -> policies.Key:
    return (request.n_tokens, request.arrival)


def test_an_installed_package_brings_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged(monkeypatch, "shortest_prompt")
    c = Clocked(find_policy("shortest_prompt"))
    c.add("long", n_tokens=30)
    c.add("short", n_tokens=3)
    assert c.run() == ["short", "long"]
    with pytest.raises(InvalidRequest, match="shortest_predicted, shortest_prompt"):
        find_policy("best")


@pytest.mark.parametrize("names", [("fcfs",), ("mine", "mine")])
def test_two_policies_of_one_name_are_refused(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plugged(monkeypatch, *names)
    with pytest.raises(InvalidRequest, match="more than one"):
        find_policy(names[0])
