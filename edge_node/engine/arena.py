"""Shared memory that KV crosses in between agent and llama.cpp process: two slots in an anonymous memory file.

The file (memfd, Linux) has no name: it is handed to the child as an open descriptor, and the kernel frees it when
both processes are gone, however they went. A slot holds one piece of a slab: K, then V, each f16 and C-contiguous.
The agent decides who uses a slot; at any time one side writes and the other waits.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np

from edge_node.engine.blob import BlobLayout, Rows

SLOTS: Final = 2


class Arena:
    """One side's view. `fd` is owned by the arena of the side that created it and closed by `close`."""

    def __init__(self, fd: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        # The map keeps the memory alive while arrays look at it, so there is no need to close it by hand.
        self._map = mmap.mmap(fd, slot_bytes * SLOTS)

    @classmethod
    def create(cls, slot_bytes: int) -> Arena:
        """A new one. Memory is only taken when it is written to."""
        fd = os.memfd_create("kvmesh-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, slot_bytes * SLOTS)
        return cls(fd, slot_bytes)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def rows(self, slot: int, layout: BlobLayout, n_tokens: int) -> tuple[Rows, Rows]:
        """K and V of `n_tokens` in a slot, as writable views of shape `layout.shape(n_tokens)`."""
        if not 0 <= slot < SLOTS or not 0 < n_tokens <= self.tokens_per_slot(layout):
            raise ValueError(f"{n_tokens} tokens in slot {slot} of {self.slot_bytes} bytes")
        shape = (2, *layout.shape(n_tokens))
        both = np.ndarray(shape, np.float16, self._map, offset=slot * self.slot_bytes)
        return both[0], both[1]

    def tokens_per_slot(self, layout: BlobLayout) -> int:
        """How many tokens' KV fit a slot."""
        return self.slot_bytes // layout.token_bytes


def slot_bytes_for(layout: BlobLayout, wanted_bytes: int) -> int:
    """A slot size of whole pages that holds at least one token."""
    need = max(wanted_bytes, layout.token_bytes)
    return -(-need // mmap.PAGESIZE) * mmap.PAGESIZE
