"""One sequence of tokens with its KV: a run while it is scheduled, a hold while it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mesh.kv.hashing import BLOCK_TOKENS, chain
from mesh.node.engine import RunId


class Phase(Enum):
    """Who owns a sequence: WAITING and RUNNING the scheduler, HELD the engine core, GONE nobody (no blocks)."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    GONE = "gone"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Changed only by its owner on the engine thread. Positions [0, computed) have KV in `blocks`.

    `root` is the root hash of its cache namespace. `named` blocks at the head of the table are in the pool's
    index. `blocks` is appended to in place; for any other change (a block replaced by an equal one, preemption) it
    becomes a new list. Of an import `computed` may exceed `n_tokens`: KV of tokens that are not known yet.
    """

    run_id: RunId
    token_ids: list[int]
    root: bytes
    priority: int = 0
    arrival: int = 0
    arrived_s: float = 0.0
    aged_s: float = 0.0  # see policies.aged_priority_s; set when it is queued first
    max_new_tokens: int = 0
    predicted_tokens: int | None = None
    prefill_only: bool = False
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    named: int = 0
    cached: int = 0  # positions that the first admission found in the cache or the hold
    admitted: bool = False  # was admitted at least once
    swapped: list[int] = field(default_factory=list)  # host blocks with KV of [0, swapped_tokens), while it waits
    swapped_tokens: int = 0
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.computed

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller goes first; the largest is the first victim."""
        return (self.aged_s, self.arrival)

    def hashes(self, n_blocks: int) -> list[bytes]:
        """Names of the first `n_blocks` blocks, whose tokens must be known."""
        while len(self._hashes) < n_blocks:
            at = len(self._hashes) * BLOCK_TOKENS
            parent = self._hashes[-1] if self._hashes else self.root
            self._hashes.append(chain(parent, self.token_ids[at : at + BLOCK_TOKENS]))
        return self._hashes[:n_blocks]
