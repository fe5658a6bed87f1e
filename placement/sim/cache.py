"""A node's KV pool: room of running requests, and a prefix cache of whole blocks, least recently used out first. Pure.

Blocks are named as the trace names them. A block that a running request uses is pinned; one that nobody uses stays
until its room is needed. Invariant: `used_tokens` <= capacity; it is the sum of pinned, cached and private tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KvPool:
    """Owned by one node."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.private_tokens = 0
        self._pinned: dict[int, int] = {}  # block -> requests that use it
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_tokens = 0

    @property
    def used_tokens(self) -> int:
        return self.private_tokens + self._block_tokens * (len(self._pinned) + len(self._idle))

    @property
    def taken_tokens(self) -> int:
        """What running requests hold: cached blocks that nobody uses give way."""
        return self.private_tokens + self._block_tokens * len(self._pinned)

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here."""
        n = 0
        for block in blocks:
            if block not in self._pinned and block not in self._idle:
                break
            n += 1
        return n

    def reserve(self, blocks: Sequence[int], block_tokens: int, total_tokens: int) -> int | None:
        """Room for a request of `total_tokens`, of which its leading blocks that are here need none. How many blocks
        those are, now pinned; None if there is no room."""
        self._block_tokens = self._block_tokens or block_tokens
        n = self.match(blocks)
        private = total_tokens - n * block_tokens
        idle = sum(1 for block in blocks[:n] if block in self._idle)
        if self.taken_tokens + idle * self._block_tokens + private > self.capacity_tokens:
            return None
        for block in blocks[:n]:
            self._pin(block)
        self.private_tokens += private
        self._shrink()
        return n

    def keep(self, blocks: Sequence[int], start: int) -> list[int]:
        """Blocks from number `start` on are computed: they become cached, in the room the request had for them.
        Returns those that it now pins; one that another computed meanwhile stays the request's own copy."""
        kept: list[int] = []
        for block in blocks[start:]:
            if block in self._pinned or block in self._idle:
                continue
            self._pinned[block] = 1
            self.private_tokens -= self._block_tokens
            kept.append(block)
        return kept

    def free(self, pinned: Sequence[int], private_tokens: int) -> None:
        """A request ends: its room is free, its blocks stay cached while nobody needs their room."""
        self.private_tokens -= private_tokens
        # The end of a prefix goes first: without its beginning it is of no use.
        for block in reversed(pinned):
            users = self._pinned[block] - 1
            if users:
                self._pinned[block] = users
            else:
                del self._pinned[block]
                self._idle[block] = None
        self._shrink()

    def clear(self) -> None:
        """The node lost its memory."""
        self._pinned.clear()
        self._idle.clear()
        self.private_tokens = 0

    def _pin(self, block: int) -> None:
        if block in self._idle:
            del self._idle[block]
            self._pinned[block] = 1
        else:
            self._pinned[block] += 1

    def _shrink(self) -> None:
        while self._idle and self.used_tokens > self.capacity_tokens:
            self._idle.popitem(last=False)
