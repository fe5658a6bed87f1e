"""Element types of KV: exact or rounded conversions between f16, bf16 (as bits) and f32. Pure numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab


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


def is_finite(slab: KvSlab) -> bool:
    """Neither infinity nor NaN in K or V."""
    if slab.dtype is KvDtype.BF16:  # an exponent of ones is infinity or NaN
        ones = np.uint16(0x7F80)
        return not any(bool(((part.view(np.uint16) & ones) == ones).any()) for part in (slab.k, slab.v))
    return all(bool(np.isfinite(part).all()) for part in (slab.k, slab.v))


def check_finite(slab: KvSlab) -> None:
    """Raise PayloadCorrupt unless a decoded slab is finite."""
    if not is_finite(slab):
        raise PayloadCorrupt("KV bytes hold a value that is not finite")


def n_elements(geometry: KvGeometry, n_tokens: int) -> int:
    """Elements of K and V together."""
    return 2 * geometry.n_layers * n_tokens * geometry.n_kv_heads * geometry.head_dim
