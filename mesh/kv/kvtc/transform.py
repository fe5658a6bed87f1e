"""Slab to weighted features to coefficients, and back. numpy; `LinearMaps` is what a faster twin replaces.

Features of a token are all layers, heads and dimensions in one vector, [2, n_tokens, F]: K with RoPE undone at the
token's position, and V. Multiplied block by block (a block is one layer's head) with the artifact's weights, a squared
error is what the model's output feels of it to second order; the basis is orthonormal there.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvIncompatible
from mesh.kv.elements import from_f32, to_f32
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc.artifact import Artifact, Setting, n_features
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
    """The products of one setting. Coefficients are of the kept ones of K, then of V: [n_tokens, n_kept]."""

    def project(self, features: F32) -> tuple[F32, F32]:
        """Coefficients, and the weighted energy of each token [n_tokens] (of its distance to the mean)."""
        ...

    def reconstruct(self, coefficients: F32) -> F32:
        """Features [2, n_tokens, F]."""
        ...

    def weigh(self, features: F32) -> F32:
        """Differences of features [2, n_tokens, F], weighted."""
        ...

    def unweigh(self, weighted: F32) -> F32:
        """The inverse of `weigh`."""
        ...


class NumpyMaps:
    """LinearMaps in numpy; makes its matrices once, of the kept coefficients only."""

    def __init__(self, artifact: Artifact, setting: Setting) -> None:
        self._mean = artifact.mean
        self._weights = artifact.weights
        self._inverse = np.linalg.inv(artifact.weights.astype(np.float64)).astype(np.float32)
        self._forward: list[F32] = []
        self._backward: list[F32] = []
        _, blocks, dim, _ = artifact.weights.shape
        for s, columns in enumerate(artifact.kept(setting)):
            kept = columns.reshape(blocks, dim, -1)
            self._forward.append(np.matmul(self._weights[s], kept).reshape(blocks * dim, -1))
            restore = np.matmul(self._inverse[s], kept).reshape(blocks * dim, -1).T
            self._backward.append(np.concatenate([restore, self._mean[s : s + 1]]))  # the mean is one product more

    def project(self, features: F32) -> tuple[F32, F32]:
        centred = features - self._mean[:, None]
        coefficients = np.concatenate([centred[s] @ self._forward[s] for s in range(2)], axis=1)
        weighted = self.weigh(centred)
        energy = np.einsum("snf,snf->n", weighted, weighted)
        return coefficients, energy

    def reconstruct(self, coefficients: F32) -> F32:
        n, split = len(coefficients), len(self._backward[0]) - 1
        out = np.empty((2, n, self._mean.shape[1]), dtype=np.float32)
        one = np.ones((n, 1), dtype=np.float32)
        for s, part in enumerate((coefficients[:, :split], coefficients[:, split:])):
            np.matmul(np.concatenate([part, one], axis=1), self._backward[s], out=out[s])
        return out

    def weigh(self, features: F32) -> F32:
        return blockwise(features, self._weights)

    def unweigh(self, weighted: F32) -> F32:
        return blockwise(weighted, self._inverse)


def blockwise(features: F32, matrices: F32) -> F32:
    """[2, n_tokens, F] times symmetric `matrices` [2, B, head_dim, head_dim], each block by its own."""
    _, n_tokens, n = features.shape
    blocks, dim = matrices.shape[1:3]
    parts = features.reshape(2, n_tokens, blocks, dim).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(np.matmul(parts, matrices).transpose(0, 2, 1, 3)).reshape(2, n_tokens, n)
