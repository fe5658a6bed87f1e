"""Slab to weighted features to coefficients, and back. numpy; `LinearMaps` is what a faster twin replaces.

Features of a token are all layers, heads and dimensions in one vector, [2, n_tokens, F]: K with RoPE undone at the
token's position, and V. Multiplied block by block (a block is one layer's head) with the artifact's weights, a squared
error is what the model's output feels of it to second order; the basis is orthonormal there.
"""

from __future__ import annotations

import functools
from typing import Protocol

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


def features_of(slab: KvSlab, geometry: KvGeometry) -> F32:
    """f32 [2, n_tokens, F]. Raises KvIncompatible if a value is not finite."""
    out = np.empty((2, slab.n_tokens, n_features(geometry)), dtype=np.float32)
    shape = (slab.n_tokens, geometry.n_layers, geometry.n_kv_heads, geometry.head_dim)
    for part, target in zip((slab.k, slab.v), out, strict=True):
        target.reshape(shape)[...] = to_f32(part, slab.dtype).transpose(1, 0, 2, 3)
    if not np.isfinite(out).all():
        raise KvIncompatible("KV values are not finite")
    _rotate(out[0].reshape(shape), geometry, slab.start, -1.0)
    return out


def slab_of(features: F32, geometry: KvGeometry, start: int, dtype: KvDtype) -> KvSlab:
    """The slab of features [2, n_tokens, F], which it uses up. Raises KvIncompatible if a value does not fit."""
    n_tokens = features.shape[1]
    shape = (n_tokens, geometry.n_layers, geometry.n_kv_heads, geometry.head_dim)
    _rotate(features[0].reshape(shape), geometry, start, 1.0)
    k, v = (np.ascontiguousarray(from_f32(part.reshape(shape), dtype).transpose(1, 0, 2, 3)) for part in features)
    return KvSlab(start=start, dtype=dtype, k=k, v=v)


def _rotate(k: F32, geometry: KvGeometry, start: int, sign: float) -> None:
    """Rotate [n_tokens, n_layers, n_kv_heads, head_dim] in place, in the architecture's pairs, by sign * position."""
    frequencies = inverse_frequencies(geometry.head_dim, geometry.rope_base, geometry.rope_scaling)
    angles = np.arange(start, start + len(k), dtype=np.float64)[:, None] * (sign * frequencies)
    turn = (np.cos(angles) + 1j * np.sin(angles)).astype(np.complex64)[:, None, None, :]
    if architecture_facts(geometry.architecture).pairs is RopePairs.ADJACENT:
        pairs = k.view(np.complex64)
        pairs *= turn
        return
    half = geometry.head_dim // 2
    turned = (k[..., :half] + 1j * k[..., half:]) * turn
    k[..., :half], k[..., half:] = turned.real, turned.imag


class LinearMaps(Protocol):
    """The products of one artifact. Coefficients [n_tokens, sum(ranks)] are the first `ranks` of K, then of V."""

    def project(self, features: F32, ranks: tuple[int, int]) -> tuple[F32, F32]:
        """Coefficients, and the weighted energy of each token [n_tokens] (of its distance to the mean)."""
        ...

    def reconstruct(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        """Features [2, n_tokens, F]."""
        ...

    def weigh(self, features: F32) -> F32:
        """Differences of features [2, n_tokens, F], weighted."""
        ...

    def unweigh(self, weighted: F32) -> F32:
        """The inverse of `weigh`."""
        ...


class NumpyMaps:
    """LinearMaps in numpy. Its matrices serve all settings and are made when first used: whoever only receives has no
    need of those for sending. Safe from any thread."""

    def __init__(self, artifact: Artifact) -> None:
        self._mean = artifact.mean
        self._basis = artifact.basis
        self._weights = artifact.weights

    @functools.cached_property
    def _inverse(self) -> F32:
        return np.linalg.inv(self._weights.astype(np.float64)).astype(np.float32)

    @functools.cached_property
    def _forward(self) -> tuple[F32, ...]:
        return tuple(_each_block(w, basis) for w, basis in zip(self._weights, self._basis, strict=True))

    @functools.cached_property
    def _backward(self) -> tuple[F32, ...]:
        maps = (_each_block(w, basis) for w, basis in zip(self._inverse, self._basis, strict=True))
        return tuple(np.ascontiguousarray(m.T) for m in maps)

    def project(self, features: F32, ranks: tuple[int, int]) -> tuple[F32, F32]:
        centred = features - self._mean[:, None]
        coefficients = np.concatenate([centred[s] @ self._forward[s][:, :r] for s, r in enumerate(ranks)], axis=1)
        weighted = self.weigh(centred)
        energy = np.einsum("snf,snf->n", weighted, weighted)
        return coefficients, energy

    def reconstruct(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        out = np.empty((2, len(coefficients), self._mean.shape[1]), dtype=np.float32)
        for s, part in enumerate(np.split(coefficients, ranks[:1], axis=1)):
            np.matmul(part, self._backward[s][: ranks[s]], out=out[s])
            out[s] += self._mean[s]
        return out

    def weigh(self, features: F32) -> F32:
        return blockwise(features, self._weights)

    def unweigh(self, weighted: F32) -> F32:
        return blockwise(weighted, self._inverse)


def _each_block(matrices: F32, basis: F32) -> F32:
    """[B, D, D] times the blocks of [F, R]."""
    blocks, dim, _ = matrices.shape
    out: F32 = np.matmul(matrices, basis.reshape(blocks, dim, -1)).reshape(basis.shape)
    return out


def blockwise(features: F32, matrices: F32) -> F32:
    """[2, n_tokens, F] times symmetric `matrices` [2, B, head_dim, head_dim], each block by its own."""
    _, n_tokens, n = features.shape
    blocks, dim = matrices.shape[1:3]
    parts = features.reshape(2, n_tokens, blocks, dim).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(np.matmul(parts, matrices).transpose(0, 2, 1, 3)).reshape(2, n_tokens, n)
