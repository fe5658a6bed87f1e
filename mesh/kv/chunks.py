"""Cutting KV into chunks and pieces, and naming the tokens up to any position. Pure.

A *chunk* is up to CHUNK_TOKENS consecutive tokens, all layers together, as one encoded byte string; a *piece* is
the part of it that travels in one frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from mesh.kv.hashing import BLOCK_TOKENS, chain, root_hash

CHUNK_TOKENS = 256
PIECE_BYTES = 512 * 1024
DIGEST_BYTES = 32


def digest_of(data: bytes | memoryview) -> bytes:
    """SHA-256 of `data`."""
    return hashlib.sha256(data).digest()


def chunk_ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Positions [start, stop) cut at most CHUNK_TOKENS long, in order; nothing if stop <= start."""
    for at in range(start, stop, CHUNK_TOKENS):
        yield at, min(at + CHUNK_TOKENS, stop)


class PrefixNames:
    """Names of the prefixes of a growing token sequence (see mesh.kv.hashing.prefix_hash), each block hashed once.

    Mutable; one owner.
    """

    def __init__(self, layout_hash: str, salt: bytes, token_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._blocks: list[bytes] = [root_hash(layout_hash, salt)]  # [i] names the first i full blocks
        self.extend(token_ids)

    @property
    def known_tokens(self) -> int:
        """How many tokens there are; prefixes up to here have names."""
        return len(self._ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._ids.extend(token_ids)
        while len(self._blocks) * BLOCK_TOKENS <= len(self._ids):
            at = (len(self._blocks) - 1) * BLOCK_TOKENS
            self._blocks.append(chain(self._blocks[-1], self._ids[at : at + BLOCK_TOKENS]))

    def prefix(self, n_tokens: int) -> bytes:
        """The name of the first `n_tokens` tokens; 0 <= n_tokens <= known_tokens."""
        if not 0 <= n_tokens <= len(self._ids):
            raise IndexError(f"{n_tokens} tokens asked for, {len(self._ids)} known")
        n_blocks, rest = divmod(n_tokens, BLOCK_TOKENS)
        return chain(self._blocks[n_blocks], self._ids[n_tokens - rest : n_tokens])

    def full_blocks(self, n_tokens: int) -> tuple[bytes, ...]:
        """Hashes of the full blocks within the first `n_tokens` tokens (or within what is known, if less)."""
        return tuple(self._blocks[1 : min(n_tokens, len(self._ids)) // BLOCK_TOKENS + 1])
