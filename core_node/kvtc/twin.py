"""The torch twin of the codec's products: the same format, its matrix products on torch's threads or a GPU, in bf16
if wanted (whose rounding is far below what coding leaves)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mesh.kv.kvtc.artifact import Artifact, Setting

F32 = NDArray[np.float32]


class TorchMaps:
    """mesh.kv.kvtc.transform.LinearMaps on a torch device."""

    def __init__(
        self, artifact: Artifact, setting: Setting, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self._device, self._dtype = device, dtype
        self._mean = torch.from_numpy(artifact.mean).to(device)[:, None]
        weights = torch.from_numpy(artifact.weights).to(device)
        self._weights = weights
        self._inverse = torch.linalg.inv(weights.double()).float()
        kept = artifact.kept(setting)
        blocks, dim = artifact.weights.shape[1:3]
        parts = [torch.from_numpy(np.ascontiguousarray(k)).to(device).view(blocks, dim, -1) for k in kept]
        n = blocks * dim
        self._forward = [(weights[s] @ parts[s]).reshape(n, -1).to(dtype) for s in range(2)]
        self._backward = [(self._inverse[s] @ parts[s]).reshape(n, -1).T.contiguous().to(dtype) for s in range(2)]

    @torch.inference_mode()
    def project(self, features: F32) -> tuple[F32, F32]:
        centred = self._tensor(features) - self._mean
        coefficients = torch.cat([(centred[s].to(self._dtype) @ self._forward[s]).float() for s in range(2)], dim=1)
        energy = self._blockwise(centred, self._weights).square().sum(dim=(0, 2))
        return coefficients.cpu().numpy(), energy.cpu().numpy()

    @torch.inference_mode()
    def reconstruct(self, coefficients: F32) -> F32:
        split = len(self._backward[0])
        c = self._tensor(coefficients).to(self._dtype)
        parts = (c[:, :split] @ self._backward[0], c[:, split:] @ self._backward[1])
        out: F32 = (torch.stack(parts).float() + self._mean).cpu().numpy()
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
