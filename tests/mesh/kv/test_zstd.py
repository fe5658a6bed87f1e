"""Zstandard over the other codecs: the same slabs, fewer bytes, and no expansion that nobody asked for."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from mesh.errors import PayloadCorrupt
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab
from tests.mesh.kv.test_codecs import equal, geometry, round_trip, slab


@pytest.mark.parametrize("inner", ["f16", "q8_0", "q4"])
@pytest.mark.parametrize("n_tokens", [1, 33])
def test_gives_what_the_codec_inside_gives(inner: str, n_tokens: int) -> None:
    g = geometry()
    s = slab(g, n_tokens, KvDtype.F16)
    assert equal(round_trip(inner + "+zstd", s, g), round_trip(inner, s, g))


def test_kv_that_repeats_shrinks() -> None:
    g = geometry()
    s = slab(g, 16, KvDtype.F16)
    k = np.ascontiguousarray(np.broadcast_to(s.k[:, :1], s.k.shape))
    data = codec_named("f16+zstd").encode(KvSlab(start=0, dtype=KvDtype.F16, k=k, v=k))
    assert len(data) < 0.3 * codec_named("f16").encoded_bytes(g, 16, KvDtype.F16)


def test_a_frame_that_would_expand_to_more_is_refused_before_it_does() -> None:
    g = geometry()
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(PayloadCorrupt):
        codec_named("f16+zstd").decode(bomb, start=0, n_tokens=4, geometry=g, dtype=KvDtype.F16)


def test_a_flipped_bit_is_refused_or_gives_finite_values() -> None:
    g, codec = geometry(), codec_named("q8_0+zstd")
    data = codec.encode(slab(g, 4, KvDtype.F16))
    for at in range(0, len(data), 97):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        try:
            out = codec.decode(bytes(flipped), start=0, n_tokens=4, geometry=g, dtype=KvDtype.F16)
        except PayloadCorrupt:
            continue
        assert np.isfinite(out.k).all()
