"""What a detector is and what it finds. A finding never holds the value, only its kind and where it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Characters [start, end) of the text are of this kind."""

    start: int
    end: int
    kind: str


class Detector(Protocol):
    """Finds kinds of private data in text. Must not keep or log the text; must be safe to call from any thread."""

    @property
    def name(self) -> str:
        """What policies and people call it."""

    @property
    def kinds(self) -> frozenset[str]:
        """All kinds that it can find."""

    def find(self, text: str) -> Iterable[Finding]:
        """Findings in a window of text whose digits, spaces and dashes are plain (see placement.detect.plain)."""
