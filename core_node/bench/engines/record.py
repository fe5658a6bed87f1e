"""What was measured so far, kept line by line in a file, so that a run that was broken off goes on where it stopped.

The first line says what the work is; a file of other work or another machine is refused. Every further line is a part:
one case on every engine in turn, within one stretch of time, with how far the machine's speed moved meanwhile.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core_node.bench.engines.work import Rows
from mesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One case, once. `values`: by engine, then row, then measure; `said`: by engine, its version and settings. A part
    that is not `kept` was measured while the machine's speed moved."""

    case: str
    attempt: int
    moved_ratio: float
    kept: bool
    values: Mapping[str, Rows]
    said: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Record:
    """All parts, in order. `path` is None if nothing is to be kept beyond this run."""

    path: Path | None
    work: dict[str, Any]
    parts: list[Part] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, work: Mapping[str, Any]) -> Record:
        """A record of this work: what the file has of it, or empty. What the file knows and `work` does not is
        taken from the file. Raises InvalidRequest if the file is of other work, or no record."""
        if path is None or not path.exists():
            return cls(path=path, work=dict(work))
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
        return cls(path=path, work={**work, **head}, parts=parts)

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

    def kept(self, case: str) -> list[Part]:
        """The parts of a case that count."""
        return [p for p in self.parts if p.case == case and p.kept]

    def attempts(self, case: str) -> int:
        """How often a case was measured, whether it counts or not."""
        return sum(p.case == case for p in self.parts)

    @property
    def dropped(self) -> int:
        """Parts that do not count."""
        return sum(not p.kept for p in self.parts)

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
        return list(dict.fromkeys(row for p in self.parts if p.kept for rows in p.values.values() for row in rows))

    def samples(self, engine: str, row: str, measure: str) -> list[float]:
        """One value for each part that counts and has it."""
        return [values[engine][measure] for values in self._values(row) if measure in values.get(engine, {})]

    def median(self, engine: str, row: str, measure: str) -> float | None:
        """The median of `samples`, or None."""
        samples = self.samples(engine, row, measure)
        return statistics.median(samples) if samples else None

    def ratio(self, engine: str, other: str, row: str, measure: str) -> float | None:
        """Median of the ratios within a part, engine to other: both ran within the same stretch of time."""
        ratios = [
            values[engine][measure] / values[other][measure]
            for values in self._values(row)
            if values.get(engine, {}).get(measure) is not None and values.get(other, {}).get(measure)
        ]
        return statistics.median(ratios) if ratios else None

    def _values(self, row: str) -> Iterator[Mapping[str, Mapping[str, float]]]:
        for part in self.parts:
            if part.kept:
                yield {engine: rows[row] for engine, rows in part.values.items() if row in rows}
