"""What a step computes: budget, order, preemption, holds. No torch."""

from __future__ import annotations

import pytest

from core_node.engine.blocks import BlockPool
from core_node.engine.scheduler import Chunk, Scheduler, SchedulerLimits
from core_node.engine.sequence import Phase, Sequence
from core_node.engine.swap import BlockCopy, CopyKind
from mesh.errors import Overloaded
from mesh.kv.hashing import root_hash
from mesh.node.engine import RunId

ROOT = root_hash("layout", b"salt")


def scheduler(n_blocks: int = 64, **limits: int) -> Scheduler:
    values = {"max_step_tokens": 32, "max_running": 8, "max_waiting": 8, **limits}
    return Scheduler(BlockPool(n_blocks), SchedulerLimits(**values))


def sequence(n_tokens: int, arrival: int, *, priority: int = 0, first_id: int | None = None) -> Sequence:
    first = arrival * 1000 if first_id is None else first_id
    ids = [first + i for i in range(n_tokens)]
    return Sequence(run_id=RunId(f"s{arrival}"), token_ids=ids, root=ROOT, priority=priority, arrival=arrival)


def step(s: Scheduler) -> list[Chunk]:
    """One step with a pretended model: the token after position p is p."""
    chunks = s.schedule(0.0)
    for chunk in chunks:
        completes = chunk.completes
        s.computed(chunk)
        if completes:
            chunk.sequence.token_ids.append(chunk.stop)
    return chunks


def shape(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(c.sequence.run_id, c.start, c.n_tokens) for c in chunks]


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    s = scheduler()
    s.add(sequence(70, 1))
    assert [shape(step(s)) for _ in range(4)] == [
        [("s1", 0, 32)],
        [("s1", 32, 32)],
        [("s1", 64, 6)],
        [("s1", 70, 1)],
    ]


def test_a_decoding_sequence_is_never_stalled_by_a_prompt() -> None:
    s = scheduler()
    s.add(sequence(4, 2))
    step(s)
    s.add(sequence(100, 1))
    assert shape(step(s)) == [("s2", 4, 1), ("s1", 0, 31)]
    assert shape(step(s)) == [("s2", 5, 1), ("s1", 31, 31)]


def test_waiting_goes_by_priority_then_arrival() -> None:
    s = scheduler(max_running=1)
    a, b, c = sequence(4, 1, priority=5), sequence(4, 2), sequence(4, 3)
    for q in (a, b, c):
        s.add(q)
    assert [q.arrival for q in s.waiting] == [2, 3, 1]
    step(s)
    assert s.running == [b]


def test_the_queue_is_bounded() -> None:
    s = scheduler(max_waiting=1)
    s.add(sequence(4, 1))
    with pytest.raises(Overloaded):
        s.add(sequence(4, 2))


def test_a_prefix_is_computed_once() -> None:
    s = scheduler()
    s.add(sequence(40, 1, first_id=0))
    step(s)
    step(s)
    s.add(sequence(50, 2, first_id=0))
    assert shape(step(s)) == [("s1", 40, 1), ("s2", 32, 18)]
    first, second = s.running[0], s.running[1]
    assert first.blocks[:2] == second.blocks[:2]
    assert (s.prompt_tokens_total, s.cached_tokens_total) == (90, 32)
    s.check(iter(()))


def test_one_position_is_left_to_compute() -> None:
    s = scheduler()
    s.add(sequence(32, 1, first_id=0))
    step(s)
    s.add(sequence(32, 2, first_id=0))
    assert ("s2", 31, 1) in shape(step(s))
    assert s.take_copies() == [BlockCopy(CopyKind.WITHIN, (1,), (3,))]  # it writes into that block: not the other's
    assert s.running[0].blocks[:2] == s.running[1].blocks[:2] == [0, 1]  # full and equal, it is kept once


