"""What an entry knows of nodes beside what they tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.node.latency_model import LatencyCurve
from placement.entry.mesh_view import NodeFacts
from placement.entry.notes import Notes
from placement.entry.snapshot_table import SnapshotTable
from placement.predict.in_flight import Placed
from tests.placement.entry.test_mesh_view import CORE

ONE = Placed(runs=1, prefill_tokens=500, kv_tokens=600)


def seen(notes: Notes, *, age_s: float, now_s: float) -> tuple[int, int, int]:
    load = notes.applied(replace(CORE, age_s=age_s), now_s).load
    told = CORE.load
    return (
        load.running - told.running,
        load.waiting_prefill_tokens - told.waiting_prefill_tokens,
        load.kv_used_tokens - told.kv_used_tokens,
    )


def test_a_request_counts_at_once_and_until_the_node_counts_it_itself() -> None:
    changed: list[str] = []
    notes = Notes(changed.append)
    notes.placed("core-1", "a", ONE, 10.0)
    notes.placed("core-1", "b", ONE, 10.1)
    assert seen(notes, age_s=0.5, now_s=10.1) == (2, 1000, 1200)
    assert seen(notes, age_s=0.0, now_s=10.2) == (2, 1000, 1200)  # that report may have been made before
    assert seen(notes, age_s=0.0, now_s=10.35) == (1, 500, 600)
    assert seen(notes, age_s=0.0, now_s=11.0) == (0, 0, 0)
    assert changed == ["core-1", "core-1"]


def test_a_request_that_ended_is_gone_and_one_without_reports_is_not_kept_for_ever() -> None:
    notes = Notes()
    notes.placed("core-1", "a", ONE, 10.0)
    notes.left("core-1", "a")
    notes.left("core-1", "never")
    assert seen(notes, age_s=5.0, now_s=10.0) == (0, 0, 0)
    notes.placed("core-1", "b", ONE, 10.0)
    assert seen(notes, age_s=100.0, now_s=100.0) == (0, 0, 0)


def test_a_clock_that_goes_back_forgets_rather_than_counts_for_ever() -> None:
    notes = Notes()
    notes.placed("core-1", "a", ONE, 1000.0)
    assert seen(notes, age_s=0.0, now_s=5.0) == (0, 0, 0)


def test_a_queue_that_was_told_a_moment_ago_is_shorter_now() -> None:
    curve = LatencyCurve(prefill_base_s=0.1, prefill_token_s=0.001, decode_base_s=0.02)
    load = replace(CORE.load, running=0, waiting_prefill_tokens=1000, curve=curve, step_tokens=100)
    for age_s, left in ((0.0, 1000), (1.0, 500), (1.9, 50), (3.0, 1000)):  # 0.2 s for 100 tokens; the last is too old
        facts = Notes().applied(replace(CORE, load=load, age_s=age_s), 50.0)
        assert facts.load.waiting_prefill_tokens == pytest.approx(left, abs=1)


def test_its_memory_is_bounded() -> None:
    notes = Notes()
    for i in range(10_000):
        notes.placed("core-1", str(i), ONE, 10.0)
    assert seen(notes, age_s=1.0, now_s=10.0)[0] == 8192


def test_the_next_snapshot_has_what_was_noted() -> None:
    facts: dict[str, NodeFacts] = {"core-1": CORE}
    table = SnapshotTable(facts.get, entry_node_id="paris")
    table.stale("core-1")
    before = table.snapshot(version=1, now_s=0.0)
    table.notes.placed("core-1", "a", ONE, 0.0)
    after = table.snapshot(version=1, now_s=0.0)
    assert int(after.running[0] - before.running[0]) == 1
    for _ in range(10):
        table.notes.answered("core-1", ttft_ratio=6.0, tpot_ratio=2.0, now_s=1.0)
    scaled = table.snapshot(version=1, now_s=1.0)
    assert scaled.fit is not None
    assert scaled.fit.ttft_scale[0] == pytest.approx(6.0, rel=0.3)
    assert table.notes.liars == frozenset({"core-1"})
