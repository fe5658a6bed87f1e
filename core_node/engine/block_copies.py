"""Carries out copies of KV blocks within the pool, and between the pool and a bounded arena in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from core_node.engine.kv_pool import KvPool
from core_node.engine.swap import BlockCopy, CopyKind
from mesh.kv.hashing import BLOCK_TOKENS

_MEMORY_RATIO = 0.2
_PROBE_BLOCKS = 4


def block_bytes(pool: KvPool) -> int:
    """Bytes of K and V of one block over all layers."""
    return 2 * (pool.k.numel() // pool.n_blocks) * pool.k.element_size()


class BlockCopier:
    """Owned by the engine thread. The arena's memory (pinned beside a CUDA pool) is taken at the first use.

    `bytes_per_s` is a moving average of copies between pool and arena; 0.0 until there was one."""

    def __init__(self, pool: KvPool, n_host_blocks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pool = pool
        self._n_host_blocks = n_host_blocks
        self._arena: tuple[torch.Tensor, torch.Tensor] | None = None
        self.bytes_per_s = 0.0

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """In the order given; blocks until all is copied."""
        for copy in copies:
            started = self._clock()
            self._copy(copy)
            if copy.kind is not CopyKind.WITHIN:
                self._measure(len(copy.sources), self._clock() - started)

    def probe(self) -> None:
        """Measure once, with blocks that nobody uses: what is there is written back."""
        n = min(_PROBE_BLOCKS, self._n_host_blocks, self._pool.n_blocks)
        blocks = tuple(range(n))
        for _ in range(2 if n else 0):  # the first one pays for the arena's pages
            self.bytes_per_s = 0.0
            self.run([BlockCopy(CopyKind.OUT, blocks, blocks), BlockCopy(CopyKind.IN, blocks, blocks)])

    def _copy(self, copy: BlockCopy) -> None:
        pool = (self._pool.k, self._pool.v)
        match copy.kind:
            case CopyKind.WITHIN:
                source, target = pool, pool
            case CopyKind.OUT:
                source, target = pool, self._host()
            case CopyKind.IN:
                source, target = self._host(), pool
        for a, b in zip(source, target, strict=True):
            for i, j in zip(copy.sources, copy.targets, strict=True):
                b[:, j * BLOCK_TOKENS : (j + 1) * BLOCK_TOKENS].copy_(a[:, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])

    def _host(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._arena is None:
            k = self._pool.k
            shape = (k.shape[0], self._n_host_blocks * BLOCK_TOKENS, *k.shape[2:])
            pinned = k.device.type == "cuda"
            self._arena = (
                torch.empty(shape, dtype=k.dtype, pin_memory=pinned),
                torch.empty(shape, dtype=self._pool.v.dtype, pin_memory=pinned),
            )
        return self._arena

    def _measure(self, n_blocks: int, duration_s: float) -> None:
        rate = n_blocks * block_bytes(self._pool) / max(duration_s, 1e-9)
        old = self.bytes_per_s
        self.bytes_per_s = rate if old == 0.0 else old + _MEMORY_RATIO * (rate - old)
