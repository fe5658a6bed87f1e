"""Slab to weighted features to coefficients, and back. numpy; `LinearMaps` is what a faster twin replaces.

Features of a token are all layers, heads and dimensions in one vector, [2, n_tokens, F]: K with RoPE undone at the
token's position, and V. Multiplied block by block (a block is one layer's head) with the artifact's weights, a squared
error is what the model's output feels of it to second order; the basis is orthonormal there.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible
from mesh.kv.elements import from_f32, to_f32
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc.artifact import Artifact, n_features
from mesh.kv.slab import KvSlab
from mesh.model.architectures import RopePairs, architecture_facts
from mesh.model.rope_scaling import inverse_frequencies

F32 = NDArray[np.float32]
_F16_LIMIT = 65520.0  # what rounds to infinity from here on


def features_of(slab: KvSlab, geometry: KvGeometry) -> F32:
    """f32 [2, n_tokens, F]. Raises KvIncompatible if a value is not finite."""
    out = np.empty((2, slab.n_tokens, n_features(geometry)), dtype=np.float32)
    shape = (slab.n_tokens, geometry.n_layers, geometry.n_kv_heads, geometry.head_dim)
    for part, target in zip((slab.k, slab.v), out, strict=True):
        values = to_f32(part, slab.dtype) if slab.dtype is KvDtype.BF16 else part  # others convert as they are copied
        target.reshape(shape)[...] = values.transpose(1, 0, 2, 3)
    if not np.isfinite(out).all():
        raise KvIncompatible("KV values are not finite")
    _rotate(out[0].reshape(shape), geometry, slab.start, -1.0)
    return out


def slab_of(features: F32, geometry: KvGeometry, start: int, dtype: KvDtype) -> KvSlab:
    """The slab of features [2, n_tokens, F], which it uses up. Raises KvIncompatible if a value does not fit."""
    n_tokens = features.shape[1]
    shape = (n_tokens, geometry.n_layers, geometry.n_kv_heads, geometry.head_dim)
    _rotate(features[0].reshape(shape), geometry, start, 1.0)
    k, v = (_by_layer(part.reshape(shape), dtype) for part in features)
    return KvSlab(start=start, dtype=dtype, k=k, v=v)


def _by_layer(values: F32, dtype: KvDtype) -> NDArray[Any]:
    """[n_tokens, n_layers, ...] in `dtype`, layers first. Raises KvIncompatible if a value does not fit."""
    layers_first = values.transpose(1, 0, 2, 3)
    if dtype is not KvDtype.F16:
        return np.ascontiguousarray(from_f32(layers_first, dtype))
    if not (values.min(initial=0.0) > -_F16_LIMIT and values.max(initial=0.0) < _F16_LIMIT):
        raise KvIncompatible("KV values are not finite or do not fit f16; use a codec that keeps their range")
    out = np.empty(layers_first.shape, dtype=np.float16)
    out[...] = layers_first  # converted as they are copied
    return out


def _rotate(k: F32, geometry: KvGeometry, start: int, sign: float) -> None:
    """Rotate [n_tokens, n_layers, n_kv_heads, head_dim] in place, in the architecture's pairs, by sign * position."""
    frequencies = inverse_frequencies(geometry.head_dim, geometry.rope_base, geometry.rope_scaling)
    angles = np.arange(start, start + len(k), dtype=np.float64)[:, None] * (sign * frequencies)
    cos, sin = (f(angles).astype(np.float32)[:, None, None, :] for f in (np.cos, np.sin))
    if architecture_facts(geometry.architecture).pairs is RopePairs.ADJACENT:
        a, b = k[..., 0::2], k[..., 1::2]
    else:
        half = geometry.head_dim // 2
        a, b = k[..., :half], k[..., half:]
    turned = a * sin
    a *= cos
    a -= b * sin
    b *= cos
    b += turned


class LinearMaps(Protocol):
    """The products of one artifact. Features [2, n_tokens, F] are distances to the mean here; coefficients
    [n_tokens, sum(ranks)] are the first `ranks` of K, then of V."""

    def weigh(self, features: F32) -> F32:
        """Weighted features."""
        ...

    def unweigh(self, weighted: F32) -> F32:
        """The inverse of `weigh`."""
        ...

    def project(self, weighted: F32, ranks: tuple[int, int]) -> F32:
        """Coefficients of weighted features."""
        ...

    def expand(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        """Weighted features of coefficients."""
        ...

    def reconstruct(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        """Features of coefficients: `expand` and `unweigh` in one product."""
        ...


class NumpyMaps:
    """LinearMaps in numpy. The matrix for receiving serves all settings and is made when first used. Safe from any
    thread."""

    def __init__(self, artifact: Artifact) -> None:
        self._basis = artifact.basis
        self._weights = artifact.weights

    @functools.cached_property
    def _inverse(self) -> F32:
        return np.linalg.inv(self._weights.astype(np.float64)).astype(np.float32)

    @functools.cached_property
    def _backward(self) -> tuple[F32, ...]:
        maps = (_each_block(w, basis) for w, basis in zip(self._inverse, self._basis, strict=True))
        return tuple(np.ascontiguousarray(m.T) for m in maps)

    def weigh(self, features: F32) -> F32:
        return blockwise(features, self._weights)

    def unweigh(self, weighted: F32) -> F32:
        return blockwise(weighted, self._inverse)

    def project(self, weighted: F32, ranks: tuple[int, int]) -> F32:
        out = np.empty((weighted.shape[1], sum(ranks)), dtype=np.float32)
        for s, part in enumerate(np.split(out, ranks[:1], axis=1)):
            np.matmul(weighted[s], self._basis[s][:, : ranks[s]], out=part)
        return out

    def expand(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        return _products(coefficients, ranks, tuple(basis.T for basis in self._basis))

    def reconstruct(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        return _products(coefficients, ranks, self._backward)


def _products(coefficients: F32, ranks: tuple[int, int], maps: tuple[F32, ...]) -> F32:
    """[2, n, F] of [n, sum(ranks)] and, for K and V, [R, F]."""
    out = np.empty((2, len(coefficients), maps[0].shape[1]), dtype=np.float32)
    for s, part in enumerate(np.split(coefficients, ranks[:1], axis=1)):
        np.matmul(part, maps[s][: ranks[s]], out=out[s])
    return out


def _each_block(matrices: F32, basis: F32) -> F32:
    """[B, D, D] times the blocks of [F, R]."""
    blocks, dim, _ = matrices.shape
    out: F32 = np.matmul(matrices, basis.reshape(blocks, dim, -1)).reshape(basis.shape)
    return out


def blockwise(features: F32, matrices: F32) -> F32:
    """[2, n_tokens, F] times symmetric `matrices` [2, B, head_dim, head_dim], each block by its own."""
    blocks, dim = matrices.shape[1:3]
    out = np.empty_like(features)
    parts, targets = (x.reshape(*x.shape[:2], blocks, dim).transpose(0, 2, 1, 3) for x in (features, out))
    np.matmul(parts, matrices, out=targets)
    return out
