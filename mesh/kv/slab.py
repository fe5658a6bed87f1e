"""A run of consecutive tokens' KV in canonical form: the unit that engines export and import."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype, KvGeometry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvSlab:
    """KV of positions [start, start + n_tokens).

    `k` and `v` are C-contiguous arrays of shape [n_layers, n_tokens, n_kv_heads, head_dim] in
    `dtype.storage`; K is after RoPE in llama.cpp's dimension order, V is not transposed.
    The arrays belong to the slab: nobody writes to them after construction.
    """

    start: int
    dtype: KvDtype
    k: NDArray[np.generic]
    v: NDArray[np.generic]

    @property
    def n_tokens(self) -> int:
        return int(self.k.shape[1])

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens

    @property
    def n_bytes(self) -> int:
        return int(self.k.nbytes + self.v.nbytes)

    def check(self, geometry: KvGeometry) -> None:
        """Raise InvalidRequest unless shapes and dtypes are those of `geometry`."""
        want = (geometry.n_layers, self.n_tokens, geometry.n_kv_heads, geometry.head_dim)
        for name, array in (("k", self.k), ("v", self.v)):
            if array.shape != want or array.dtype != self.dtype.storage:
                raise InvalidRequest(
                    f"KV slab {name} is {array.shape} {array.dtype}, the model needs {want} {self.dtype.storage}"
                )

    def tokens(self, start: int, stop: int) -> KvSlab:
        """The part for absolute positions [start, stop), copied to be contiguous."""
        a, b = start - self.start, stop - self.start
        if not 0 <= a < b <= self.n_tokens:
            raise InvalidRequest(f"positions [{start}, {stop}) are not inside [{self.start}, {self.stop})")
        return KvSlab(
            start=start,
            dtype=self.dtype,
            k=np.ascontiguousarray(self.k[:, a:b]),
            v=np.ascontiguousarray(self.v[:, a:b]),
        )
