"""Where preempted KV goes: nowhere (it is computed again) or to host memory, whichever is predicted cheaper. Pure.

Also the orders to copy blocks that a step carries out before it computes anything, in the order they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CopyKind(Enum):
    """From where to where."""

    OUT = "out"  # pool to host
    IN = "in"  # host to pool
    WITHIN = "within"  # pool to pool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Whole blocks: `sources[i]` to `targets[i]`."""

    kind: CopyKind
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRates:
    """What was measured; 0.0: nothing was yet."""

    recompute_tokens_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    block_bytes: int = 0


def swap_is_cheaper(n_tokens: int, n_blocks: int, rates: MoveRates) -> bool:
    """Whether copying `n_blocks` out and in again takes less time than computing `n_tokens` again. False while either
    speed is unknown."""
    if rates.recompute_tokens_per_s <= 0 or rates.copy_bytes_per_s <= 0:
        return False
    copy_s = 2 * n_blocks * rates.block_bytes / rates.copy_bytes_per_s
    return copy_s < n_tokens / rates.recompute_tokens_per_s


class HostBlocks:
    """Which host blocks are free."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """The caller has checked `n_free`."""
        assert n <= len(self._free)
        return [self._free.pop() for _ in range(n)]

    def free(self, blocks: Sequence[int]) -> None:
        self._free += blocks

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless each block is free or has one owner."""
        everything = sorted([*self._free, *(block for blocks in owned for block in blocks)])
        assert everything == list(range(self.n_blocks)), "a host block leaked or has two owners"
