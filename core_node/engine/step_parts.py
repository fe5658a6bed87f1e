"""Where the time of steps goes, summed over all steps since the start."""

from __future__ import annotations

import time
from collections.abc import Callable

SCHEDULE, COMPUTE, DELIVER = "schedule", "compute", "deliver"


class StepParts:
    """A stopwatch that is passed from part to part. `schedule`: choosing the batch; `compute`: the model and sampling;
    `deliver`: books and events of what was computed. Steps with nothing to compute do not count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps = 0
        self._clock = clock
        self._total_s = dict.fromkeys((SCHEDULE, COMPUTE, DELIVER), 0.0)
        self._since_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._since_s = self._clock()

    def end(self, part: str) -> None:
        """The time since the last call was of this part; `deliver` is a step's last one."""
        now_s = self._clock()
        self._total_s[part] += now_s - self._since_s
        self._since_s = now_s
        self.steps += part == DELIVER

    @property
    def total_s(self) -> tuple[tuple[str, float], ...]:
        """Seconds of each part."""
        return tuple(self._total_s.items())
