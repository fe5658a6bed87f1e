"""Codec `q4`: four bits an element, K in groups along the tokens, V in groups along head_dim.

After KIVI (Liu et al., arXiv 2402.02750): the channels of K differ in scale by far more than its tokens do, so a
group of K is one channel over up to 32 consecutive tokens; V has no such channels, so a group of V is 32
neighbours within one token and head. A group is an f16 minimum, an f16 step and its elements as 0..15; 5 bits an
element for full groups. Layout: K minima, K steps, K nibbles, then the same of V; nibbles in the slab's order, the
even dimension low.

How much a model suffers from four bits differs widely: allow this only where it has been measured (see
mesh.kv.kvtc.quality).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.elements import from_f32, n_elements, to_f32
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab

GROUP = 32
_LEVELS = 15


class Q4Codec:
    """See the module's docstring."""

    name = "q4"
    fixed_size = True

    def check(self, geometry: KvGeometry) -> None:
        if geometry.head_dim % GROUP:
            raise KvIncompatible(
                f"codec q4 needs a head_dim that is a multiple of {GROUP}, got {geometry.head_dim}", field="codec"
            )

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        self.check(geometry)
        per_token = n_elements(geometry, 1) // 2
        k_groups = -(-n_tokens // GROUP) * per_token
        v_groups = n_tokens * per_token // GROUP
        return (k_groups + v_groups) * 4 + n_tokens * per_token

    def encode(self, slab: KvSlab) -> bytes:
        k, v = to_f32(slab.k, slab.dtype), to_f32(slab.v, slab.dtype)
        n_layers, n_tokens, n_heads, head_dim = k.shape
        starts = np.arange(0, n_tokens, GROUP)
        k_low, k_high = np.minimum.reduceat(k, starts, axis=1), np.maximum.reduceat(k, starts, axis=1)
        v = v.reshape(n_layers, n_tokens, n_heads, head_dim // GROUP, GROUP)
        v_low, v_high = v.min(axis=-1, keepdims=True), v.max(axis=-1, keepdims=True)
        group_of = np.arange(n_tokens) // GROUP
        parts: list[bytes] = []
        for values, low, high, spread in ((k, k_low, k_high, group_of), (v, v_low, v_high, slice(None))):
            low16, step16 = _range(low, high)
            low32, step32 = (x.astype(np.float32)[:, spread] for x in (low16, step16))
            inverse = np.divide(np.float32(1), step32, out=np.zeros_like(step32), where=step32 > 0)
            levels = np.clip(np.rint((values - low32) * inverse), 0, _LEVELS).astype(np.uint8).reshape(-1, 2)
            parts += [low16.tobytes(), step16.tobytes(), (levels[:, 0] | levels[:, 1] << 4).tobytes()]
        return b"".join(parts)

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        want = self.encoded_bytes(geometry, max(n_tokens, 1), dtype)
        if n_tokens < 1 or len(data) != want:
            raise PayloadCorrupt(f"{n_tokens} tokens of KV in q4 are {want} bytes, got {len(data)}")
        n_layers, n_heads, head_dim = geometry.n_layers, geometry.n_kv_heads, geometry.head_dim
        shape = (n_layers, n_tokens, n_heads, head_dim)
        k_groups = (n_layers, -(-n_tokens // GROUP), n_heads, head_dim)
        v_groups = (n_layers, n_tokens, n_heads, head_dim // GROUP, 1)
        at = 0

        def take(dtype: np.dtype[Any], count: int) -> NDArray[Any]:
            nonlocal at
            part = np.frombuffer(data, dtype=dtype, count=count, offset=at)
            at += part.nbytes
            return part

        out: list[NDArray[np.generic]] = []
        for groups, spread, inner in (
            (k_groups, np.arange(n_tokens) // GROUP, shape),
            (v_groups, slice(None), (*shape[:3], head_dim // GROUP, GROUP)),
        ):
            low, step = (take(np.dtype("<f2"), int(np.prod(groups))).reshape(groups) for _ in range(2))
            if not (np.isfinite(low).all() and np.isfinite(step).all()):
                raise PayloadCorrupt("KV bytes hold a range that is not finite")
            packed = take(np.dtype(np.uint8), int(np.prod(shape)) // 2)
            levels = np.stack((packed & _LEVELS, packed >> 4), axis=-1).reshape(inner)
            values = levels * step.astype(np.float32)[:, spread] + low.astype(np.float32)[:, spread]
            try:
                out.append(from_f32(values.reshape(shape), dtype))
            except KvIncompatible as exc:
                raise PayloadCorrupt("KV bytes hold a value that does not fit the pool") from exc
        return KvSlab(start=start, dtype=dtype, k=out[0], v=out[1])


def _range(low: NDArray[np.float32], high: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Minimum and step of groups, rounded to f16. Raises KvIncompatible if they do not fit."""
    with np.errstate(over="ignore", invalid="ignore"):
        low16 = low.astype(np.float16)
        step16 = ((high - low16.astype(np.float32)) / np.float32(_LEVELS)).astype(np.float16)
        top = low16.astype(np.float32) + step16.astype(np.float32) * _LEVELS
    if not (np.isfinite(low16).all() and np.isfinite(step16).all() and np.isfinite(top.astype(np.float32)).all()):
        raise KvIncompatible("KV values are not finite or do not fit q4; use a codec that keeps their range")
    return low16, np.maximum(step16, np.float16(0))
