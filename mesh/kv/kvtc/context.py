"""A whole context through a kvtc codec: chunks as they travel, with the latest tokens in q8_0 like the sinks.

A sender that streams chunks while the prompt is still computed cannot know which tokens will be the latest; it may code
all of them, and loses what the benchmark's ablation shows. Where the end is known, use this.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mesh.errors import PayloadCorrupt
from mesh.kv.chunks import chunk_ranges
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc.codec import WINDOW_TOKENS, KvtcCodec
from mesh.kv.slab import KvSlab


def encode_context(codec: KvtcCodec, slab: KvSlab) -> Iterator[bytes]:
    """The chunks of a context that ends where `slab` ends. Raises KvIncompatible."""
    for start, stop in chunk_ranges(slab.start, slab.stop):
        yield codec.encode_with_stats(slab.tokens(start, stop), exact_from=slab.stop - WINDOW_TOKENS)[0]


def decode_context(
    codec: KvtcCodec, chunks: list[bytes], *, start: int, stop: int, geometry: KvGeometry, dtype: KvDtype
) -> KvSlab:
    """The slab of positions [start, stop) of what `encode_context` gave. Raises PayloadCorrupt."""
    ranges = list(chunk_ranges(start, stop))
    if len(ranges) != len(chunks) or not ranges:
        raise PayloadCorrupt(f"{len(ranges)} chunks make {stop - start} tokens, got {len(chunks)}")
    parts = [
        codec.decode(data, start=a, n_tokens=b - a, geometry=geometry, dtype=dtype)
        for data, (a, b) in zip(chunks, ranges, strict=True)
    ]
    k, v = (np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("k", "v"))
    return KvSlab(start=start, dtype=dtype, k=k, v=v)
