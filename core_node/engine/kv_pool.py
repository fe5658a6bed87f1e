"""The KV pool: two tensors that hold K and V of all blocks, and their way in and out as canonical slabs.

A *slot* is one position of one block: block * BLOCK_TOKENS + offset. K is stored after RoPE in the order of the
architecture's RopePairs, so what lies in the pool is the canonical form already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.kv.slab import KvSlab

TORCH_DTYPES = {KvDtype.F16: torch.float16, KvDtype.BF16: torch.bfloat16, KvDtype.F32: torch.float32}


def slots_of(blocks: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
    """Slots of positions [start, stop) under a block table."""
    positions = np.arange(start, stop, dtype=np.int64)
    table = np.asarray(blocks, dtype=np.int64)
    slots: NDArray[np.int64] = table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    return slots


class KvPool:
    """`k` and `v` are [n_layers, n_blocks * BLOCK_TOKENS, n_kv_heads, head_dim] in `dtype` on `device`.

    Always finite: it starts as zeros and imports are checked, since attention multiplies masked positions by
    zero, and a NaN there would reach whoever owns the block next."""

    def __init__(self, geometry: KvGeometry, n_blocks: int, dtype: KvDtype, device: torch.device) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.n_blocks = n_blocks
        shape = (geometry.n_layers, n_blocks * BLOCK_TOKENS, geometry.n_kv_heads, geometry.head_dim)
        self.k = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=device)
        self.v = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=device)
        self._copies = _copy_stream(device)

    def read(self, blocks: Sequence[int], start: int, stop: int) -> KvSlab:
        """A copy of positions [start, stop) of a block table, in the pool's dtype."""
        slots = torch.from_numpy(slots_of(blocks, start, stop))
        if self._copies is None:
            k, v = self.k.index_select(1, slots), self.v.index_select(1, slots)
        else:
            k, v = self._from_device(self._copies, slots)
        return KvSlab(start=start, dtype=self.dtype, k=_as_numpy(k), v=_as_numpy(v))

    def write(self, blocks: Sequence[int], slab: KvSlab) -> None:
        """Store a slab (any KvDtype) under a block table. Raises InvalidRequest, with nothing stored, unless it
        has the model's shape and is finite in the pool's dtype."""
        slab.check(self.geometry)
        k, v = self._from_numpy(slab.k, slab.dtype, "k"), self._from_numpy(slab.v, slab.dtype, "v")
        slots = torch.from_numpy(slots_of(blocks, slab.start, slab.stop)).to(self.k.device)
        self.k.index_copy_(1, slots, k)
        self.v.index_copy_(1, slots, v)

    def _from_device(self, copies: torch.cuda.Stream, slots: torch.Tensor) -> list[torch.Tensor]:
        """K and V of `slots` in pinned memory, copied beside the compute stream. Not run yet: no GPU was there."""
        copies.wait_stream(torch.cuda.current_stream(self.k.device))  # what is read must have been computed
        parts: list[torch.Tensor] = []
        with torch.cuda.stream(copies):
            on_device = slots.to(self.k.device)
            for pool in (self.k, self.v):
                part = pool.index_select(1, on_device)
                parts.append(torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True))
        copies.synchronize()
        return parts

    def _from_numpy(self, array: NDArray[np.generic], dtype: KvDtype, name: str) -> torch.Tensor:
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = array.copy()  # torch refuses to wrap what must not be written
        if dtype is KvDtype.BF16:
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        if self._copies is not None:
            tensor = tensor.pin_memory()
        tensor = tensor.to(device=self.k.device, non_blocking=True).to(self.k.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidRequest(f"KV slab {name} holds values that are not finite in {self.dtype.value}", field=name)
        return tensor


def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _as_numpy(part: torch.Tensor) -> NDArray[np.generic]:
    if part.dtype is torch.bfloat16:
        return part.view(torch.int16).numpy().view(np.uint16)
    array: NDArray[np.generic] = part.numpy()
    return array
