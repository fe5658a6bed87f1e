"""The torch twin of the codec's products: the same format, its matrix products on torch's threads or a GPU, in bf16
if wanted (whose rounding is far below what coding leaves)."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.kvtc.statistics import fast_dtype
from mesh.kv.kvtc.artifact import Artifact
from mesh.kv.kvtc.transform import LinearMaps, NumpyMaps

F32 = NDArray[np.float32]


class TorchMaps:
    """mesh.kv.kvtc.transform.LinearMaps on a torch device."""

    def __init__(self, artifact: Artifact, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype
        self._weights = torch.from_numpy(artifact.weights).to(device)
        self._numpy_basis = artifact.basis

    @functools.cached_property
    def _basis(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensor(b).to(self._dtype) for b in self._numpy_basis)

    @functools.cached_property
    def _inverse(self) -> torch.Tensor:
        inverse: torch.Tensor = torch.linalg.inv(self._weights.double()).float()
        return inverse

    @functools.cached_property
    @torch.inference_mode()
    def _backward(self) -> tuple[torch.Tensor, ...]:
        blocks, dim = self._inverse.shape[1:3]
        bases = [self._tensor(b).view(blocks, dim, -1) for b in self._numpy_basis]
        products = [(m @ b).reshape(blocks * dim, -1) for m, b in zip(self._inverse, bases, strict=True)]
        return tuple(m.T.contiguous().to(self._dtype) for m in products)

    def weigh(self, features: F32) -> F32:
        return self._blockwise(features, self._weights)

    def unweigh(self, weighted: F32) -> F32:
        return self._blockwise(weighted, self._inverse)

    @torch.inference_mode()
    def project(self, weighted: F32, ranks: tuple[int, int]) -> F32:
        both = self._tensor(weighted).to(self._dtype)
        parts = [(both[s] @ self._basis[s][:, :r]).float() for s, r in enumerate(ranks)]
        out: F32 = torch.cat(parts, dim=1).cpu().numpy()
        return out

    def expand(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        return self._products(coefficients, ranks, tuple(b.T for b in self._basis))

    def reconstruct(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        return self._products(coefficients, ranks, self._backward)

    @torch.inference_mode()
    def _products(self, coefficients: F32, ranks: tuple[int, int], maps: tuple[torch.Tensor, ...]) -> F32:
        both = self._tensor(coefficients).to(self._dtype)
        parts = both[:, : ranks[0]], both[:, ranks[0] :]
        out = np.empty((2, len(coefficients), maps[0].shape[1]), dtype=np.float32)
        for s, part in enumerate(parts):
            torch.from_numpy(out[s]).copy_(part @ maps[s][: ranks[s]])
        return out

    @torch.inference_mode()
    def _blockwise(self, features: F32, matrices: torch.Tensor) -> F32:
        _, n_tokens, n = features.shape
        blocks, dim = matrices.shape[1:3]
        parts = self._tensor(features).view(2, n_tokens, blocks, dim).transpose(1, 2)
        out: F32 = (parts @ matrices).transpose(1, 2).reshape(2, n_tokens, n).cpu().numpy()
        return out

    def _tensor(self, array: F32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def torch_maps(artifact: Artifact) -> LinearMaps:
    """Those of a core node's CPU: in bf16 where it multiplies that in hardware, else numpy's, which torch's f32
    products do not beat."""
    dtype = fast_dtype()
    return NumpyMaps(artifact) if dtype is torch.float32 else TorchMaps(artifact, torch.device("cpu"), dtype)
