"""KV that arrives in another precision, as f16. Pure numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_node.engine.blob import Rows
from mesh.errors import KvIncompatible
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab


def f16_rows(slab: KvSlab) -> tuple[Rows, Rows]:
    """K and V of a checked slab in f16; the slab's own arrays if they are f16 already.

    Raises KvIncompatible if a number is not finite in f16 (beyond +-65504, NaN): one such row would spoil every
    token after it, and a prefix that others share."""
    return _f16("k", slab.dtype, slab.k), _f16("v", slab.dtype, slab.v)


def _f16(name: str, dtype: KvDtype, rows: NDArray[np.generic]) -> Rows:
    if dtype is KvDtype.F16:
        half: Rows = rows.astype(np.float16, copy=False)
    else:
        if dtype is KvDtype.BF16:
            # bf16 is the upper half of an f32.
            rows = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore"):
            half = rows.astype(np.float16)
    if not np.isfinite(half).all():
        raise KvIncompatible(f"{name} holds numbers that are not finite in f16", field=name)
    return half
