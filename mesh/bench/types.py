"""The Bench protocol: what `kvmesh bench` runs, and what a run gives. Values only; no I/O.

A benchmark is an object behind an entry point of `kvmesh.benches`. It measures and never judges: a goal that is
missed is a result, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

Cell = str | int | float | bool | None


class Direction(Enum):
    """Which side of a goal is good."""

    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One number that matters, and what it should be. The unit is part of the name."""

    name: str
    value: float
    goal: float
    direction: Direction = Direction.AT_MOST

    @property
    def ok(self) -> bool:
        """True if it was reached; a NaN never is."""
        if math.isnan(self.value):
            return False
        match self.direction:
            case Direction.AT_LEAST:
                return self.value >= self.goal
            case Direction.AT_MOST:
                return self.value <= self.goal
            case Direction.EQUAL:
                return self.value == self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What a run found. All rows have the same columns, units in their names."""

    rows: tuple[Mapping[str, Cell], ...]
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        columns = {tuple(row) for row in self.rows}
        if len(columns) > 1:
            raise ValueError(f"rows of one benchmark need the same columns in the same order, got {sorted(columns)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchContext:
    """What a run gets: its settings (the defaults with `--set KEY=VALUE` over them) and where to tell progress.

    `progress(done, total, what)`: total 0 means that it is not known."""

    settings: Mapping[str, Cell]
    progress: Callable[[int, int, str], None]

    def number(self, key: str) -> float:
        """A numeric setting."""
        value = self.settings[key]
        assert isinstance(value, int | float)
        return float(value)

    def count(self, key: str) -> int:
        """An integer setting."""
        value = self.settings[key]
        assert isinstance(value, int)
        return value

    def text(self, key: str) -> str:
        """A text setting."""
        value = self.settings[key]
        assert isinstance(value, str)
        return value


class Bench(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str:
        """Its word on the command line."""
        ...

    @property
    def question(self) -> str:
        """The question that it answers, in one line."""
        ...

    @property
    def defaults(self) -> Mapping[str, Cell]:
        """Settings with their defaults, the seed among them; they fix the workload."""
        ...

    def run(self, context: BenchContext) -> Awaitable[BenchResult]:
        """Measure. Runs in an event loop of its own; raises MeshError if it cannot run."""
        ...
