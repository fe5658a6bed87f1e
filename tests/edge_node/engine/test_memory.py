"""Memory is counted before llama.cpp starts."""

from __future__ import annotations

import pytest

from edge_node.engine.memory import MemoryNeed
from mesh.errors import Overloaded

MIB = 1 << 20
NEED = MemoryNeed(weights_bytes=100 * MIB, kv_bytes=50 * MIB, logits_bytes=6 * MIB, transfer_bytes=32 * MIB)


def test_it_fits_or_the_sum_is_named() -> None:
    NEED.check(NEED.total_bytes)
    with pytest.raises(Overloaded, match=r"348 MiB \(weights 100 \+ KV 50 \+ logits 6 .* and 347 MiB are free"):
        NEED.check(NEED.total_bytes - 1)
