"""The stopwatch of a step's parts."""

from __future__ import annotations

from core_node.engine.step_parts import COMPUTE, DELIVER, SCHEDULE, StepParts


def test_each_part_gets_the_time_since_the_last_one() -> None:
    times = iter([10.0, 11.0, 13.0, 16.0, 100.0, 100.0, 101.0, 104.0, 104.5])
    parts = StepParts(lambda: next(times))
    parts.begin()
    for part in (SCHEDULE, COMPUTE, DELIVER):
        parts.end(part)
    parts.begin()  # nothing to compute
    parts.begin()
    for part in (SCHEDULE, COMPUTE, DELIVER):
        parts.end(part)
    assert parts.steps == 2
    assert parts.total_s == ((SCHEDULE, 2.0), (COMPUTE, 5.0), (DELIVER, 3.5))
