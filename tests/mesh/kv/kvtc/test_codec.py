"""kvtc chunks: small where KV is as calibrated, bounded error where it is not, strict about foreign bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codecs import codec_named
from mesh.kv.elements import to_f32
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import Artifact
from mesh.kv.kvtc.codec import KvtcCodec
from mesh.kv.kvtc.transform import NumpyMaps, features_of
from mesh.kv.slab import KvSlab
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact, slab
from tests.mesh.kv.test_codecs import geometry as other_geometry


@pytest.fixture(scope="module")
def made() -> Iterator[Artifact]:
    a = artifact()
    shelf.put(a)
    yield a
    shelf.remove(a)


@pytest.fixture(scope="module")
def codec(made: Artifact) -> KvtcCodec:
    return KvtcCodec(made, made.settings[0], codec_named("q8_0"))


def back(codec: KvtcCodec, data: bytes, s: KvSlab, dtype: KvDtype = KvDtype.F32) -> KvSlab:
    out = codec.decode(data, start=s.start, n_tokens=s.n_tokens, geometry=GEOMETRY, dtype=dtype)
    out.check(GEOMETRY)
    return out


def errors(made: Artifact, a: KvSlab, b: KvSlab) -> np.ndarray:
    """Weighted squared error of each token."""
    maps = NumpyMaps(made)
    weighted = maps.weigh(features_of(a, GEOMETRY) - features_of(b, GEOMETRY))
    return np.square(weighted).sum(axis=(0, 2))


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_usual_kv_is_small_and_near(made: Artifact, codec: KvtcCodec, dtype: KvDtype) -> None:
    s = slab(200, dtype=dtype)
    data = codec.encode(s)
    assert 200 * GEOMETRY.f16_bytes_per_token / len(data) > 15
    assert errors(made, s, back(codec, data, s)).max() <= made.settings[0].bound * 1.02


@settings(max_examples=20, deadline=None)
@given(n_tokens=st.integers(1, 40), start=st.integers(0, 3000), seed=st.integers(0, 99))
def test_decoding_gives_the_slab_that_was_coded(n_tokens: int, start: int, seed: int) -> None:
    a = artifact()
    codec = KvtcCodec(a, a.settings[0], codec_named("q8_0"))
    s = slab(n_tokens, start=start, seed=seed)
    data = codec.encode(s)
    assert len(data) <= codec.encoded_bytes(GEOMETRY, n_tokens, KvDtype.F16)
    out = back(codec, data, s, KvDtype.F16)
    assert out.start == start
    assert errors(a, s, out).max() <= a.settings[0].bound * 1.05


def test_kv_that_calibration_never_saw_keeps_the_bound_and_costs_more(made: Artifact, codec: KvtcCodec) -> None:
    s = slab(64, usual=False)
    data, stats = codec.encode_with_stats(s, exact_from=s.stop)
    assert stats.n_excess > 50
    assert errors(made, s, back(codec, data, s)).max() <= made.settings[0].bound * 1.02
    assert len(data) < codec_named("q8_0").encoded_bytes(GEOMETRY, 64, KvDtype.F16)
    assert len(data) > 2 * len(codec.encode(slab(64)))


def test_a_token_far_from_everything_goes_in_q8_0(codec: KvtcCodec) -> None:
    s = slab(4, dtype=KvDtype.F32)
    k = s.k.copy()
    k[:, 2] *= 1e6
    loud = KvSlab(start=s.start, dtype=s.dtype, k=k, v=s.v)
    data, stats = codec.encode_with_stats(loud, exact_from=loud.stop)
    assert stats.n_exact == 1
    assert np.abs(back(codec, data, loud).k[:, 2] - k[:, 2]).max() < 0.01 * np.abs(k[:, 2]).max()


def test_sinks_and_window_are_q8_0(codec: KvtcCodec) -> None:
    s = slab(20, start=0)
    data, stats = codec.encode_with_stats(s, exact_from=15)
    assert stats.n_exact == 4 + 5
    plain = codec_named("q8_0")
    want = plain.decode(plain.encode(s), start=0, n_tokens=20, geometry=GEOMETRY, dtype=KvDtype.F16)
    got = back(codec, data, s, KvDtype.F16)
    for at in (0, 3, 15, 19):
        assert np.array_equal(got.k[:, at], want.k[:, at])
        assert np.array_equal(got.v[:, at], want.v[:, at])


def test_rope_is_undone_and_redone_at_the_true_position(made: Artifact, codec: KvtcCodec) -> None:
    near, far = slab(50, start=4), slab(50, start=100_000)
    assert not np.allclose(to_f32(near.k, near.dtype), to_f32(far.k, far.dtype), atol=0.1)
    assert abs(len(codec.encode(near)) - len(codec.encode(far))) < 60


def test_rope_round_trip_is_exact_to_1e_5(made: Artifact) -> None:
    from mesh.kv.kvtc.transform import slab_of

    s = slab(30, start=5000, dtype=KvDtype.F32)
    again = slab_of(features_of(s, GEOMETRY), GEOMETRY, s.start, KvDtype.F32)
    assert np.abs(again.k - s.k).max() < 1e-5
    assert np.array_equal(again.v, s.v)


def test_is_found_by_name(made: Artifact, codec: KvtcCodec) -> None:
    s = slab(8)
    found = codec_named(codec.name)
    assert found.name == codec.name == f"kvtc:{made.digest[:16]}:fine"
    assert found.encode(s) == codec.encode(s)


@pytest.mark.parametrize(
    "name", ["kvtc:0123456789abcdef:fine", "kvtc:", "kvtc::", "kvtc:{digest}:none", "kvtc:{digest}"]
)
def test_a_basis_or_setting_that_is_not_here_is_refused(made: Artifact, name: str) -> None:
    with pytest.raises(KvIncompatible) as caught:
        codec_named(name.format(digest=made.digest[:16]))
    assert caught.value.details["field"] == "codec"


def test_another_model_is_refused(codec: KvtcCodec) -> None:
    with pytest.raises(KvIncompatible):
        codec.check(other_geometry())


def test_a_basis_of_another_calibration_is_another_codec(made: Artifact, codec: KvtcCodec) -> None:
    other = artifact(step=0.06)
    assert other.digest != made.digest
    assert KvtcCodec(other, other.settings[0], codec_named("q8_0")).name != codec.name


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(codec: KvtcCodec, bad: float) -> None:
    s = slab(5)
    v = s.v.copy()
    v[1, 2, 0, 3] = bad
    with pytest.raises(KvIncompatible):
        codec.encode(KvSlab(start=s.start, dtype=s.dtype, k=s.k, v=v))


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 100_000), bit=st.integers(0, 7), usual=st.booleans())
def test_a_flipped_bit_is_refused_or_gives_finite_values(at: int, bit: int, usual: bool) -> None:
    a = artifact()
    codec = KvtcCodec(a, a.settings[0], codec_named("q8_0"))
    s = slab(8, start=0, usual=usual)
    data = bytearray(codec.encode(s))
    data[at % len(data)] ^= 1 << bit
    try:
        out = back(codec, bytes(data), s, KvDtype.F16)
    except PayloadCorrupt:
        return
    assert np.isfinite(out.k).all()
    assert np.isfinite(out.v).all()


@pytest.mark.parametrize("cut", [1, 2, 7, 40])
def test_wrong_sizes_are_refused(codec: KvtcCodec, cut: int) -> None:
    s = slab(8, start=0)
    data = codec.encode(s)
    for wrong in (data[:-cut], data + bytes(cut), data[:cut], b""):
        with pytest.raises(PayloadCorrupt):
            back(codec, wrong, s)
    for n_tokens in (0, 7, 9):
        with pytest.raises(PayloadCorrupt):
            codec.decode(data, start=0, n_tokens=n_tokens, geometry=GEOMETRY, dtype=KvDtype.F16)
