"""What was measured so far, kept line by line in a file, so that a run that was broken off goes on where it stopped.

The first line says what the work is; a file of other work or another machine is refused. Every further line is a part:
one case on every engine in turn, with the machine's speed before and after each turn. Two engines compare within a part
if the machine was equally fast around both of their turns, to a tolerance; what it did while others ran is no matter.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core_node.bench.engines.probe import Speed, moved_ratio
from core_node.bench.engines.work import Rows
from mesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One case, once. `values`: by engine, then row, then measure; `said`: by engine, its version and settings;
    `speeds`: by engine, FLOP/s and bytes/s of the machine before its turn and after it."""

    case: str
    attempt: int
    values: Mapping[str, Rows]
    speeds: Mapping[str, Sequence[Sequence[float]]]
    said: Mapping[str, str] = field(default_factory=dict)

    def moved_ratio(self, *engines: str) -> float:
        """How far the machine's speed moved between and within the turns of these."""
        probes = [probe for engine in engines for probe in self.speeds[engine]]
        return moved_ratio([Speed(flop_per_s=flop, read_bytes_per_s=read) for flop, read in probes])


@dataclass(slots=True, kw_only=True)
class Record:
    """All parts, in order. `path` is None if nothing is to be kept beyond this run."""

    path: Path | None
    work: dict[str, Any]
    tolerance_ratio: float = 0.15
    parts: list[Part] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, work: Mapping[str, Any], *, tolerance_ratio: float = 0.15) -> Record:
        """A record of this work: what the file has of it, or empty. What the file knows and `work` does not is
        taken from the file. What moved by more than `tolerance_ratio` does not count. Raises InvalidRequest if the
        file is of other work, or no record."""
        if path is None or not path.exists():
            return cls(path=path, work=dict(work), tolerance_ratio=tolerance_ratio)
        try:
            head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            parts = [Part(**line) for line in lines]
            other = {k: head.get(k) for k, v in work.items() if head.get(k) != v}
        except (ValueError, TypeError, AttributeError) as exc:
            raise InvalidRequest(
                f"{path} is no record of this benchmark ({exc}); choose another file", field="record"
            ) from exc
        if other:
            raise InvalidRequest(
                f"{path} is of other work: it has {', '.join(f'{k}={v}' for k, v in other.items())}; "
                "choose another file or the same settings",
                field="record",
            )
        return cls(path=path, work={**work, **head}, tolerance_ratio=tolerance_ratio, parts=parts)

    def settle(self, key: str, value: float) -> None:
        """Fix a part of the work that is measured and not given; before the first part."""
        assert not self.parts
        self.work[key] = value

    def add(self, part: Part) -> None:
        """Keep a part, in the file at once."""
        self.parts.append(part)
        if self.path is None:
            return
        lines = [asdict(part)] if self.path.exists() else [self.work, asdict(part)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def attempts(self, case: str) -> int:
        """How often a case was measured, whether it counts or not."""
        return sum(p.case == case for p in self.parts)

    def turns(self, engine: str, case: str) -> int:
        """How many turns of an engine count."""
        return sum(self._counts(p, engine) for p in self.parts if p.case == case)

    def comparisons(self, engine: str, other: str, case: str) -> int:
        """In how many parts of a case two engines compare."""
        return sum(self._counts(p, engine, other) for p in self.parts if p.case == case)

    @property
    def said(self) -> dict[str, str]:
        """What the engines said of themselves; where it changed between parts, all of it."""
        each: dict[str, list[str]] = {}
        for part in self.parts:
            for name, said in part.said.items():
                if said not in each.setdefault(name, []):
                    each[name].append(said)
        return {name: " | ".join(said) for name, said in each.items()}

    def rows(self) -> list[str]:
        """Names of all rows, in the order in which they came."""
        return list(dict.fromkeys(row for p in self.parts for rows in p.values.values() for row in rows))

    def samples(self, engine: str, row: str, measure: str) -> list[float]:
        """One value for each turn that counts and has it."""
        counted = (p.values[engine] for p in self.parts if self._counts(p, engine))
        return [rows[row][measure] for rows in counted if measure in rows.get(row, {})]

    def median(self, engine: str, row: str, measure: str) -> float | None:
        """The median of `samples`, or None."""
        samples = self.samples(engine, row, measure)
        return statistics.median(samples) if samples else None

    def ratios(self, engine: str, other: str, row: str, measure: str) -> list[float]:
        """Engine to other within each part in which they compare."""
        counted = (p.values for p in self.parts if self._counts(p, engine, other))
        pairs = [(v[engine].get(row, {}).get(measure), v[other].get(row, {}).get(measure)) for v in counted]
        return [mine / theirs for mine, theirs in pairs if mine is not None and theirs]

    def ratio(self, engine: str, other: str, row: str, measure: str) -> float | None:
        """The median of `ratios`, or None."""
        ratios = self.ratios(engine, other, row, measure)
        return statistics.median(ratios) if ratios else None

    def _counts(self, part: Part, *engines: str) -> bool:
        return all(e in part.values for e in engines) and part.moved_ratio(*engines) <= self.tolerance_ratio
