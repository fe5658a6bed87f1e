"""What a node declares of its codecs, and the guard: nothing that loses more than the policy accepts, nothing
unmeasured that might."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import PayloadCorrupt
from mesh.kv.codec_profile import CodecProfile, allowed
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import Artifact, Probed, Quality, make_artifact
from mesh.kv.kvtc.codec import KvtcCodec
from mesh.kv.profiling import known, profiles_of, usual_slab
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact, artifact_parts


def quality(loss: float, ratio: float, text: str = "x", divergence: float | None = None) -> Quality:
    return Quality(
        text=text,
        loss_ratio=loss,
        loss_stderr_ratio=0.0,
        divergence_ratio=loss if divergence is None else divergence,
        coded_ratio=ratio,
        windows=3,
    )


def probed(*codecs: Probed) -> Artifact:
    return make_artifact(**artifact_parts(), probed=codecs)[0]  # type: ignore[arg-type]


def names(a: Artifact | None) -> set[str]:
    return {name for name, _, _ in known(a)}


def test_four_bits_need_a_probe() -> None:
    assert names(None) == {"f16", "q8_0"}
    assert "q4" not in names(artifact())
    a = probed(Probed(codec="q4", quality=(quality(0.03, 3.2),)))
    assert "q4" in names(a)
    assert "q4" not in {p.codec for p in allowed(profile(*row) for row in known(a))}


def profile(codec: str, ratio: float, loss: float) -> CodecProfile:
    return CodecProfile(codec=codec, ratio=ratio, loss_ratio=loss, encode_tokens_per_s=1e3, decode_tokens_per_s=1e3)


def test_the_worst_kind_of_text_counts() -> None:
    a = probed(Probed(codec="q4", quality=(quality(0.001, 3.6, "prose"), quality(0.02, 3.1, "code"))))
    [(_, ratio, loss)] = [row for row in known(a) if row[0] == "q4"]
    assert (ratio, loss) == (3.1, 0.02)
    a = probed(Probed(codec="q4", quality=(quality(-0.002, 3.6, divergence=0.015),)))
    assert [loss for name, _, loss in known(a) if name == "q4"] == [0.015]  # a lucky text does not hide a divergence


def test_a_setting_without_a_measurement_is_never_offered() -> None:
    parts = artifact_parts()
    (setting,) = parts["settings"]  # type: ignore[misc]
    a, _ = make_artifact(**(parts | {"settings": (replace(setting, quality=()),)}))  # type: ignore[arg-type]
    assert names(a) == {"f16", "q8_0"}


@given(
    losses=st.lists(st.floats(0, 0.1) | st.just(math.nan) | st.just(math.inf), max_size=12),
    limit=st.floats(0, 0.1),
)
def test_nothing_lossier_than_accepted_is_ever_allowed(losses: list[float], limit: float) -> None:
    given_ = [profile(f"c{i}", float(i), loss) for i, loss in enumerate(losses)]
    found = allowed(given_, limit)
    assert all(p.loss_ratio <= limit for p in found)
    assert [p.ratio for p in found] == sorted((p.ratio for p in found), reverse=True)
    assert len(found) == sum(loss <= limit for loss in losses)


def test_one_percent_is_accepted_unless_told_otherwise() -> None:
    assert [p.codec for p in allowed([profile("a", 9.0, 0.0101), profile("b", 5.0, 0.01)])] == ["b"]


def test_profiles_have_measured_speeds() -> None:
    a = artifact()
    shelf.put(a)
    try:
        found = profiles_of(a, GEOMETRY, n_tokens=16)
    finally:
        shelf.remove(a)
    assert {p.codec for p in found} == {"f16", "q8_0", f"kvtc:{a.digest[:16]}:fine"}
    assert all(math.isfinite(p.encode_tokens_per_s) and p.encode_tokens_per_s > 0 for p in found)
    assert all(math.isfinite(p.decode_tokens_per_s) and p.decode_tokens_per_s > 0 for p in found)
    assert {p.codec for p in profiles_of(None, GEOMETRY, n_tokens=16)} == {"f16", "q8_0"}


def test_speeds_are_measured_on_kv_as_the_artifact_expects_it() -> None:
    a = artifact()
    slab = usual_slab(a, 64)
    slab.check(GEOMETRY)
    codec = KvtcCodec(a, a.settings[0], codec_named("q8_0"))
    data, stats = codec.encode_with_stats(slab, exact_from=slab.stop)
    assert stats.n_exact + stats.n_excess == 0
    assert len(data) < codec_named("q8_0").encoded_bytes(GEOMETRY, 64, KvDtype.F16) / 4


@pytest.mark.parametrize("change", [{"loss_ratio": math.inf}, {"divergence_ratio": math.nan}, {"coded_ratio": 0.0}])
def test_a_probe_with_impossible_figures_is_refused(change: dict[str, float]) -> None:
    bad = Probed(codec="q4", quality=(replace(quality(0.01, 3.0), **change),))  # type: ignore[arg-type]
    with pytest.raises((PayloadCorrupt, ValueError)):  # JSON has no infinity
        probed(bad)