def test_the_worst_is_preempted_and_comes_back_from_the_cache() -> None:
    s = scheduler(n_blocks=5)
    a, b = sequence(32, 1), sequence(31, 2)
    s.add(a)
    step(s)
    s.add(b)
    assert shape(step(s)) == [("s1", 32, 1), ("s2", 0, 31)]
    step(s)
    assert b.phase is Phase.RUNNING
    assert shape(step(s)) == [("s1", 34, 1)]  # both of b's blocks are full and the pool is too
    assert s.preempted_total == 1
    assert (b.phase, b.blocks, b.computed) == (Phase.WAITING, [], 0)
    s.check(iter(()))
    s.remove(a)
    assert shape(step(s)) == [("s2", 32, 1)]
    s.check(iter(()))


def test_priority_decides_who_is_preempted() -> None:
    s = scheduler(n_blocks=3)
    a, b = sequence(15, 1, priority=9), sequence(16, 2)
    s.add(a)
    s.add(b)
    for _ in range(3):
        step(s)
        s.check(iter(()))
    assert a.phase is Phase.WAITING
    assert b.phase is Phase.RUNNING


def test_a_victim_loses_what_the_step_had_given_it() -> None:
    s = scheduler(n_blocks=5, max_step_tokens=20)
    a, b = sequence(50, 1), sequence(4, 2)
    s.add(b)
    step(s)
    s.add(a)
    assert shape(step(s)) == [("s2", 4, 1), ("s1", 0, 19)]
    hold = sequence(32, 3)
    s.open_hold(hold)
    assert shape(step(s)) == [("s1", 19, 19)]  # b would have decoded, but a needs its block
    assert b.phase is Phase.WAITING
    s.check(iter([hold]))


def test_a_step_that_preempted_admits_nobody() -> None:
    s = scheduler(n_blocks=3)
    a, b, c = sequence(16, 1), sequence(16, 2), sequence(4, 3)
    s.add(a)
    s.add(b)
    step(s)
    step(s)
    assert s.preempted_total == 1
    assert b.phase is Phase.WAITING
    s.add(c)
    b_again = s.waiting[0]
    assert b_again is b  # it arrived before c
    s.check(iter(()))


def test_the_only_one_that_cannot_grow_waits_for_a_hold() -> None:
    s = scheduler(n_blocks=3)
    hold = sequence(32, 1)
    s.open_hold(hold)
    a = sequence(15, 2)
    s.add(a)
    step(s)
    step(s)
    assert step(s) == []
    assert a.phase is Phase.WAITING
    s.remove(hold)
    assert step(s) != []
    s.check(iter(()))


def test_an_admission_keeps_the_watermark_free_while_others_run() -> None:
    s = scheduler(n_blocks=4, watermark_blocks=2)
    a, b = sequence(16, 1), sequence(20, 2)
    s.add(a)
    s.add(b)
    step(s)
    assert (a.phase, b.phase) == (Phase.RUNNING, Phase.WAITING)


def test_a_hold_is_adopted_with_its_blocks() -> None:
    s = scheduler()
    hold = sequence(20, 1, first_id=0)
    s.open_hold(hold)
    hold.computed = 20
    run = sequence(24, 2, first_id=0)
    s.adopt(hold, run)
    assert hold.phase is Phase.GONE
    assert (run.computed, run.cached, run.named) == (20, 20, 1)
    s.add(run)
    assert shape(step(s)) == [("s2", 20, 4)]
    s.check(iter(()))


def test_a_hold_that_covers_everything_gives_up_its_last_block() -> None:
    s = scheduler()
    hold = sequence(32, 1, first_id=0)
    s.open_hold(hold)
    hold.computed = 32
    run = sequence(32, 2, first_id=0)
    s.adopt(hold, run)
    s.add(run)
    assert shape(step(s)) == [("s2", 16, 16)]
    s.check(iter(()))


def test_an_import_that_does_not_fit_takes_nothing() -> None:
    s = scheduler(n_blocks=2)
    with pytest.raises(Overloaded, match="needs 3 KV blocks, 2 of 2 are free"):
        s.open_hold(sequence(33, 1))
    hold = sequence(16, 2)
    s.open_hold(hold)
    with pytest.raises(Overloaded):
        s.grow_hold(hold, 33)
    s.check(iter([hold]))


