"""The torch twin of the codec's products: the same format, its matrix products on torch's threads or a GPU, in bf16
if wanted (whose rounding is far below what coding leaves)."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.kvtc.statistics import fast_dtype
from mesh.kv.kvtc.artifact import Artifact

F32 = NDArray[np.float32]


class TorchMaps:
    """mesh.kv.kvtc.transform.LinearMaps on a torch device."""

    def __init__(self, artifact: Artifact, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype
        self._mean = torch.from_numpy(artifact.mean).to(device)[:, None]
        self._basis = artifact.basis
        self._weights = torch.from_numpy(artifact.weights).to(device)

    @functools.cached_property
    def _inverse(self) -> torch.Tensor:
        inverse: torch.Tensor = torch.linalg.inv(self._weights.double()).float()
        return inverse

    @functools.cached_property
    def _forward(self) -> tuple[torch.Tensor, ...]:
        return self._products(self._weights)

    @functools.cached_property
    def _backward(self) -> tuple[torch.Tensor, ...]:
        return tuple(m.T.contiguous() for m in self._products(self._inverse))

    @torch.inference_mode()
    def _products(self, matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks, dim = matrices.shape[1:3]
        bases = [self._tensor(b).view(blocks, dim, -1) for b in self._basis]
        return tuple((m @ b).reshape(blocks * dim, -1).to(self._dtype) for m, b in zip(matrices, bases, strict=True))

    @torch.inference_mode()
    def project(self, features: F32, ranks: tuple[int, int]) -> tuple[F32, F32]:
        centred = self._tensor(features) - self._mean
        parts = [(centred[s].to(self._dtype) @ self._forward[s][:, :r]).float() for s, r in enumerate(ranks)]
        energy = self._blockwise(centred, self._weights).square().sum(dim=(0, 2))
        return torch.cat(parts, dim=1).cpu().numpy(), energy.cpu().numpy()

    @torch.inference_mode()
    def reconstruct(self, coefficients: F32, ranks: tuple[int, int]) -> F32:
        both = self._tensor(coefficients).to(self._dtype)
        parts = both[:, : ranks[0]], both[:, ranks[0] :]
        products = [(part @ self._backward[s][: ranks[s]]).float() for s, part in enumerate(parts)]
        out: F32 = (torch.stack(products) + self._mean).cpu().numpy()
        return out

    def weigh(self, features: F32) -> F32:
        out: F32 = self._blockwise(self._tensor(features), self._weights).cpu().numpy()
        return out

    def unweigh(self, weighted: F32) -> F32:
        out: F32 = self._blockwise(self._tensor(weighted), self._inverse).cpu().numpy()
        return out

    @torch.inference_mode()
    def _blockwise(self, features: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        _, n_tokens, n = features.shape
        blocks, dim = matrices.shape[1:3]
        parts = features.view(2, n_tokens, blocks, dim).transpose(1, 2)
        return (parts @ matrices).transpose(1, 2).reshape(2, n_tokens, n)

    def _tensor(self, array: F32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def torch_maps(artifact: Artifact) -> TorchMaps:
    """Those of a core node's CPU, in the precision that it multiplies fastest."""
    return TorchMaps(artifact, torch.device("cpu"), fast_dtype())
