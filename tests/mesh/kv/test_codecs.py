"""Codecs: exact where they promise it, close where not, and strict about what they are given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codecs import CODEC_NAMES, codec_named
from mesh.kv.elements import bf16_bits_to_f32, convert, f32_to_bf16_bits, from_f32, to_f32
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab


def geometry(n_layers: int = 3, n_kv_heads: int = 2, head_dim: int = 64) -> KvGeometry:
    return KvGeometry(
        architecture="llama",
        n_layers=n_layers,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rope_base=1e5,
        rope_scaling="none",
        tokenizer_hash="00",
    )


def slab(g: KvGeometry, n_tokens: int, dtype: KvDtype, *, start: int = 5, scale: float = 3.0, seed: int = 0) -> KvSlab:
    shape = (2, g.n_layers, n_tokens, g.n_kv_heads, g.head_dim)
    k, v = from_f32((scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32), dtype)
    return KvSlab(start=start, dtype=dtype, k=k, v=v)


def round_trip(name: str, s: KvSlab, g: KvGeometry, dtype: KvDtype | None = None) -> KvSlab:
    codec = codec_named(name)
    data = codec.encode(s)
    size = codec.encoded_bytes(g, s.n_tokens, s.dtype)
    assert len(data) == size if codec.fixed_size else 0 < len(data) <= size
    out = codec.decode(data, start=s.start, n_tokens=s.n_tokens, geometry=g, dtype=dtype or s.dtype)
    out.check(g)
    assert out.start == s.start
    return out


def equal(a: KvSlab, b: KvSlab) -> bool:
    return a.dtype is b.dtype and a.k.tobytes() == b.k.tobytes() and a.v.tobytes() == b.v.tobytes()


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(list(KvDtype)),
    n_layers=st.integers(1, 3),
    n_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 32, 80]),
    n_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_raw_is_lossless(dtype: KvDtype, n_layers: int, n_heads: int, head_dim: int, n_tokens: int, seed: int) -> None:
    g = geometry(n_layers, n_heads, head_dim)
    s = slab(g, n_tokens, dtype, seed=seed)
    assert equal(round_trip("raw", s, g), s)


def test_f16_is_bit_exact_for_f16() -> None:
    g = geometry()
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    k = np.resize(finite, (3, 200, 2, 64))  # subnormals and both zeros are among them
    s = KvSlab(start=0, dtype=KvDtype.F16, k=k, v=k[:, ::-1].copy())
    assert equal(round_trip("f16", s, g), s)


@pytest.mark.parametrize("dtype", [KvDtype.F32, KvDtype.BF16])
def test_f16_rounds_the_others_to_nearest(dtype: KvDtype) -> None:
    g = geometry()
    s = slab(g, 17, dtype)
    out = round_trip("f16", s, g, KvDtype.F16)
    assert np.array_equal(out.k, to_f32(s.k, dtype).astype(np.float16))
    back = round_trip("f16", s, g)
    assert np.abs(to_f32(back.k, dtype) - to_f32(s.k, dtype)).max() < 0.02


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_q8_0_errs_by_half_a_step_at_most(dtype: KvDtype) -> None:
    g = geometry(head_dim=96)
    s = slab(g, 33, dtype)
    out = round_trip("q8_0", s, g, KvDtype.F32)
    for got, want in ((out.k, to_f32(s.k, dtype)), (out.v, to_f32(s.v, dtype))):
        blocks = want.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / 127
        # Half a step, and what rounding the scale to f16 adds at the block's ends.
        assert (np.abs(got.reshape(-1, 32) - blocks) <= step * (0.5 + 127 * 2**-11)).all()


def test_q8_0_is_the_layout_of_ggml() -> None:
    k = np.zeros((1, 1, 1, 32), dtype=np.float32)
    k[0, 0, 0, :3] = (127.0, -64.0, 1.0)
    data = codec_named("q8_0").encode(KvSlab(start=0, dtype=KvDtype.F32, k=k, v=-k))
    assert len(data) == 2 * 34
    assert data[:2] == np.float16(1.0).tobytes()
    assert np.frombuffer(data[2:34], dtype=np.int8)[:4].tolist() == [127, -64, 1, 0]
    assert np.frombuffer(data[36:], dtype=np.int8)[:4].tolist() == [-127, 64, -1, 0]


@settings(max_examples=50, deadline=None)
@given(
    values=hnp.arrays(np.float32, (1, 2, 1, 32), elements=st.floats(-65504, 65504, width=32)),
    exponent=st.integers(-40, 0),
)
def test_q8_0_takes_any_finite_values(values: np.ndarray, exponent: int) -> None:
    g = geometry(1, 1, 32)
    k = values * np.float32(2.0**exponent)
    s = KvSlab(start=0, dtype=KvDtype.F32, k=k, v=k)
    out = round_trip("q8_0", s, g)
    largest = np.abs(k).max(axis=-1, keepdims=True)
    assert (np.abs(out.k - k) <= largest / 127 * 0.7 + 2**-17).all()  # tiny scales are subnormal


def test_q8_0_needs_whole_blocks() -> None:
    g = geometry(head_dim=48)
    with pytest.raises(KvIncompatible, match="multiple of 32"):
        codec_named("q8_0").check(g)
    with pytest.raises(KvIncompatible):
        codec_named("q8_0").encoded_bytes(g, 4, KvDtype.F16)


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("change", [-1, 1, 17, None])
def test_a_wrong_size_is_refused(name: str, change: int | None) -> None:
    g, codec = geometry(), codec_named(name)
    data = codec.encode(slab(g, 4, KvDtype.F16))
    wrong = b"" if change is None else data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(PayloadCorrupt):
        codec.decode(wrong, start=0, n_tokens=4, geometry=g, dtype=KvDtype.F16)
    for n_tokens in (0, 3, 5):
        with pytest.raises(PayloadCorrupt):
            codec.decode(data, start=0, n_tokens=n_tokens, geometry=g, dtype=KvDtype.F16)


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("dtype", list(KvDtype))
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused_on_both_sides(name: str, dtype: KvDtype, bad: float) -> None:
    g, codec = geometry(), codec_named(name)
    s = slab(g, 2, dtype)
    poison = f32_to_bf16_bits(np.float32([bad]))[0] if dtype is KvDtype.BF16 else bad
    v = s.v.copy()
    v[1, 1, 0, 7] = poison
    with pytest.raises(KvIncompatible):
        codec.encode(KvSlab(start=0, dtype=dtype, k=s.k, v=v))
    if not codec.fixed_size:
        return  # what is inside goes through the codec that it wraps
    data = bytearray(codec.encode(s))
    if name == "q8_0":
        data[-34:-32] = np.float16(bad).tobytes()
    elif name == "q4":
        data[:2] = np.float16(bad).tobytes()
    elif name == "f16":
        data[-2:] = np.float16(bad).tobytes()
    else:
        data[-dtype.storage.itemsize :] = np.asarray(poison, dtype=dtype.storage).tobytes()
    with pytest.raises(PayloadCorrupt):
        codec.decode(bytes(data), start=0, n_tokens=2, geometry=g, dtype=dtype)


@pytest.mark.parametrize("name", ["f16", "q8_0", "q4", "q4+zstd"])
def test_values_that_the_codec_cannot_hold_are_refused(name: str) -> None:
    g = geometry()
    s = slab(g, 2, KvDtype.F32, scale=1e9)
    with pytest.raises(KvIncompatible):
        codec_named(name).encode(s)
    assert equal(round_trip("raw", s, g), s)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(KvIncompatible) as caught:
        codec_named("q4_0")
    assert caught.value.details["field"] == "codec"


def test_bf16_is_rounded_to_nearest_even() -> None:
    one_ulp = 2.0**-7  # of bf16 at 1.0
    cases = [
        (1.0, 1.0),
        (1.0 + one_ulp / 2, 1.0),  # a tie goes to even
        (1.0 + 3 * one_ulp / 2, 1.0 + 2 * one_ulp),
        (1.0 + one_ulp * 0.51, 1.0 + one_ulp),
        (-1.0 - one_ulp * 0.51, -1.0 - one_ulp),
        (3.4e38, np.inf),
        (0.0, 0.0),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
    ]
    got = bf16_bits_to_f32(f32_to_bf16_bits(np.float32([v for v, _ in cases])))
    assert got.tolist() == [w for _, w in cases]
    assert np.signbit(bf16_bits_to_f32(f32_to_bf16_bits(np.float32([-0.0])))).all()
    nans = np.uint32([0x7FC00000, 0x7F800001, 0xFFFFFFFF]).view(np.float32)
    assert np.isnan(bf16_bits_to_f32(f32_to_bf16_bits(nans))).all()


def test_all_bf16_values_survive_f32() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = bf16_bits_to_f32(bits)
    numbers = ~np.isnan(values)
    assert np.array_equal(f32_to_bf16_bits(values)[numbers], bits[numbers])


def test_convert_returns_the_same_slab_for_the_same_type() -> None:
    s = slab(geometry(), 2, KvDtype.BF16)
    assert convert(s, KvDtype.BF16) is s
    assert convert(s, KvDtype.F32).k.dtype == np.float32
