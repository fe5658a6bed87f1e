"""Coefficients to symbols and back, and which frequency table suits a magnitude. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.kv.kvtc.artifact import N_CONTEXTS
from mesh.kv.kvtc.rans import N_SYMBOLS, PROB_BITS, FrequencyTables

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

ROUNDING = np.float32(0.42)  # below one half: a zero is cheaper than what it spoils
ESCAPE = N_SYMBOLS - 1
_LARGEST = (ESCAPE - 1) // 2
_PER_OCTAVE = 4
_LOWEST_OCTAVE = -9
MAX_LEVEL = 1 << 30
_EXCHANGE = float(np.log(2.0)) / 6.0
_RAREST = 2.0**-8  # stands for a frequency of zero: an escape and its byte


def quantise(values: F32, steps: F32 | np.float32, zones: Zones | None = None) -> I32:
    """Levels: to the nearest multiple of the step, with a dead zone: one for all, or each coefficient's own."""
    scaled = values / steps
    size = np.abs(scaled)
    levels = np.floor(size + (ROUNDING if zones is None else zones.rounding))
    if zones is not None:
        levels[size < zones.dead] = 0.0
    signed: I32 = np.copysign(np.minimum(levels, MAX_LEVEL), scaled).astype(np.int32)
    return signed


@dataclass(frozen=True, slots=True)
class Zones:
    """Where a quantiser decides, in steps: zero below `dead`, above it `rounding` is added before the fraction is cut.
    F32 [n_coefficients], or one an entropy table."""

    dead: F32
    rounding: F32

    def of(self, contexts: NDArray[np.intp]) -> Zones:
        """Each coefficient's, by its table."""
        return Zones(self.dead[contexts], self.rounding[contexts])

    def part(self, coefficients: slice) -> Zones:
        return Zones(self.dead[coefficients], self.rounding[coefficients])


def zones_of(tables: FrequencyTables) -> Zones:
    """By table: where the next level's bits are worth what they mend, at the exchange rate of bits and error that a
    uniform quantiser of this step lives by (its error falls by ln 2 / 6 of the step's square with each bit)."""
    bits = -np.log2(np.maximum(tables.frequencies, _RAREST) / float(1 << PROB_BITS))
    first, more = bits[:, 1] - bits[:, 0], bits[:, 3] - bits[:, 1]
    dead = np.clip(0.5 + _EXCHANGE / 2 * first, 0.5, 1.3)
    rounding = np.clip(0.5 - _EXCHANGE / 2 * more, 0.3, 0.5)
    return Zones(dead.astype(np.float32), rounding.astype(np.float32))


def symbols_of(levels: I32) -> U8:
    """0, 1, -1, 2, -2 ... as 0, 1, 2, 3, 4 ...; ESCAPE beyond what a symbol holds."""
    zigzag = np.where(levels > 0, 2 * levels - 1, -2 * levels)
    return np.where(np.abs(levels) > _LARGEST, ESCAPE, zigzag).astype(np.uint8)


def levels_of(symbols: U8) -> I32:
    """The inverse of `symbols_of`; ESCAPE is 0."""
    wide = symbols.astype(np.int32)
    levels = np.where(wide & 1, (wide + 1) >> 1, -(wide >> 1))
    return np.where(symbols == ESCAPE, 0, levels).astype(np.int32)


def escape_what_has_no_frequency(symbols: U8, contexts: NDArray[np.intp], tables: FrequencyTables) -> U8:
    """Symbols of which every one can be coded."""
    return np.where(tables.frequencies[contexts, symbols] == 0, np.uint8(ESCAPE), symbols)


def context_of(mean_level: NDArray[np.floating]) -> NDArray[np.intp]:
    """The frequency table for coefficients whose |level| is `mean_level` on average."""
    octave = np.log2(np.maximum(mean_level, 2.0**_LOWEST_OCTAVE)) - _LOWEST_OCTAVE
    contexts: NDArray[np.intp] = np.clip(np.rint(octave * _PER_OCTAVE), 0, N_CONTEXTS - 1).astype(np.intp)
    return contexts


def mean_level(magnitude: NDArray[np.floating], step: float) -> NDArray[np.float64]:
    """Expected |level| of a Laplace variable of this mean magnitude."""
    rate = step / np.maximum(magnitude.astype(np.float64), 1e-30)
    rate = np.clip(rate, 1e-6, 500.0)
    level: NDArray[np.float64] = np.exp(-rate * (1.0 - float(ROUNDING))) / -np.expm1(-rate)
    return level


def laplace_counts() -> NDArray[np.float64]:
    """Shapes to begin with, f64 [N_CONTEXTS, N_SYMBOLS]: each context's levels as if Laplace, the escape rare."""
    target = 2.0 ** (np.arange(N_CONTEXTS) / _PER_OCTAVE + _LOWEST_OCTAVE)
    low, high = np.full(N_CONTEXTS, 1e-4), np.full(N_CONTEXTS, 1e4)
    for _ in range(60):  # the magnitude (in steps) whose mean level is the target
        middle = np.sqrt(low * high)
        over = mean_level(middle, 1.0) > target
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    rate = 1.0 / middle[:, None]
    size = np.arange(1, _LARGEST + 1)
    at_least = np.exp(-rate * (size - float(ROUNDING)))
    exactly = at_least * -np.expm1(-rate)
    counts = np.zeros((N_CONTEXTS, N_SYMBOLS))
    counts[:, 1 : 2 * _LARGEST : 2] = exactly / 2
    counts[:, 2 : 2 * _LARGEST + 1 : 2] = exactly / 2
    counts[:, 0] = 1.0 - at_least[:, 0]
    counts[counts < 2.0**-15] = 0.0  # cheaper as an escape than with a frequency of its own
    counts[:, ESCAPE] = 2.0**-13
    return counts


def code_bits(levels: I32, contexts: NDArray[np.intp], tables: FrequencyTables) -> NDArray[np.float64]:
    """Bits of each level under its context (an escape's value is a byte, or five)."""
    symbols = escape_what_has_no_frequency(symbols_of(levels), contexts, tables)
    bits: NDArray[np.float64] = -np.log2(tables.frequencies[contexts, symbols] / 4096.0)
    bits += (symbols == ESCAPE) * np.where(np.abs(levels) < 128, 8.0, 40.0)
    return bits
