"""Codecs: KV slabs to bytes for the wire and back. Pure numpy; an engine may bring a faster twin.

All codecs write K, then V, each in the slab's C order [n_layers, n_tokens, n_kv_heads, head_dim], little-endian.
Those that are lossless or nearly so are here; `q4`, and Zstandard over any of them (`f16+zstd`), beside this module;
`kvtc:DIGEST16:SETTING` in mesh.kv.kvtc.

- `raw`: the pool's own elements, lossless; only between pools of one dtype.
- `f16`: half floats; bit-exact for an f16 pool.
- `q8_0`: blocks of 32 elements along head_dim, each an f16 scale and 32 int8 (the layout of ggml's block_q8_0).

A value that is not finite, or does not fit the target type, is refused on both sides: one infinity in K poisons
every later token, and silently.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codec_types import Codec
from mesh.kv.elements import check_finite, convert, from_f32, is_finite, n_elements, to_f32
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.codec import PREFIX
from mesh.kv.q4 import Q4Codec
from mesh.kv.slab import KvSlab
from mesh.kv.zstd import ZstdCodec

__all__ = ["CODEC_NAMES", "Q8_BLOCK", "Codec", "codec_named"]

Q8_BLOCK = 32
_Q8_RECORD = np.dtype([("scale", "<f2"), ("values", "i1", (Q8_BLOCK,))])


class _RawCodec:
    name = "raw"
    fixed_size = True

    def check(self, geometry: KvGeometry) -> None:
        del geometry

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        return n_elements(geometry, n_tokens) * dtype.storage.itemsize

    def encode(self, slab: KvSlab) -> bytes:
        return _plain(slab)

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        _check_size(self, data, geometry, n_tokens, dtype)
        slab = _from_plain(data, start, n_tokens, geometry, dtype)
        check_finite(slab)
        return slab


class _F16Codec:
    name = "f16"
    fixed_size = True

    def check(self, geometry: KvGeometry) -> None:
        del geometry

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        return n_elements(geometry, n_tokens) * 2

    def encode(self, slab: KvSlab) -> bytes:
        return _plain(convert(slab, KvDtype.F16))

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        _check_size(self, data, geometry, n_tokens, dtype)
        slab = _from_plain(data, start, n_tokens, geometry, KvDtype.F16)
        check_finite(slab)
        return convert(slab, dtype)


class _Q8Codec:
    name = "q8_0"
    fixed_size = True

    def check(self, geometry: KvGeometry) -> None:
        if geometry.head_dim % Q8_BLOCK:
            raise KvIncompatible(
                f"codec q8_0 needs a head_dim that is a multiple of {Q8_BLOCK}, got {geometry.head_dim}", field="codec"
            )

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        self.check(geometry)
        return n_elements(geometry, n_tokens) // Q8_BLOCK * _Q8_RECORD.itemsize

    def encode(self, slab: KvSlab) -> bytes:
        layers = [*slab.k, *slab.v]
        out = np.empty((len(layers), layers[0].size // Q8_BLOCK), dtype=_Q8_RECORD)
        for row, layer in zip(out, layers, strict=True):  # a layer at a time stays in the CPU's cache
            _quantise(to_f32(layer, slab.dtype).reshape(-1, Q8_BLOCK), row)
        return out.tobytes()

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        _check_size(self, data, geometry, n_tokens, dtype)
        blocks = np.frombuffer(data, dtype=_Q8_RECORD).reshape(2 * geometry.n_layers, -1)
        shape = (geometry.n_layers, n_tokens, geometry.n_kv_heads, geometry.head_dim)
        out = np.empty((2, *shape), dtype=dtype.storage)
        if not np.isfinite(blocks["scale"]).all():
            raise PayloadCorrupt("KV bytes hold a scale that is not finite")
        for i, row in enumerate(blocks):
            values = row["values"] * row["scale"].astype(np.float32)[:, None]
            out[divmod(i, geometry.n_layers)] = from_f32(values, dtype).reshape(shape[1:])
        return KvSlab(start=start, dtype=dtype, k=out[0], v=out[1])


def _quantise(values: NDArray[np.float32], out: NDArray[np.void]) -> None:
    """Blocks [n, 32] of f32 into records of `_Q8_RECORD`."""
    largest = np.abs(values)
    while largest.shape[1] > 1:  # numpy reduces a short axis slowly; halving it is whole-array work
        half = largest.shape[1] // 2
        largest = np.maximum(largest[:, :half], largest[:, half:])
    largest = largest[:, 0]
    with np.errstate(over="ignore"):
        scale = (largest / np.float32(127)).astype(np.float16)
    if not np.isfinite(scale).all():
        raise KvIncompatible("KV values are not finite or do not fit q8_0; use a codec that keeps their range")
    rounded_scale = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), rounded_scale, out=np.zeros_like(rounded_scale), where=rounded_scale > 0)
    scaled = values * inverse[:, None]
    np.rint(scaled, out=scaled)
    np.clip(scaled, -127, 127, out=scaled)  # the scale was rounded, perhaps down
    out["scale"] = scale
    out["values"] = scaled


def _plain(slab: KvSlab) -> bytes:
    if not is_finite(slab):
        raise KvIncompatible("KV values are not finite")
    return b"".join(np.ascontiguousarray(part).data for part in (slab.k, slab.v))


def _from_plain(data: bytes, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
    shape = (2, geometry.n_layers, n_tokens, geometry.n_kv_heads, geometry.head_dim)
    k, v = np.frombuffer(data, dtype=dtype.storage).reshape(shape)
    return KvSlab(start=start, dtype=dtype, k=k, v=v)


def _check_size(codec: Codec, data: bytes, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> None:
    want = codec.encoded_bytes(geometry, n_tokens, dtype)
    if n_tokens < 1 or len(data) != want:
        raise PayloadCorrupt(f"{n_tokens} tokens of KV in {codec.name} are {want} bytes, got {len(data)}")


_PLAIN: tuple[Codec, ...] = (_RawCodec(), _F16Codec(), _Q8Codec(), Q4Codec())
_RECORD_BYTES = {"f16": 2, "q8_0": _Q8_RECORD.itemsize, "q4": 1}
_CODECS: dict[str, Codec] = {codec.name: codec for codec in _PLAIN} | {
    (wrapped := ZstdCodec(codec, _RECORD_BYTES[codec.name])).name: wrapped
    for codec in _PLAIN
    if codec.name in _RECORD_BYTES
}

CODEC_NAMES: tuple[str, ...] = tuple(sorted(_CODECS))
"""Those that need nothing but themselves."""


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises KvIncompatible if there is none here (for `kvtc:...`: if this process was given
    no such artifact)."""
    if name.startswith(PREFIX):
        return shelf.codec_named(name, exact=_CODECS["q8_0"])
    try:
        return _CODECS[name]
    except KeyError:
        raise KvIncompatible(f"codec {name!r} is not known here, use one of {CODEC_NAMES}", field="codec") from None
