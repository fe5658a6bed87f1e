"""The codec `kvtc:DIGEST16:SETTING`, of one artifact and one of its settings.

A chunk's token is coded in one of three ways:

- its kept coefficients, entropy coded;
- these and the excess: what they miss, quantised where it lies (there it has no structure left that a basis would
  use), by the coarsest step that leaves little enough;
- in q8_0: the sinks (the first 4 positions, to which every later token attends), whoever the caller wants exact, and
  what no step saves.

The encoder guards how far a chunk errs (a weighted squared error, see mesh.kv.kvtc.transform) by what it measures of
it: see mesh.kv.kvtc.guard. The decoder takes any mixture.

Layout, little-endian: the header `_HEADER`; a bit for each token that is not plain; a byte for each of those (an
excess step's index, or `_EXACT`); a byte of magnitude for each token with excess; escaped levels (a byte each, then
i32 for those that a byte does not hold); the coefficients' rANS stream (coefficient by coefficient, 4 lanes a token);
the excess's (8 lanes a token); q8_0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codec_types import Codec
from mesh.kv.elements import convert
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc.artifact import Artifact, Setting
from mesh.kv.kvtc.guard import EXCESS_RATIO, allowance
from mesh.kv.kvtc.quantise import (
    ESCAPE,
    code_bits,
    context_of,
    escape_what_has_no_frequency,
    levels_of,
    quantise,
    symbols_of,
    zones_of,
)
from mesh.kv.kvtc.rans import FrequencyTables, decode, encode
from mesh.kv.kvtc.transform import LinearMaps, NumpyMaps, features_of, slab_of
from mesh.kv.kvtc.wire import WIDE, Escapes, Reader
from mesh.kv.slab import KvSlab

SINK_TOKENS = 4
WINDOW_TOKENS = 128
PREFIX = "kvtc:"
_FORMAT = 3
_HEADER = struct.Struct(
    "<BxHIIII"
)  # format, tokens, escapes, wide ones among them, bytes of the coefficients, bytes of the excess
_EXACT = 255
_LANES = 4  # a token: the coefficients'
_EXCESS_LANES = 8
_MAGNITUDES_PER_OCTAVE = 8
_MAGNITUDE_ZERO = 128  # the byte of magnitude 1
_STEP_RATIOS = 2.0 ** (-0.5 * np.arange(12)) * 8.0  # excess steps over the one that white noise would need
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeStats:
    """What an encoding did: tokens in each form, and the weighted squared error left on coded ones (mean)."""

    n_tokens: int
    n_exact: int
    n_excess: int
    mean_error: float


class KvtcCodec:
    """See the module's docstring. `maps` may be a faster twin's; `exact` writes whole tokens (q8_0)."""

    fixed_size = False

    def __init__(self, artifact: Artifact, setting: Setting, exact: Codec, maps: LinearMaps | None = None) -> None:
        exact.check(artifact.geometry)
        self.name = f"{PREFIX}{artifact.digest[:16]}:{setting.name}"
        self.setting = setting
        self._artifact = artifact
        self._geometry = artifact.geometry
        self._layout_hash = artifact.geometry.layout_hash
        self._exact = exact
        self._exact_bits = 8 * exact.encoded_bytes(artifact.geometry, 1, KvDtype.F16)
        self._maps: LinearMaps = maps or NumpyMaps(artifact)
        kept = setting.steps > 0
        self._ranks = (_length(kept[0]), _length(kept[1]))
        self._kept = np.flatnonzero(np.concatenate([row[:r] for row, r in zip(kept, self._ranks, strict=True)]))
        self._steps: F32 = setting.steps[kept]
        self._restore: F32 = setting.restore[kept]
        self._contexts: NDArray[np.intp] = setting.contexts[kept].astype(np.intp)
        self._n_k = int(kept[0].sum())
        self._predict: F32 = artifact.predict[kept[0, : artifact.ranks[0]]][:, kept[1, : artifact.predict.shape[1]]]
        self._zones = zones_of(artifact.tables).of(self._contexts)
        dim = artifact.geometry.head_dim
        self._mean: F32 = artifact.mean[:, None]
        self._residual = np.repeat(artifact.residual.ravel(), dim)  # of each feature of K, then of V
        white = np.sqrt(12.0 * EXCESS_RATIO * setting.bound / len(self._residual))
        self._excess_steps = (white * _STEP_RATIOS).astype(np.float32)

    def check(self, geometry: KvGeometry) -> None:
        if geometry.layout_hash != self._layout_hash:
            raise KvIncompatible(f"codec {self.name} was calibrated for another model", field="codec")

    def encoded_bytes(self, geometry: KvGeometry, n_tokens: int, dtype: KvDtype) -> int:
        """The largest: every token in q8_0."""
        return _HEADER.size + n_tokens * 2 + self._exact.encoded_bytes(geometry, n_tokens, dtype)

    def encode(self, slab: KvSlab) -> bytes:
        return self.encode_with_stats(slab, exact_from=slab.stop)[0]

    def encode_with_stats(self, slab: KvSlab, *, exact_from: int, sinks: bool = True) -> tuple[bytes, EncodeStats]:
        """Like `encode`, with positions from `exact_from` on in q8_0. `sinks` False codes them like all others, which
        is for measuring what that costs."""
        slab.check(self._geometry)
        n = slab.n_tokens
        positions = np.arange(slab.start, slab.stop)
        modes = np.zeros(n, dtype=np.uint8)
        modes[(positions < SINK_TOKENS) & sinks | (positions >= exact_from)] = _EXACT
        features = features_of(slab, self._geometry)
        features -= self._mean
        weighted = self._maps.weigh(features)
        coefficients = self._maps.project(weighted, self._ranks)
        if len(self._kept) < sum(self._ranks):
            coefficients = coefficients[:, self._kept]
        levels, restored = self._quantise(coefficients)
        energy = np.einsum("snf,snf->sn", weighted, weighted).sum(axis=0)
        energy -= np.einsum("nr,nr->n", coefficients, coefficients)
        coefficients -= restored
        errors = np.maximum(energy + np.einsum("nr,nr->n", coefficients, coefficients), 0.0)
        allowed = allowance(errors[modes == 0], self.setting.bound)
        over = np.flatnonzero((modes == 0) & (errors > allowed.limit))
        excess_modes, excess, left = self._excess_of(weighted[:, over], restored[over], allowed.after_excess)
        excess_modes[self._bits(levels[over], excess_modes, excess) > self._exact_bits] = _EXACT
        modes[over] = excess_modes
        errors[over] = left
        data = self._pack(slab, modes, levels, excess[excess_modes != _EXACT])
        if len(data) > (limit := self.encoded_bytes(self._geometry, n, slab.dtype)):
            modes[:] = _EXACT
            data = self._pack(slab, modes, levels, excess[:0])
            assert len(data) <= limit
        coded = modes != _EXACT
        return data, EncodeStats(
            n_tokens=n,
            n_exact=int(n - coded.sum()),
            n_excess=int(((modes > 0) & coded).sum()),
            mean_error=float(errors[coded].mean()) if coded.any() else 0.0,
        )

    def decode(self, data: bytes, *, start: int, n_tokens: int, geometry: KvGeometry, dtype: KvDtype) -> KvSlab:
        self.check(geometry)
        view = memoryview(data)
        if len(data) < _HEADER.size:
            raise PayloadCorrupt(f"{len(data)} bytes are no chunk of {self.name}")
        version, count, n_escapes, n_wide, coded_bytes, excess_bytes = _HEADER.unpack_from(data)
        if version != _FORMAT or count != n_tokens or n_tokens < 1:
            raise PayloadCorrupt(f"this is no chunk of {n_tokens} tokens in {self.name}")
        reader = Reader(view, _HEADER.size)
        flags = np.unpackbits(reader.array("u1", -(-n_tokens // 8)), count=n_tokens).astype(bool)
        modes = np.zeros(n_tokens, dtype=np.uint8)
        modes[flags] = reader.array("u1", int(flags.sum()))
        if (modes[flags] == 0).any() or ((modes > len(self._excess_steps)) & (modes != _EXACT)).any():
            raise PayloadCorrupt("a token's mode is unknown")
        coded = np.flatnonzero(modes != _EXACT)
        with_excess = np.flatnonzero((modes > 0) & (modes != _EXACT))
        magnitudes = reader.array("u1", len(with_excess))
        escapes = Escapes(reader.array("i1", n_escapes), reader.array("<i4", n_wide))
        try:
            levels = self._read_levels(reader.take(coded_bytes), len(coded), escapes)
            excess = self._read_excess(reader.take(excess_bytes), modes[with_excess], magnitudes, escapes)
            escapes.finish()
            features = self._maps.reconstruct(self._spread(self._restored(levels)), self._ranks)
            if len(coded) < n_tokens:
                some = features
                features = np.zeros((2, n_tokens, some.shape[2]), dtype=np.float32)
                features[:, coded] = some
            if len(with_excess):
                features[:, with_excess] += self._maps.unweigh(excess)
            features += self._mean
            slab = slab_of(features, geometry, start, dtype)
            self._fill_exact(slab, reader, np.flatnonzero(modes == _EXACT))
        except KvIncompatible as exc:
            raise PayloadCorrupt(f"a chunk of {self.name} holds values that do not fit") from exc
        reader.finish()
        return slab

    def _quantise(self, coefficients: F32) -> tuple[I32, F32]:
        """Levels, and the coefficients that come back."""
        n_k = self._n_k
        predicted = slice(n_k, n_k + self._predict.shape[1])
        levels = np.empty(coefficients.shape, dtype=np.int32)
        levels[:, :n_k] = quantise(coefficients[:, :n_k], self._steps[:n_k], self._zones.part(slice(None, n_k)))
        restored_k = levels[:, :n_k] * self._restore[:n_k]
        told = restored_k @ self._predict
        rest = coefficients[:, n_k:].copy()
        rest[:, : told.shape[1]] -= told
        levels[:, n_k:] = quantise(rest, self._steps[n_k:], self._zones.part(slice(n_k, None)))
        restored = np.empty(coefficients.shape, dtype=np.float32)
        restored[:, :n_k] = restored_k
        np.multiply(levels[:, n_k:], self._restore[n_k:], out=restored[:, n_k:], casting="same_kind")
        restored[:, predicted] += told
        return levels, restored

    def _restored(self, levels: I32) -> F32:
        """Kept coefficients [n, n_kept]: V's are what K's tell of them, and what was coded."""
        n_k = self._n_k
        restored = np.empty(levels.shape, dtype=np.float32)
        np.multiply(levels, self._restore, out=restored, casting="same_kind")
        restored[:, n_k : n_k + self._predict.shape[1]] += restored[:, :n_k] @ self._predict
        return restored

    def _spread(self, restored: F32) -> F32:
        """Kept coefficients [n, n_kept] among all of the ranks."""
        if len(self._kept) == sum(self._ranks):
            return restored
        out = np.zeros((len(restored), sum(self._ranks)), dtype=np.float32)
        out[:, self._kept] = restored
        return out

    def _excess_of(
        self, weighted: F32, restored: F32, allowed: float
    ) -> tuple[NDArray[np.uint8], I32, NDArray[np.float32]]:
        """Of tokens [2, n, F] whose coefficients are not enough: mode of each, levels of the excess [n, 2F] (levels of
        those that stay `_EXACT` mean nothing) and the error that is left, at most `allowed`."""
        n = len(restored)
        modes = np.full(n, _EXACT, dtype=np.uint8)
        errors = np.zeros(n, dtype=np.float32)
        if not n:
            return modes, np.zeros((0, len(self._residual)), dtype=np.int32), errors
        missing = weighted - self._maps.expand(self._spread(restored), self._ranks)
        rest = np.ascontiguousarray(missing.transpose(1, 0, 2)).reshape(n, len(self._residual))
        levels = np.zeros(rest.shape, dtype=np.int32)
        todo = np.arange(n)
        for index, step in enumerate(self._excess_steps):
            if not len(todo):
                break
            tried = quantise(rest[todo], step)
            left = np.square(rest[todo] - tried.astype(np.float32) * step).sum(axis=1)
            good = left <= allowed
            modes[todo[good]] = index + 1
            levels[todo[good]] = tried[good]
            errors[todo[good]] = left[good]
            todo = todo[~good]
        return modes, levels, errors

    def _bits(self, levels: I32, modes: NDArray[np.uint8], excess: I32) -> NDArray[np.float64]:
        """What tokens with excess cost, about."""
        tables = self._artifact.tables
        contexts = np.broadcast_to(self._contexts, levels.shape)
        steps = self._excess_steps[np.where(modes == _EXACT, 1, modes) - 1]
        excess_contexts = self._excess_contexts(_magnitude_bytes(np.abs(excess).mean(axis=1) * steps), steps)
        bits: NDArray[np.float64] = code_bits(excess, excess_contexts, tables).sum(axis=1)
        bits += code_bits(levels, contexts, tables).sum(axis=1)
        return bits

    def _pack(self, slab: KvSlab, modes: NDArray[np.uint8], levels: I32, excess: I32) -> bytes:
        flags = modes != 0
        coded = np.flatnonzero(modes != _EXACT)
        exact = np.flatnonzero(modes == _EXACT)
        escapes: list[I32] = []
        coefficient_bytes = b""
        if len(coded):
            rows = np.ascontiguousarray((levels if len(coded) == len(levels) else levels[coded]).T)
            contexts = np.broadcast_to(self._contexts[:, None], rows.shape)
            coefficient_bytes = _code(rows, contexts, _LANES * len(coded), self._artifact.tables, escapes)
        magnitudes, excess_bytes = np.empty(0, dtype=np.uint8), b""
        if len(excess):
            steps = self._excess_steps[modes[(modes > 0) & (modes != _EXACT)] - 1]
            magnitudes = _magnitude_bytes(np.abs(excess).mean(axis=1) * steps)
            contexts = self._excess_contexts(magnitudes, steps)
            excess_bytes = _code(
                _to_lanes(excess), _to_lanes(contexts), _EXCESS_LANES * len(excess), self._artifact.tables, escapes
            )
        escaped = np.concatenate(escapes) if escapes else np.empty(0, dtype=np.int32)
        wide = np.abs(escaped) > -WIDE - 1
        return b"".join(
            [
                _HEADER.pack(_FORMAT, len(modes), len(escaped), wide.sum(), len(coefficient_bytes), len(excess_bytes)),
                np.packbits(flags).tobytes(),
                modes[flags].tobytes(),
                magnitudes.tobytes(),
                np.where(wide, WIDE, escaped).astype("i1").tobytes(),
                escaped[wide].astype("<i4").tobytes(),
                coefficient_bytes,
                excess_bytes,
                self._exact.encode(_pick(slab, exact)) if len(exact) else b"",
            ]
        )

    def _excess_contexts(self, magnitudes: NDArray[np.uint8], steps: F32) -> NDArray[np.intp]:
        """Frequency tables [n, 2F] by each token's magnitude and each block's usual share of it."""
        octaves = (magnitudes.astype(np.float64) - _MAGNITUDE_ZERO) / _MAGNITUDES_PER_OCTAVE
        level = 2.0**octaves / steps  # mean |level| over the token
        return context_of(level[:, None] * self._residual)

    def _read_levels(self, data: memoryview, n_coded: int, escapes: Escapes) -> I32:
        levels = np.empty((len(self._contexts), n_coded), dtype=np.int32)
        if n_coded:
            contexts = np.repeat(self._contexts, n_coded)
            symbols = decode(data, contexts, _LANES * n_coded, self._artifact.tables).reshape(levels.shape)
            levels = levels_of(symbols)
            escapes.fill(levels, symbols)
        elif len(data):
            raise PayloadCorrupt("coefficients of no token")
        return np.ascontiguousarray(levels.T)

    def _read_excess(
        self, data: memoryview, modes: NDArray[np.uint8], magnitudes: NDArray[np.uint8], escapes: Escapes
    ) -> F32:
        """Weighted features [2, n, F]."""
        n, width = len(modes), len(self._residual)
        if not n:
            if len(data):
                raise PayloadCorrupt("excess of no token")
            return np.empty((2, 0, width // 2), dtype=np.float32)
        steps = self._excess_steps[modes - 1]
        contexts = _to_lanes(self._excess_contexts(magnitudes, steps))
        symbols = decode(data, contexts.ravel(), n * _EXCESS_LANES, self._artifact.tables).reshape(contexts.shape)
        levels = levels_of(symbols)
        escapes.fill(levels, symbols)
        values = _from_lanes(levels, n).astype(np.float32) * steps[:, None]
        return np.ascontiguousarray(values.reshape(n, 2, width // 2).transpose(1, 0, 2))

    def _fill_exact(self, slab: KvSlab, reader: Reader, exact: NDArray[np.intp]) -> None:
        """Write q8_0 tokens into a slab that nobody else has yet."""
        if len(exact):
            size = self._exact.encoded_bytes(self._geometry, len(exact), slab.dtype)
            part = self._exact.decode(
                bytes(reader.take(size)), start=0, n_tokens=len(exact), geometry=self._geometry, dtype=slab.dtype
            )
            slab.k[:, exact] = part.k
            slab.v[:, exact] = part.v


def artifact_of(codec_name: str) -> str:
    """The head of the digest of the artifact that a codec of this name needs; "" if it is no kvtc codec."""
    return codec_name.removeprefix(PREFIX).partition(":")[0] if codec_name.startswith(PREFIX) else ""


def _length(kept: NDArray[np.bool_]) -> int:
    """Of the part that holds every kept coefficient."""
    return int(np.flatnonzero(kept)[-1]) + 1 if kept.any() else 0


def _code(levels: I32, contexts: NDArray[np.intp], n_lanes: int, tables: FrequencyTables, escapes: list[I32]) -> bytes:
    symbols = escape_what_has_no_frequency(symbols_of(levels), contexts, tables)
    escapes.append(levels[symbols == ESCAPE])
    return encode(symbols.ravel(), contexts.ravel(), n_lanes, tables)


def _to_lanes(values: NDArray[_Number]) -> NDArray[_Number]:
    """[n, width] as [width / 8, n * 8]: each token's row dealt to 8 lanes."""
    n, width = values.shape
    rows = values.reshape(n, width // _EXCESS_LANES, _EXCESS_LANES).transpose(1, 0, 2)
    return np.ascontiguousarray(rows).reshape(width // _EXCESS_LANES, n * _EXCESS_LANES)


def _from_lanes(values: I32, n: int) -> I32:
    rows = values.reshape(len(values), n, _EXCESS_LANES).transpose(1, 0, 2)
    return np.ascontiguousarray(rows).reshape(n, -1)


def _magnitude_bytes(mean_magnitudes: NDArray[np.floating]) -> NDArray[np.uint8]:
    octaves = np.log2(np.maximum(mean_magnitudes, 1e-12))
    codes: NDArray[np.uint8] = np.clip(np.rint(octaves * _MAGNITUDES_PER_OCTAVE) + _MAGNITUDE_ZERO, 0, 255).astype(
        np.uint8
    )
    return codes


def _pick(slab: KvSlab, tokens: NDArray[np.intp]) -> KvSlab:
    """Those tokens as a slab of their own (its positions mean nothing)."""
    k, v = (np.ascontiguousarray(part[:, tokens]) for part in (slab.k, slab.v))
    return convert(KvSlab(start=0, dtype=slab.dtype, k=k, v=v), slab.dtype)
