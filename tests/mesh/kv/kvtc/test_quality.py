"""The guard: nothing that loses more than the policy accepts, nothing unmeasured that might."""

from __future__ import annotations

from dataclasses import replace

from mesh.kv.kvtc.artifact import make_artifact
from mesh.kv.kvtc.quality import Candidate, candidates, smallest_within
from tests.mesh.kv.kvtc.synthetic import artifact, artifact_parts

RATIOS = {"f16": 1.0, "q8_0": 1.88, "q4": 3.2, "f16+zstd": 1.2, "q4+zstd": 3.4}


def names(found: tuple[Candidate, ...]) -> set[str]:
    return {c.codec for c in found}


def test_four_bits_need_a_probe() -> None:
    assert names(candidates(None, probed={}, ratios=RATIOS)) == {"f16", "q8_0", "f16+zstd"}
    probe = {"q4": Candidate(codec="q4", ratio=3.2, loss_ratio=0.03)}
    found = candidates(None, probed=probe, ratios=RATIOS)
    assert "q4" in names(found)
    best = smallest_within(found, 0.01)
    assert best is not None
    assert best.codec == "q8_0"


def test_the_smallest_within_the_accepted_loss_is_chosen() -> None:
    a = artifact()
    found = candidates(a, probed={}, ratios=RATIOS)
    best = smallest_within(found)
    assert best is not None
    assert best.codec == f"kvtc:{a.digest[:16]}:fine"
    strict = smallest_within(found, 0.004)  # its divergence is 0.005
    assert strict is not None
    assert strict.codec == "q8_0"
    assert smallest_within(found, -1.0) is None


def test_a_setting_without_a_measurement_is_never_chosen() -> None:
    parts = artifact_parts()
    (setting,) = parts["settings"]  # type: ignore[misc]
    a, _ = make_artifact(**(parts | {"settings": (replace(setting, quality=()),)}))  # type: ignore[arg-type]
    assert names(candidates(a, probed={}, ratios=RATIOS)) == {"f16", "q8_0", "f16+zstd"}
