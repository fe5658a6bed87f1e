"""Any fixed-size codec with Zstandard over its bytes: names such as `f16+zstd`. Lossless on top of what it wraps.

The bytes of equal rank in each record are put together first (a byte shuffle, as Blosc does it): exponents beside
exponents compress, a mix of both does not.
"""

from __future__ import annotations

import numpy as np
import zstandard

from mesh.errors import PayloadCorrupt
from mesh.kv.codec_types import Codec
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab

SUFFIX = "+zstd"
_LEVEL = 3
_FRAME_BYTES = 64  # what a frame may have beyond the bound of its blocks


class ZstdCodec:
    """See the module's docstring. `record_bytes`: size of the inner codec's repeating record."""

    fixed_size = False

    def __init__(self, inner: Codec, record_bytes: int) -> None:
        assert inner.fixed_size
        self.name = inner.name + SUFFIX
        self._inner = inner
        self._record_bytes = record_bytes

    def check(self, geometry: KvGeometry) -> None:
        self._inner.check(geometry)

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        plain = self._inner.encoded_bytes(geometry, n_tokens, dtype)
        return plain + (plain >> 8) + _FRAME_BYTES

    def encode(self, slab: KvSlab) -> bytes:
        plain = self._inner.encode(slab)
        return zstandard.ZstdCompressor(level=_LEVEL).compress(self._shuffled(plain, self._record_bytes))

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        # What comes out is bounded before a byte is expanded: `raw` writes the sender's dtype, which is ours too.
        want = self._inner.encoded_bytes(geometry, max(n_tokens, 1), dtype)
        try:
            params = zstandard.get_frame_parameters(data)
            if n_tokens < 1 or params.content_size != want:
                raise PayloadCorrupt(f"{n_tokens} tokens of KV in {self.name} do not unpack to {want} bytes")
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=want, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise PayloadCorrupt(f"KV bytes are no {self.name}: {exc}") from exc
        plain = self._shuffled(plain, len(plain) // self._record_bytes)
        return self._inner.decode(plain, start=start, n_tokens=n_tokens, geometry=geometry, dtype=dtype)

    def _shuffled(self, data: bytes, columns: int) -> bytes:
        """`data` as rows of `columns` bytes, transposed; its own inverse with the other side's count."""
        if self._record_bytes == 1:
            return data
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, columns).T.tobytes()
