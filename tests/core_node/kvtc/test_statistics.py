"""What calibration gathers, against the same in plain numpy."""

from __future__ import annotations

import numpy as np
import torch

from core_node.kvtc.statistics import Covariance, Sensitivity, leading_eigenvectors, weigh_both_sides


def test_covariance_is_that_of_all_windows_together() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((400, 6)) @ rng.standard_normal((6, 6)) + 50.0).astype(np.float32)
    gathered = Covariance(6)
    for part in np.array_split(x, 5):
        gathered.add(torch.from_numpy(part))
    mean, covariance = gathered.result()
    assert np.allclose(mean.numpy(), x.mean(axis=0), atol=1e-3)
    want = np.cov(x.T, bias=True)
    assert np.abs(covariance.numpy() - want).max() < 0.02 * np.abs(want).max()


def test_weights_are_roots_of_the_information() -> None:
    rng = np.random.default_rng(1)
    gradients = torch.from_numpy(rng.standard_normal((200, 8)).astype(np.float32))
    gathered = Sensitivity(2, 4)
    gathered.add(gradients)
    roots = gathered.weights(0.0, 0.0, 1.0)
    for block in range(2):
        part = gradients[:, block * 4 : block * 4 + 4]
        assert torch.allclose(roots[block] @ roots[block], part.T @ part, rtol=1e-3, atol=1e-2)
        assert torch.allclose(roots[block], roots[block].T, atol=1e-5)


def test_a_block_that_no_gradient_reached_keeps_a_floor() -> None:
    gathered = Sensitivity(2, 4)
    gradients = torch.zeros(10, 8)
    gradients[:, :4] = 1.0
    gathered.add(gradients)
    roots = gathered.weights(0.1, 0.02, 1.0)
    assert (torch.linalg.eigvalsh(roots[1]) > 0.1).all()


def test_weighing_a_covariance_is_blockwise() -> None:
    rng = np.random.default_rng(2)
    half = rng.standard_normal((8, 8)).astype(np.float32)
    covariance = torch.from_numpy(half @ half.T)
    parts = rng.standard_normal((2, 4, 4)).astype(np.float32)
    weights = torch.from_numpy(parts + parts.swapaxes(1, 2))
    whole = torch.block_diag(*weights)
    assert torch.allclose(weigh_both_sides(covariance, weights), whole @ covariance @ whole, rtol=1e-4, atol=1e-3)


def test_leading_eigenvectors_span_the_largest_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(200, 200, generator=generator))[0]
    values = 0.9 ** torch.arange(200.0) + 1e-4
    vectors = leading_eigenvectors((q * values) @ q.T, 16, generator)
    assert torch.allclose(vectors.T @ vectors, torch.eye(16), atol=1e-4)
    captured = torch.linalg.vector_norm(q[:, :16].T @ vectors)
    assert captured**2 > 15.9
