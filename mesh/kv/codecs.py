"""Codecs: KV slabs to bytes for the wire and back. Pure numpy; an engine may bring a faster twin.

All codecs write K, then V, each in the slab's C order [n_layers, n_tokens, n_kv_heads, head_dim], little-endian.

- `raw`: the pool's own elements, lossless; only between pools of one dtype.
- `f16`: half floats; bit-exact for an f16 pool.
- `q8_0`: blocks of 32 elements along head_dim, each an f16 scale and 32 int8 (the layout of ggml's block_q8_0).

A value that is not finite, or does not fit the target type, is refused on both sides: one infinity in K poisons
every later token, and silently.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab

Q8_BLOCK = 32
_Q8_RECORD = np.dtype([("scale", "<f2"), ("values", "i1", (Q8_BLOCK,))])


def f32_to_bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bf16 nearest to each value, ties to even, as its 16 bits. NaN stays NaN; what is too large becomes
    infinity, as in hardware."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def bf16_bits_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact: bf16 is the upper half of f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f32(values: NDArray[Any], dtype: KvDtype) -> NDArray[np.float32]:
    """Elements in `dtype.storage` as f32; exact."""
    if dtype is KvDtype.BF16:
        return bf16_bits_to_f32(values)
    return values.astype(np.float32, copy=False)


def from_f32(values: NDArray[np.float32], dtype: KvDtype) -> NDArray[Any]:
    """f32 to `dtype.storage`, round to nearest even. Raises KvIncompatible if a value does not fit."""
    if dtype is KvDtype.F32:
        return values
    if dtype is KvDtype.BF16:
        return f32_to_bf16_bits(values)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise KvIncompatible("KV values are not finite or do not fit f16; use a codec that keeps their range")
    return halves


def convert(slab: KvSlab, dtype: KvDtype) -> KvSlab:
    """The slab in another element type, rounded to nearest even; itself if it is of that type already."""
    if slab.dtype is dtype:
        return slab
    k, v = (from_f32(to_f32(part, slab.dtype), dtype) for part in (slab.k, slab.v))
    return KvSlab(start=slab.start, dtype=dtype, k=k, v=v)


class Codec(Protocol):
    """One way to write a slab as bytes. Stateless."""

    @property
    def name(self) -> str: ...

    def check(self, geometry: KvGeometry) -> None:
        """Raise KvIncompatible if this codec cannot carry this geometry."""

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        """Exact size of `n_tokens` of a pool of `dtype`."""
        ...

    def encode(self, slab: KvSlab) -> bytes:
        """Raises KvIncompatible if a value cannot be carried. CPU-bound; releases the GIL mostly."""
        ...

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        """The slab in `dtype` (for `raw`: the type it was written in). Raises PayloadCorrupt if `data` has not
        exactly the right size or holds a value that is not finite."""
        ...


class _RawCodec:
    name = "raw"

    def check(self, geometry: KvGeometry) -> None:
        del geometry

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        return _elements(geometry, n_tokens) * dtype.storage.itemsize

    def encode(self, slab: KvSlab) -> bytes:
        return _plain(slab)

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        _check_size(self, data, geometry, n_tokens, dtype)
        slab = _from_plain(data, start, n_tokens, geometry, dtype)
        _check_finite(slab)
        return slab


class _F16Codec:
    name = "f16"

    def check(self, geometry: KvGeometry) -> None:
        del geometry

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        return _elements(geometry, n_tokens) * 2

    def encode(self, slab: KvSlab) -> bytes:
        return _plain(convert(slab, KvDtype.F16))

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        _check_size(self, data, geometry, n_tokens, dtype)
        slab = _from_plain(data, start, n_tokens, geometry, KvDtype.F16)
        _check_finite(slab)
        return convert(slab, dtype)


class _Q8Codec:
    name = "q8_0"

    def check(self, geometry: KvGeometry) -> None:
        if geometry.head_dim % Q8_BLOCK:
            raise KvIncompatible(
                f"codec q8_0 needs a head_dim that is a multiple of {Q8_BLOCK}, got {geometry.head_dim}", field="codec"
            )

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        self.check(geometry)
        return _elements(geometry, n_tokens) // Q8_BLOCK * _Q8_RECORD.itemsize

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


def _elements(geometry: KvGeometry, n_tokens: int) -> int:
    """Elements of K and V together."""
    return 2 * geometry.n_layers * n_tokens * geometry.n_kv_heads * geometry.head_dim


def _plain(slab: KvSlab) -> bytes:
    if not _is_finite(slab):
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


def _is_finite(slab: KvSlab) -> bool:
    if slab.dtype is KvDtype.BF16:  # an exponent of ones is infinity or NaN
        ones = np.uint16(0x7F80)
        return not any(bool(((part.view(np.uint16) & ones) == ones).any()) for part in (slab.k, slab.v))
    return all(bool(np.isfinite(part).all()) for part in (slab.k, slab.v))


def _check_finite(slab: KvSlab) -> None:
    if not _is_finite(slab):
        raise PayloadCorrupt("KV bytes hold a value that is not finite")


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (_RawCodec(), _F16Codec(), _Q8Codec())}

CODEC_NAMES: tuple[str, ...] = tuple(sorted(_CODECS))


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises KvIncompatible if there is none here."""
    try:
        return _CODECS[name]
    except KeyError:
        raise KvIncompatible(f"codec {name!r} is not known here, use one of {CODEC_NAMES}", field="codec") from None
