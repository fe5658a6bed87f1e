"""What calibration gathers over many windows: mean and covariance of features, and what the output feels of them.
torch on the CPU; the large products in bf16 where the CPU multiplies it in hardware (the errors are far below what
coding leaves), else in f32, which is tens of times faster there."""

from __future__ import annotations

import torch

from core_node.kernels.build import cpu_features

_OVERSAMPLING = 64


def fast_dtype() -> torch.dtype:
    """bf16 if this CPU multiplies it in hardware, else f32."""
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16"} & cpu_features() else torch.float32


class Covariance:
    """Of features [n, F], added window by window. The first window's mean is taken off at once, so that bf16 keeps
    what varies."""

    def __init__(self, n_features: int) -> None:
        self._outer = torch.zeros(n_features, n_features)
        self._sum = torch.zeros(n_features, dtype=torch.float64)
        self._shift: torch.Tensor | None = None
        self._n = 0
        self._dtype = fast_dtype()

    def add(self, features: torch.Tensor) -> None:
        if self._shift is None:
            self._shift = features.mean(dim=0)
        shifted = features - self._shift
        self._sum += shifted.double().sum(dim=0)
        if self._dtype is torch.float32:
            array = shifted.numpy()
            self._outer += torch.from_numpy(array.T @ array)  # numpy sees the symmetry: half the work
        else:
            half = shifted.to(self._dtype)
            self._outer += (half.T @ half).float()
        self._n += len(features)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [F] and covariance [F, F]."""
        assert self._shift is not None
        mean = (self._sum / self._n).float()
        covariance = self._outer.div_(self._n).sub_(torch.outer(mean, mean))
        return mean + self._shift, covariance


class Sensitivity:
    """Fisher information of each block (one layer's head): outer products of gradients [n, F]."""

    def __init__(self, n_blocks: int, dim: int) -> None:
        self._outer = torch.zeros(n_blocks, dim, dim)

    def add(self, gradients: torch.Tensor) -> None:
        blocks, dim = self._outer.shape[:2]
        parts = gradients.view(-1, blocks, dim).transpose(0, 1)
        self._outer += parts.transpose(1, 2) @ parts

    def weights(self, shrink_ratio: float, floor_ratio: float, unit: float) -> torch.Tensor:
        """The symmetric roots [blocks, dim, dim] of the information over `unit`, shrunk towards each block's mean and
        with a floor: what few gradients did not show is not free to be lost."""
        dim = self._outer.shape[1]
        trace = self._outer.diagonal(dim1=1, dim2=2).mean(dim=1)
        even = shrink_ratio * trace + floor_ratio * trace.mean()
        shrunk = (1 - shrink_ratio) * self._outer + even[:, None, None] * torch.eye(dim)
        values, vectors = torch.linalg.eigh((shrunk / unit).double())
        root: torch.Tensor = (vectors * values.clamp_min(0).sqrt()[:, None, :]) @ vectors.mT
        return root.float()

    @property
    def mean(self) -> float:
        """Of the diagonal over all features."""
        return float(self._outer.diagonal(dim1=1, dim2=2).mean())


def weigh_both_sides(covariance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The covariance of weighted features: W C W, blockwise."""
    blocks, dim, _ = weights.shape
    n = blocks * dim
    half = torch.bmm(weights, covariance.view(blocks, dim, n)).view(n, n)
    return torch.bmm(weights, half.T.contiguous().view(blocks, dim, n)).view(n, n)


def leading_eigenvectors(covariance: torch.Tensor, rank: int, generator: torch.Generator) -> torch.Tensor:
    """Orthonormal [F, rank], largest variance first, by subspace iteration (Halko, Martinsson, Tropp 2011)."""
    n = len(covariance)
    width = min(n, rank + _OVERSAMPLING)
    scaled = covariance / covariance.diagonal().mean()
    dtype = fast_dtype()
    rough = scaled.to(dtype)
    q = torch.randn(n, width, generator=generator)
    for _ in range(2):
        q = torch.linalg.qr((rough @ q.to(dtype)).float())[0]
    _, vectors = torch.linalg.eigh(q.T @ (scaled @ q))
    leading: torch.Tensor = (q @ vectors.flip(1))[:, :rank]
    return leading.contiguous()
