"""A small model's KV that has structure to exploit, and an artifact made of it without an engine."""

from __future__ import annotations

import functools

import numpy as np

from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc.artifact import Artifact, Quality, Setting, make_artifact, n_features
from mesh.kv.kvtc.quantise import context_of, laplace_counts, mean_level
from mesh.kv.kvtc.rans import normalise
from mesh.kv.kvtc.transform import slab_of
from mesh.kv.slab import KvSlab

GEOMETRY = KvGeometry(
    architecture="llama",
    n_layers=3,
    n_kv_heads=2,
    head_dim=32,
    rope_base=1e4,
    rope_scaling="none",
    tokenizer_hash="00",
)
RANK = 40
_F = n_features(GEOMETRY)
_TRUE_RANK = 24


def features(n_tokens: int, *, seed: int = 0, noise: float = 0.01, usual: bool = True) -> np.ndarray:
    """f32 [2, n_tokens, F] of a low-rank source; not `usual`: of another one that the basis does not know."""
    mix = np.random.default_rng(1 if usual else 99).standard_normal((2, _TRUE_RANK, _F)) / np.sqrt(_TRUE_RANK)
    mix *= 0.8 ** np.arange(_TRUE_RANK)[None, :, None]
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((2, n_tokens, _TRUE_RANK)) @ mix + 0.3
    return (out + noise * rng.standard_normal(out.shape)).astype(np.float32)


def slab(n_tokens: int, *, start: int = 100, dtype: KvDtype = KvDtype.F16, **how: object) -> KvSlab:
    return slab_of(features(n_tokens, **how), GEOMETRY, start, dtype)  # type: ignore[arg-type]


def artifact_parts(*, step: float = 0.05, bound: float = 0.5) -> dict[str, object]:
    x = features(600, seed=5)
    mean = x.mean(axis=1)
    rng = np.random.default_rng(2)
    blocks, dim = GEOMETRY.n_layers * GEOMETRY.n_kv_heads, GEOMETRY.head_dim
    half = rng.standard_normal((2, blocks, dim, dim)) * 0.05
    weights = (np.eye(dim) + half + half.swapaxes(-1, -2)).astype(np.float16).astype(np.float32)
    basis = np.empty((2, _F, RANK), dtype=np.float32)
    spread = np.empty((2, RANK))
    for s in range(2):
        centred = (x[s] - mean[s]).reshape(-1, blocks, dim).transpose(1, 0, 2)
        weighted = np.matmul(centred, weights[s]).transpose(1, 0, 2).reshape(len(x[s]), -1)
        _, sizes, rows = np.linalg.svd(weighted, full_matrices=False)
        basis[s] = rows[:RANK].T
        spread[s] = sizes[:RANK] / np.sqrt(len(weighted))
    steps = np.where(spread > step / 4, step, 0.0).astype(np.float32)
    return {
        "geometry": GEOMETRY,
        "weights_lineage": "synthetic",
        "mean": mean,
        "weights": weights,
        "basis": (basis[0], basis[1]),
        "predict": 0.1 * rng.standard_normal((RANK, RANK // 2)).astype(np.float32),
        "residual": np.ones((2, blocks), dtype=np.float32),
        "frequencies": normalise(laplace_counts()),
        "settings": (
            Setting(
                name="fine",
                steps=steps,
                restore=steps,
                contexts=context_of(mean_level(0.75 * spread, step)).astype(np.uint8),
                bound=bound,
                quality=(
                    Quality(
                        text="x",
                        loss_ratio=0.004,
                        loss_stderr_ratio=0.001,
                        divergence_ratio=0.005,
                        coded_ratio=20.0,
                        windows=3,
                    ),
                ),
            ),
        ),
        "notes": "synthetic",
    }


@functools.cache
def artifact(**how: float) -> Artifact:
    return make_artifact(**artifact_parts(**how))[0]  # type: ignore[arg-type]