def test_an_import_is_not_findable_before_a_run_takes_it() -> None:
    s = scheduler()
    hold = sequence(40, 1, first_id=0)
    s.open_hold(hold)
    hold.computed = 40
    probe = sequence(40, 3, first_id=0)
    assert s.cached_tokens(probe) == 0
    s.remove(hold)
    assert s.cached_tokens(probe) == 0


def test_kv_that_waits_gives_way_to_the_first_in_the_queue() -> None:
    """A run that came with its KV must not keep out a better one when nobody runs who could make room."""
    s = scheduler(n_blocks=4)
    hold = sequence(48, 1, first_id=0)
    s.open_hold(hold)
    hold.computed = 48
    moved = sequence(50, 2, first_id=0, priority=1)
    s.adopt(hold, moved)
    s.add(moved)
    first = sequence(30, 3)
    s.add(first)
    assert shape(step(s)) == [("s3", 0, 30)]
    assert (moved.phase, moved.computed) == (Phase.WAITING, 0)
    s.check(iter(()))


def test_a_step_whose_only_run_was_preempted_admits_another() -> None:
    s = scheduler(n_blocks=3)
    hold = sequence(16, 1)
    s.open_hold(hold)
    a = sequence(31, 2, priority=1)
    s.add(a)
    step(s)
    step(s)
    b = sequence(4, 3)
    s.add(b)
    assert shape(step(s)) == [("s3", 0, 4)]
    assert a.phase is Phase.WAITING
    s.check(iter([hold]))


# --- requests that come together ------------------------------------------------------------------------------------


def drain(s: Scheduler, n_steps: int = 100) -> int:
    """Run until everybody has at least one token; how many positions were computed for prompts."""
    n_prompt_tokens = 0
    prompts = {q.run_id: q.n_tokens for q in s.waiting}
    for _ in range(n_steps):
        n_prompt_tokens += sum(c.n_tokens for c in step(s) if c.start < prompts[c.sequence.run_id])
        if not s.waiting and all(q.remaining == 1 for q in s.running):
            return n_prompt_tokens
        s.check(iter(()))
    raise AssertionError("it did not end")


def test_identical_cold_prompts_compute_their_prefix_once() -> None:
    s = scheduler(n_blocks=200, max_running=32, max_waiting=32, max_step_tokens=64)
    for arrival in range(32):
        s.add(sequence(100, arrival, first_id=0))
    assert drain(s) == 100 + 31  # everything once, and for each the last position again, for its logits
    assert len({tuple(q.blocks[:6]) for q in s.running}) == 1


def test_a_shared_head_is_computed_once() -> None:
    s = scheduler(n_blocks=600, max_running=16, max_waiting=16, max_step_tokens=200)
    for arrival in range(16):
        ids = [*range(512), *range(10_000 * (arrival + 1), 10_000 * (arrival + 1) + 32)]
        s.add(Sequence(run_id=RunId(f"s{arrival}"), token_ids=ids, root=ROOT, arrival=arrival))
    assert drain(s) == 512 + 16 * 32


def test_others_go_on_while_one_waits_for_a_shared_block() -> None:
    s = scheduler(max_step_tokens=64)
    s.add(sequence(20, 1, first_id=0))
    s.add(sequence(20, 2, first_id=0))
    s.add(sequence(20, 3))
    assert shape(step(s)) == [("s1", 0, 20), ("s3", 0, 20)]
    assert shape(step(s)) == [("s1", 20, 1), ("s3", 20, 1), ("s2", 19, 1)]


def test_a_namespace_waits_only_for_its_own_blocks() -> None:
    s = scheduler(max_step_tokens=64)
    s.add(sequence(20, 1, first_id=0))
    other = sequence(20, 2, first_id=0)
    other.root = root_hash("layout", b"another tenant")
    s.add(other)
    assert shape(step(s)) == [("s1", 0, 20), ("s2", 0, 20)]


def test_one_that_waited_for_a_cancelled_one_computes_for_itself() -> None:
    s = scheduler(max_step_tokens=32)
    first = sequence(80, 1, first_id=0)
    s.add(first)
    s.add(sequence(80, 2, first_id=0))
    assert shape(step(s)) == [("s1", 0, 32)]
    s.remove(first)
    assert shape(step(s)) == [("s2", 32, 32)]
