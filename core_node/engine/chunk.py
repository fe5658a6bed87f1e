"""A step's share of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from core_node.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + n_tokens) of one sequence. `completes`: it has KV of all its tokens then."""

    sequence: Sequence
    start: int
    n_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens

    @property
    def completes(self) -> bool:
        return self.stop == self.sequence.n_tokens
