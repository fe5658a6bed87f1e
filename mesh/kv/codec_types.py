"""What a codec is. Values and protocol only."""

from __future__ import annotations

from typing import Protocol

from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab


class Codec(Protocol):
    """One way to write a slab as bytes. Stateless."""

    @property
    def name(self) -> str: ...

    @property
    def fixed_size(self) -> bool:
        """Every slab of one shape has the same size in bytes."""
        ...

    def check(self, geometry: KvGeometry) -> None:
        """Raise KvIncompatible if this codec cannot carry this geometry."""

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        """Size of `n_tokens` of a pool of `dtype`: exact if `fixed_size`, else the largest that it can be."""
        ...

    def encode(self, slab: KvSlab) -> bytes:
        """Raises KvIncompatible if a value cannot be carried. CPU-bound; releases the GIL mostly."""
        ...

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        """The slab in `dtype` (for `raw`: the type it was written in). Raises PayloadCorrupt if `data` has not
        the right size, is not what `encode` writes, or holds a value that is not finite."""
        ...
