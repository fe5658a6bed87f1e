"""`kvmesh bench detectors`: precision and recall of each kind on the labelled set, and the cost per 1,000 tokens.

The set (tests/placement/detect/cases.jsonl, in a clone of the sources) is synthetic and labelled by construction. A
finding is right if it overlaps a labelled piece of the same kind; a piece is found if a finding of its kind overlaps
it. `text_file`: ordinary text, in which every finding counts as wrong; the cost is measured on it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest
from placement.detect.catalogue import built_in
from placement.detect.scan import scan
from placement.detect.types import Detector, Finding

CASES = Path(__file__).resolve().parents[2] / "tests" / "placement" / "detect" / "cases.jsonl"
_CHARS_PER_TOKEN = 4.0  # of English in SmolLM2's tokenizer, rounded down
_COST_CHARS = 400_000


@dataclass(slots=True)
class Score:
    """Counts over a labelled set, by kind."""

    found: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, findings: tuple[Finding, ...], spans: list[tuple[int, int, str]]) -> None:
        """One text."""
        for start, end, kind in spans:
            hit = any(f.kind == kind and f.start < end and start < f.end for f in findings)
            (self.found if hit else self.missed)[kind] += 1
        for f in findings:
            if not any(f.kind == kind and f.start < end and start < f.end for start, end, kind in spans):
                self.wrong[f.kind] += 1

    def precision(self, kind: str | None = None) -> float:
        """Share of what was told of that is right; of one kind or of all."""
        return _share(_count(self.found, kind), _count(self.wrong, kind))

    def recall(self, kind: str | None = None) -> float:
        """Share of what is there that was told of."""
        return _share(_count(self.found, kind), _count(self.missed, kind))


def _count(counts: Counter[str], kind: str | None) -> int:
    return counts.total() if kind is None else counts[kind]


def _share(good: int, bad: int) -> float:
    return good / (good + bad) if good + bad else float("nan")


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The labelled set. Raises InvalidRequest if it is not there."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as exc:
        raise InvalidRequest(f"no labelled set at {path}: give one with --set cases=FILE", field="cases") from exc


def score_cases(cases: list[dict[str, Any]], detectors: list[Detector]) -> Score:
    """Every case once."""
    score = Score()
    for case in cases:
        score.add(scan(case["text"], detectors), [(s, e, k) for s, e, k in case["spans"]])
    return score


class DetectorsBench:
    """See the module's docstring."""

    name = "detectors"
    question = "Which private data do the detectors find, how often are they wrong, and what do they cost?"
    defaults: Mapping[str, Cell] = {"cases": str(CASES), "text_file": "", "repeats": 3}

    async def run(self, context: BenchContext) -> BenchResult:
        """Scores, then times."""
        cases = read_cases(Path(context.text("cases")))
        detectors = list(built_in().values())
        score = score_cases(cases, detectors)
        kinds = sorted({*score.found, *score.missed, *score.wrong})
        rows: tuple[Mapping[str, Cell], ...] = tuple(
            {
                "kind": kind or "all",
                "labelled": _count(score.found, kind) + _count(score.missed, kind),
                "precision": score.precision(kind),
                "recall": score.recall(kind),
                "false_alarms": _count(score.wrong, kind),
            }
            for kind in (*kinds, None)
        )
        text = self._text(context.text("text_file"), cases)
        costs, alarms = {}, 0
        for i, detector in enumerate(detectors):
            context.progress(i, len(detectors), detector.name)
            costs[detector.name], n = _cost(text, detector, context.count("repeats"))
            alarms += n
        total_ms = sum(costs.values())
        return BenchResult(
            rows=rows,
            goals=(
                Goal(name="labelled cases", value=len(cases), goal=500, direction=Direction.AT_LEAST),
                Goal(name="precision", value=score.precision(), goal=0.95, direction=Direction.AT_LEAST),
                Goal(name="recall", value=score.recall(), goal=0.95, direction=Direction.AT_LEAST),
                Goal(name="ms of CPU per 1,000 tokens", value=total_ms, goal=10.0),
            ),
            notes=(
                "cost in ms of CPU per 1,000 tokens: " + ", ".join(f"{n} {c:.2f}" for n, c in costs.items()),
                f"{alarms} findings in {len(text):,} characters of {context.text('text_file') or 'the cases'}",
                "the set is synthetic: it tells about formats and look-alikes, not about how often people write them",
            ),
        )

    @staticmethod
    def _text(path: str, cases: list[dict[str, Any]]) -> str:
        text = Path(path).read_text() if path else "\n".join(case["text"] for case in cases)
        return text[:_COST_CHARS]


def _cost(text: str, detector: Detector, repeats: int) -> tuple[float, int]:
    """The least CPU milliseconds per 1,000 tokens of a few passes, and the findings."""
    best_s, findings = float("inf"), 0
    for _ in range(max(1, repeats)):
        began_s = time.process_time()
        findings = len(scan(text, [detector]))
        best_s = min(best_s, time.process_time() - began_s)
    return best_s * 1000.0 / (len(text) / _CHARS_PER_TOKEN / 1000.0), findings


BENCH = DetectorsBench()
