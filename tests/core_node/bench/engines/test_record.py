"""The record: going on where a run stopped, and the figures that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from core_node.bench.engines.record import Part, Record
from mesh.errors import InvalidRequest

CALM = ((1.0, 1.0), (1.0, 1.0))
FAST = ((2.0, 1.0), (2.0, 1.0))
MOVING = ((1.0, 1.0), (1.0, 0.8))


def part(attempt: int, *, speeds: Mapping[str, Sequence[Sequence[float]]] | None = None, **outputs: float) -> Part:
    values = {engine: {"row": {"output": value}} for engine, value in outputs.items()}
    return Part(case="case", attempt=attempt, speeds={**dict.fromkeys(outputs, CALM), **(speeds or {})}, values=values)


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.jsonl"
    record = Record.open(path, {"seed": 1})
    record.settle("rate", 2.5)
    record.add(part(0, a=1.0))
    record.add(part(1, speeds={"a": MOVING}, a=9.0))
    again = Record.open(path, {"seed": 1})
    assert [p.values for p in again.parts] == [p.values for p in record.parts]
    assert again.work == {"seed": 1, "rate": 2.5}
    assert (again.attempts("case"), again.turns("a", "case")) == (2, 1)
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


def test_ratios_are_taken_within_a_part_where_both_turns_saw_the_same_machine() -> None:
    record = Record.open(None, {})
    record.add(part(0, a=10.0, b=5.0))
    record.add(part(1, a=3.0, b=1.0))
    record.add(part(2, speeds={"b": MOVING}, a=1.0, b=100.0))
    record.add(part(3, speeds={"c": MOVING}, a=8.0, b=8.0, c=1.0))  # what it did while c ran is nothing to a and b
    record.add(part(4, a=7.0))  # b failed
    record.add(part(5, speeds={"b": FAST}, a=6.0, b=60.0))  # calm around each, but not equally fast
    assert record.ratios("a", "b", "row", "output") == [2.0, 3.0, 1.0]
    assert record.ratio("a", "b", "row", "output") == 2.0
    assert record.comparisons("a", "b", "case") == 3
    assert record.samples("a", "row", "output") == [10.0, 3.0, 1.0, 8.0, 7.0, 6.0]
    assert record.median("b", "row", "output") == 6.5
    assert (record.ratio("a", "c", "row", "output"), record.median("c", "row", "output")) == (None, None)


def test_the_tolerance_is_a_setting() -> None:
    record = Record.open(None, {}, tolerance_ratio=1.0)
    record.add(part(0, speeds={"b": FAST}, a=6.0, b=60.0))
    assert record.ratio("a", "b", "row", "output") == 0.1
