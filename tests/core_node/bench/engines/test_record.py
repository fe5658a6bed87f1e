"""The record: going on where a run stopped, and the figures that it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_node.bench.engines.record import Part, Record
from mesh.errors import InvalidRequest


def part(attempt: int, *, kept: bool = True, **outputs: float) -> Part:
    values = {engine: {"row": {"output": value}} for engine, value in outputs.items()}
    return Part(case="case", attempt=attempt, moved_ratio=0.1, kept=kept, values=values)


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.jsonl"
    record = Record.open(path, {"seed": 1})
    record.settle("rate", 2.5)
    record.add(part(0, a=1.0))
    record.add(part(1, kept=False, a=9.0))
    again = Record.open(path, {"seed": 1})
    assert again.parts == record.parts
    assert again.work == {"seed": 1, "rate": 2.5}
    assert (again.attempts("case"), len(again.kept("case")), again.dropped) == (2, 1, 1)
    again.add(part(2, a=3.0))
    assert Record.open(path, {"seed": 1}).samples("a", "row", "output") == [1.0, 3.0]


def test_other_work_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    Record.open(path, {"seed": 1, "threads": 2}).add(part(0, a=1.0))
    with pytest.raises(InvalidRequest, match="of other work: it has threads=2") as caught:
        Record.open(path, {"seed": 1, "threads": 4})
    assert caught.value.details["field"] == "record"


@pytest.mark.parametrize("text", ["", "[]\n", '{"seed": 1}\n{}\n', '{"seed": 1}\n{"case"', "no JSON\n"])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="is no record of this benchmark"):
        Record.open(path, {"seed": 1})


def test_ratios_are_taken_within_a_part_and_dropped_parts_do_not_count() -> None:
    record = Record.open(None, {})
    record.add(part(0, a=10.0, b=5.0))
    record.add(part(1, a=3.0, b=1.0))
    record.add(part(2, kept=False, a=1.0, b=100.0))
    record.add(part(3, a=8.0, b=8.0))
    record.add(part(4, a=7.0))  # b failed
    assert record.ratio("a", "b", "row", "output") == 2.0
    assert record.median("a", "row", "output") == 7.5
    assert record.median("b", "row", "output") == 5.0
    assert record.ratio("a", "c", "row", "output") is None
    assert record.median("c", "row", "output") is None
