"""How fast the machine is right now: a fixed product and a fixed read, timed between the engines' turns.

Hosts of virtual machines drift by a factor of two within minutes; figures that were taken at different speeds do not
compare.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SIDE, _READ_BYTES, _TRIES = 1024, 256 << 20, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The best of some tries."""

    flop_per_s: float
    read_bytes_per_s: float


def probe(threads: int, dtype: torch.dtype = torch.float32) -> Speed:
    """Measure, about 0.2 s. f32 by default, whose product every CPU computes without emulation."""
    torch.set_num_threads(threads)
    a, memory = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.zeros(_READ_BYTES // 8, dtype=torch.int64)
    product_s = read_s = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        torch.mm(a, a)
        between = time.perf_counter()
        memory.sum()
        product_s, read_s = min(product_s, between - started), min(read_s, time.perf_counter() - between)
    return Speed(flop_per_s=2 * _SIDE**3 / product_s, read_bytes_per_s=_READ_BYTES / read_s)


def limits(threads: int) -> Speed:
    """The most that this machine did: the product in f32 or bf16, whichever is faster."""
    f32, bf16 = probe(threads), probe(threads, torch.bfloat16)
    return Speed(
        flop_per_s=max(f32.flop_per_s, bf16.flop_per_s),
        read_bytes_per_s=max(f32.read_bytes_per_s, bf16.read_bytes_per_s),
    )


def moved_ratio(speeds: Sequence[Speed]) -> float:
    """How far the machine's speed moved among these: the fastest over the slowest, less 1, of the worse of both."""
    each = ([s.flop_per_s for s in speeds], [s.read_bytes_per_s for s in speeds])
    return max(max(values) / min(values) - 1 for values in each)
