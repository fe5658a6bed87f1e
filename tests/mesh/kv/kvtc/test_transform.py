"""Features carry K without its rotation, in the pairs of each architecture."""

from __future__ import annotations

import numpy as np
import pytest

from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc.transform import features_of, slab_of
from mesh.kv.slab import KvSlab
from mesh.model.rope_scaling import inverse_frequencies

HEAD_DIM, N_TOKENS, START = 8, 5, 11


def geometry(architecture: str) -> KvGeometry:
    return KvGeometry(
        architecture=architecture, n_layers=2, n_kv_heads=3, head_dim=HEAD_DIM, rope_base=1e4, rope_scaling="none",
        tokenizer_hash="00",
    )  # fmt: skip


def pairs_of(architecture: str) -> list[tuple[int, int]]:
    half = HEAD_DIM // 2
    if architecture == "llama":
        return [(2 * i, 2 * i + 1) for i in range(half)]
    return [(i, i + half) for i in range(half)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_equal_keys_at_unlike_positions_have_equal_features(architecture: str) -> None:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((2, 1, 3, HEAD_DIM))
    k = np.empty((2, N_TOKENS, 3, HEAD_DIM))
    for t in range(N_TOKENS):
        for (a, b), frequency in zip(pairs_of(architecture), inverse_frequencies(HEAD_DIM, 1e4, "none"), strict=True):
            c, s = np.cos((START + t) * frequency), np.sin((START + t) * frequency)
            k[:, t, :, a] = plain[:, 0, :, a] * c - plain[:, 0, :, b] * s
            k[:, t, :, b] = plain[:, 0, :, a] * s + plain[:, 0, :, b] * c
    slab = KvSlab(start=START, dtype=KvDtype.F32, k=k.astype(np.float32), v=np.zeros_like(k, np.float32))
    features = features_of(slab, geometry(architecture))
    want = plain.transpose(1, 0, 2, 3).reshape(1, -1)
    np.testing.assert_allclose(features[0], np.repeat(want, N_TOKENS, axis=0), atol=1e-5)
    back = slab_of(features, geometry(architecture), START, KvDtype.F32)
    np.testing.assert_allclose(back.k, slab.k, atol=1e-5)


def test_an_architecture_whose_pairs_are_not_known_is_refused() -> None:
    ones = np.ones((2, 1, 3, HEAD_DIM), np.float32)
    slab = KvSlab(start=0, dtype=KvDtype.F32, k=ones, v=ones)
    with pytest.raises(InvalidRequest, match="'rwkv' is not supported"):
        features_of(slab, geometry("rwkv"))
