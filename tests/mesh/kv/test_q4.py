"""Four bits an element: how far it errs, along which axis it groups, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codecs import codec_named
from mesh.kv.elements import to_f32
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab
from tests.mesh.kv.test_codecs import geometry, round_trip, slab


@settings(max_examples=25, deadline=None)
@given(n_tokens=st.integers(1, 70), dtype=st.sampled_from(list(KvDtype)), seed=st.integers(0, 99))
def test_errs_by_half_a_step_of_its_group_at_most(n_tokens: int, dtype: KvDtype, seed: int) -> None:
    g = geometry()
    s = slab(g, n_tokens, dtype, seed=seed)
    out = round_trip("q4", s, g, KvDtype.F32)
    k, v = to_f32(s.k, dtype), to_f32(s.v, dtype)
    for at in range(0, n_tokens, 32):
        group = k[:, at : at + 32]
        step = np.ptp(group, axis=1, keepdims=True) / 15
        assert (np.abs(out.k[:, at : at + 32] - group) <= step / 2 + 0.01).all()
    groups = v.reshape(*v.shape[:3], -1, 32)
    step = np.ptp(groups, axis=-1, keepdims=True) / 15
    assert (np.abs(out.v.reshape(groups.shape) - groups) <= step / 2 + 0.01).all()


def test_a_loud_channel_of_k_does_not_drown_the_others() -> None:
    g = geometry()
    s = slab(g, 64, KvDtype.F32, scale=1.0)
    k = s.k.copy()
    k[..., 7] += 1000.0
    out = round_trip("q4", KvSlab(start=0, dtype=KvDtype.F32, k=k, v=s.v), g)
    rest = np.arange(64) != 7
    assert np.abs(out.k - k)[..., rest].max() < 0.3


def test_constant_groups_are_exact() -> None:
    g = geometry()
    s = slab(g, 5, KvDtype.F16)
    k = np.full_like(s.k, 1.5)
    out = round_trip("q4", KvSlab(start=0, dtype=KvDtype.F16, k=k, v=k), g)
    assert (out.k == 1.5).all()
    assert (out.v == 1.5).all()


def test_a_full_group_costs_five_bits_an_element() -> None:
    g = geometry()
    assert codec_named("q4").encoded_bytes(g, 64, KvDtype.F16) * 8 == 64 * g.f16_bytes_per_token // 2 * 5


def test_head_dims_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(KvIncompatible):
        codec_named("q4").check(geometry(head_dim=48))


def test_bytes_whose_values_overflow_the_pool_are_refused() -> None:
    g, codec = geometry(), codec_named("q4")
    data = bytearray(codec.encode(slab(g, 1, KvDtype.F16)))
    data[:2] = np.float16(65504).tobytes()
    n_groups = g.n_layers * g.n_kv_heads * g.head_dim
    data[2 * n_groups : 2 * n_groups + 2] = np.float16(65504).tobytes()
    data[4 * n_groups] |= 0x0F
    with pytest.raises(PayloadCorrupt):
        codec.decode(bytes(data), start=0, n_tokens=1, geometry=g, dtype=KvDtype.F16)
