"""Chained block hashes: the name of a token prefix within a namespace.

h_i = SHA-256(h_{i-1} || tokens of block i), with h_{-1} = SHA-256(domain || model layout || salt). The salt is
derived at the entry per tenant and label (see mesh.identity) and never comes from the caller, so that
equal prompts of two tenants have different names (CVE-2025-46570 shows why). Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

BLOCK_TOKENS = 16
_DOMAIN = b"kvmesh.block.v1\0"


def root_hash(layout_hash: str, salt: bytes) -> bytes:
    """The parent of block 0 (32 bytes). `salt` is length-prefixed, so that no two pairs collide."""
    return hashlib.sha256(_DOMAIN + layout_hash.encode() + len(salt).to_bytes(4, "big") + salt).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of `tokens` (ids below 2**32) after `parent`; any count, so that a partial tail has a name too."""
    return hashlib.sha256(parent + np.asarray(tokens, dtype="<u4").tobytes()).digest()


def block_hashes(layout_hash: str, salt: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, first block first."""
    hashes: list[bytes] = []
    parent = root_hash(layout_hash, salt)
    for i in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = chain(parent, token_ids[i : i + BLOCK_TOKENS])
        hashes.append(parent)
    return hashes


def prefix_hash(layout_hash: str, salt: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash that names exactly `token_ids`, a partial last block included."""
    full = block_hashes(layout_hash, salt, token_ids)
    parent = full[-1] if full else root_hash(layout_hash, salt)
    return chain(parent, token_ids[len(full) * BLOCK_TOKENS :])
