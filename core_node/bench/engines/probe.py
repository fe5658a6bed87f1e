"""How fast the machine is right now: a fixed product and a fixed read, timed between the engines' turns.

Hosts of virtual machines drift by a factor of two within minutes; figures that were taken at different speeds do not
compare.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_SIDE, _READ_BYTES = 1024, 256 << 20
_PROBE_S = 1.0  # a turn lasts seconds, so that what the machine does within milliseconds is no matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of a product of matrices, and of reading memory."""

    flop_per_s: float
    read_bytes_per_s: float


def probe(threads: int) -> Speed:
    """How fast it is just now, about a second: medians, in f32, whose product every CPU computes without emulation."""
    return _speed(_timings(threads, torch.float32), statistics.median)


def limits(threads: int) -> Speed:
    """The most that this machine did: the product in f32 or bf16, whichever is faster."""
    f32, bf16 = (_speed(_timings(threads, dtype), min) for dtype in (torch.float32, torch.bfloat16))
    return Speed(
        flop_per_s=max(f32.flop_per_s, bf16.flop_per_s),
        read_bytes_per_s=max(f32.read_bytes_per_s, bf16.read_bytes_per_s),
    )


def _timings(threads: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Seconds of a product and of a read, over and over."""
    torch.set_num_threads(threads)
    a, memory = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.zeros(_READ_BYTES // 8, dtype=torch.int64)
    timings: list[tuple[float, float]] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _PROBE_S or not timings:
        started = time.perf_counter()
        torch.mm(a, a)
        between = time.perf_counter()
        memory.sum()
        timings.append((between - started, time.perf_counter() - between))
    return timings


def _speed(timings: Sequence[tuple[float, float]], choose: Callable[[Sequence[float]], float]) -> Speed:
    product_s, read_s = choose([t[0] for t in timings]), choose([t[1] for t in timings])
    return Speed(flop_per_s=2 * _SIDE**3 / product_s, read_bytes_per_s=_READ_BYTES / read_s)


def moved_ratio(speeds: Sequence[Speed]) -> float:
    """How far the machine's speed moved among these: the fastest over the slowest, less 1, of the worse of both."""
    each = ([s.flop_per_s for s in speeds], [s.read_bytes_per_s for s in speeds])
    return max(max(values) / min(values) - 1 for values in each)
