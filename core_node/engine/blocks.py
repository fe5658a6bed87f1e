"""Who owns which KV block: reference counts, names (hashes) and the free list. Pure; no torch, no tensors.

A block is a fixed slice of the KV pool, BLOCK_TOKENS positions long. It is *named* once it is full, by the
chained hash of the tokens up to its end (mesh.kv.hashing). The named blocks are a prefix tree: a name stands for
the whole path from the root of its namespace, and each name has one block. The free list doubles as the LRU queue:
a freed block keeps its name and can be found and taken back until it is allocated anew, oldest first. Blocks of
one sequence are freed tail first, so the oldest free block is always a leaf and a parent outlives its children
(ADR 0006; tests/properties/test_prefix_tree.py holds it against a plain radix tree).

Source: the block pool of vLLM V1 (design, not code). Invariants, see `check`: each block is free or referenced,
never both; the sum of references equals the entries of all block tables.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from mesh.kv.hashing import BLOCK_TOKENS


def blocks_for(n_tokens: int) -> int:
    """How many blocks `n_tokens` positions take."""
    return -(-n_tokens // BLOCK_TOKENS)


class BlockPool:
    """Owned by one thread. Block ids are 0 .. n_blocks - 1."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._references = [0] * n_blocks
        self._names: list[bytes | None] = [None] * n_blocks
        self._by_name: dict[bytes, int] = {}
        # Insertion order is the order of reuse. An OrderedDict unlinks from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))

    @property
    def n_free(self) -> int:
        """Blocks that could be allocated now, named ones included."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self._free)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `names`. No side effects: `take` them before anything else."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def n_free_without(self, blocks: Sequence[int]) -> int:
        """How many blocks would be free once `blocks` are taken."""
        return len(self._free) - sum(1 for b in blocks if self._references[b] == 0)

    def take(self, blocks: Sequence[int]) -> None:
        """Add one reference to each (a prefix hit)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each, oldest first; their names are forgotten.

        The caller has checked `n_free`; IndexError otherwise, with nothing changed."""
        if n > len(self._free):
            raise IndexError(f"{n} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def name(self, block: int, name: bytes) -> int:
        """Make a full block findable and return the block that bears the name. Where another one has it already,
        that one takes over the reference and `block` is free: equal prefixes are kept once."""
        assert self._references[block] > 0, f"block {block} is free"
        assert self._names[block] is None, f"block {block} has a name"
        known = self._by_name.setdefault(name, block)
        if known == block:
            self._names[block] = name
        else:
            self.take([known])
            self.free([block])
        return known

    def free(self, table: Sequence[int]) -> None:
        """Drop one reference of each block of a table (in position order); tail first in the order of reuse."""
        for block in reversed(table):
            assert self._references[block] > 0, f"block {block} is free already"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._names[block] is None:  # nothing to find in it: reuse it first
                    self._free.move_to_end(block, last=False)

    def names(self) -> Iterable[bytes]:
        """All that can be found now."""
        return self._by_name.keys()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with the block tables of all owners."""
        owned = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            assert references == owned[block], f"block {block}: {references} references, {owned[block]} owners"
            assert (references == 0) == (block in self._free), f"block {block} is free and used, or neither"
            name = self._names[block]
            assert name is None or self._by_name[name] == block, f"block {block} has a name that is another's"
        assert len(self._by_name) == sum(1 for name in self._names if name is not None), "a name without a block"

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            self._names[block] = None
            del self._by_name[name]
