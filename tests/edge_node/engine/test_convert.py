"""KV of other precisions becomes f16, or is refused."""

from __future__ import annotations

import numpy as np
import pytest

from edge_node.engine.convert import f16_rows
from mesh.errors import KvIncompatible
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab

VALUES = np.array([0.0, 1.0, -2.5, 0.1, 60000.0, 6e-8, -0.0], np.float32).reshape(1, 7, 1, 1)


def slab(dtype: KvDtype, rows: np.ndarray) -> KvSlab:
    return KvSlab(start=0, dtype=dtype, k=rows, v=-rows if dtype is not KvDtype.BF16 else rows)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_f16_is_taken_as_it_is() -> None:
    rows = VALUES.astype(np.float16)
    k, v = f16_rows(slab(KvDtype.F16, rows))
    assert np.shares_memory(k, rows)
    assert np.array_equal(v, -rows)


def test_f32_is_rounded() -> None:
    k, _ = f16_rows(slab(KvDtype.F32, VALUES))
    assert k.dtype == np.float16
    assert np.array_equal(k, VALUES.astype(np.float16))


def test_bf16_is_widened_then_rounded() -> None:
    exact = np.array([0.0, 1.0, -2.5, 0.09375, 256.0], np.float32).reshape(1, 5, 1, 1)
    k, _ = f16_rows(slab(KvDtype.BF16, bf16(exact)))
    assert np.array_equal(k.astype(np.float32), exact)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 70000.0])
@pytest.mark.parametrize("dtype", list(KvDtype))
def test_what_is_not_finite_in_f16_is_refused(dtype: KvDtype, bad: float) -> None:
    values = VALUES.copy()
    values[0, 3] = bad
    with np.errstate(over="ignore"):
        rows = bf16(values) if dtype is KvDtype.BF16 else values.astype(dtype.storage)
    with pytest.raises(KvIncompatible, match="finite"):
        f16_rows(slab(dtype, rows))
