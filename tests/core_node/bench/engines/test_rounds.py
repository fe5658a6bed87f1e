"""The rounds: dropped parts, engines that fail, a budget, and going on from a record. No engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from core_node.bench.engine import BENCH
from core_node.bench.engines import rounds as module
from core_node.bench.engines.fleet import EngineProcess
from core_node.bench.engines.installed import EngineCommand, Kind
from core_node.bench.engines.probe import Speed
from core_node.bench.engines.record import Record
from core_node.bench.engines.rounds import Rounds
from core_node.bench.engines.work import Answer, Work
from mesh.bench.types import BenchContext, Cell
from mesh.errors import Internal


class Fake:
    """Stands in for EngineProcess: `wall_s` a token of output; fails at bursts of `fails_at` requests."""

    def __init__(self, name: str, wall_s: float, *, fails_at: int = 0, starts: bool = True) -> None:
        self.engine = EngineCommand(name=name, kind=Kind.LIBRARY, ours=name == "kvmesh", command=())
        self.said, self.running, self.paused, self.n_starts = "", False, False, 0
        self.wall_s, self.fails_at, self.starts = wall_s, fails_at, starts

    async def start(self) -> None:
        self.n_starts += 1
        if not self.starts:
            raise Internal(f"{self.engine.name} ended; no AVX-512 here")
        self.said, self.running = "version 1", True

    async def work(self, work: Work) -> Answer:
        assert self.running
        assert not self.paused, "an engine is given work while it is stopped in place"
        if len(work.prompts) == self.fails_at and work.max_tokens[0] == 64:
            self.running = False
            raise Internal("gave no answer within 9 s")
        n = len(work.prompts)
        wall_s = self.wall_s * sum(work.max_tokens)
        return Answer(
            wall_s=wall_s,
            first_s=tuple(at + self.wall_s for at in work.at_s),
            last_s=tuple(at + self.wall_s * m for at, m in zip(work.at_s, work.max_tokens, strict=True)),
            ids=tuple((7,) * m for m in work.max_tokens) if n else None,
        )

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    async def stop(self) -> None:
        self.running = self.paused = False


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Speeds that the probe finds, in turn; 1.0 when the list is empty."""
    found: list[float] = []

    def probe(threads: int) -> Speed:
        value = found.pop(0) if found else 1.0
        return Speed(flop_per_s=value, read_bytes_per_s=1.0)

    monkeypatch.setattr(module, "probe", probe)
    return found


def rounds(fakes: Sequence[Fake], record: Record | None = None, **changes: Cell) -> tuple[Rounds, Record]:
    settings = {**BENCH.defaults, "concurrency": "1,2", "rounds": 2, "open_loop_requests": 4, **changes}
    context = BenchContext(settings=settings, progress=lambda done, total, what: None)
    record = record or Record.open(None, {})
    return Rounds(context, cast(Sequence[EngineProcess], fakes), record, 1000), record


ROWS = ["1 at once", "2 at once", "shared prefix, cold", "shared prefix, warm", "open loop"]


async def test_each_case_gets_its_rounds_on_each_engine(speeds: list[float]) -> None:
    fakes = [Fake("kvmesh", 0.01), Fake("peer", 0.02)]
    run, record = rounds(fakes)
    await run.run()
    assert record.rows() == ROWS
    for fake in fakes:
        assert [len(record.samples(fake.engine.name, row, "output_tokens_per_s")) for row in ROWS] == [2] * 5
        assert not fake.running
    assert record.ratio("kvmesh", "peer", "1 at once", "output_tokens_per_s") == pytest.approx(2.0)
    assert [p.case for p in record.parts[:4]] == ["1 at once", "2 at once", "shared prefix", "open loop"]  # interleaved
    assert "peer: 12 of 12 greedy tokens of a known prompt are those of kvmesh" in run.notes()
    rate = 16 / (0.01 * sum(module.mixed(run._rng("calibration"), 1000, [0.0] * 16).max_tokens))
    assert record.work[module.RATE] == pytest.approx(rate / 2, rel=1e-3)


async def test_a_part_in_which_two_engines_do_not_compare_is_measured_again(speeds: list[float]) -> None:
    speeds += [1.0, 1.0, 0.8]  # before, after the first turn, after the second
    run, record = rounds([Fake("kvmesh", 0.01), Fake("peer", 0.02)], concurrency="1", shared_prefix=False, rounds=1)
    await run.run()
    assert [p.case for p in record.parts] == ["1 at once", "open loop", "1 at once"]
    assert record.parts[0].moved_ratio("kvmesh", "peer") == 0.25
    said = "1 at once: kvmesh to peer 2.00 (2.00 to 2.00) in output tokens/s over all 2 parts, of which 1 count"
    assert said in run.notes()


async def test_the_order_of_engines_is_drawn_anew(speeds: list[float]) -> None:
    fakes = [Fake(name, 0.01) for name in ("kvmesh", "b", "c", "d")]
    run, record = rounds(fakes, concurrency="1", shared_prefix=False, open_loop_requests=0, rounds=8)
    await run.run()
    assert len({tuple(p.values) for p in record.parts}) > 1


async def test_a_machine_that_never_rests_ends_the_run_all_the_same(speeds: list[float]) -> None:
    speeds += [1.0, 2.0] * 100
    run, record = rounds([Fake("kvmesh", 0.01)], concurrency="1", shared_prefix=False, open_loop_requests=0)
    await run.run()
    assert len(record.parts) == 8
    assert record.samples("kvmesh", "1 at once", "output_tokens_per_s") == []


async def test_an_engine_that_does_not_start_is_reported(speeds: list[float]) -> None:
    fakes = [Fake("kvmesh", 0.01), Fake("peer", 0.02, starts=False)]
    run, record = rounds(fakes)
    await run.run()
    assert "peer: peer ended; no AVX-512 here" in run.notes()
    assert record.samples("peer", "1 at once", "output_tokens_per_s") == []
    assert len(record.samples("kvmesh", "1 at once", "output_tokens_per_s")) == 2


async def test_an_engine_that_fails_in_a_case_goes_on_with_the_others(speeds: list[float]) -> None:
    fakes = [Fake("kvmesh", 0.01), Fake("peer", 0.02, fails_at=2)]
    run, record = rounds(fakes)
    await run.run()
    assert "peer: failed at 2 at once: gave no answer within 9 s" in run.notes()
    counts = {row: len(record.samples("peer", row, "output_tokens_per_s")) for row in ROWS}
    assert counts == {**dict.fromkeys(ROWS, 2), "2 at once": 0}
    assert fakes[1].n_starts == 2


async def test_a_finished_record_starts_nothing_and_an_unfinished_goes_on(speeds: list[float], tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    run, _ = rounds([Fake("kvmesh", 0.01)], Record.open(path, {}), rounds=1)
    await run.run()
    fake = Fake("kvmesh", 0.01)
    run, record = rounds([fake], Record.open(path, {}), rounds=1)
    await run.run()
    assert fake.n_starts == 0
    assert "kvmesh: version 1" in run.notes()
    run, record = rounds([fake], Record.open(path, {}), rounds=2)
    await run.run()
    assert fake.n_starts == 1
    assert {p.attempt for p in record.parts} == {0, 1}


async def test_no_part_begins_once_the_budget_is_spent(speeds: list[float]) -> None:
    run, record = rounds([Fake("kvmesh", 0.01)], budget_s=1e-9)
    await run.run()
    assert record.parts == []
