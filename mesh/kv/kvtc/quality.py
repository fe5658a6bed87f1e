"""Which codec may be used: only what was measured on this model, and loses no more than the policy accepts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh.kv.kvtc.artifact import Artifact
from mesh.kv.kvtc.codec import PREFIX

DEFAULT_MAX_LOSS_RATIO = 0.01
_UNPROBED_LOSS_RATIO = {"raw": 0.0, "f16": 0.0, "q8_0": 0.001}
"""What may be used without having been measured on the model: rounding that no model is known to feel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A codec with what is known of it: f16 bytes over its bytes, and the loss to reckon with (0.01 is 1 %)."""

    codec: str
    ratio: float
    loss_ratio: float


def candidates(
    artifact: Artifact | None, *, probed: Mapping[str, Candidate], ratios: Mapping[str, float]
) -> tuple[Candidate, ...]:
    """All codecs that may be considered for a model. `probed`: measured losses of codecs such as q4 on this model;
    `ratios`: what each plain codec saves. A setting of the artifact without a measurement is left out."""
    found = [
        probed.get(name) or Candidate(codec=name, ratio=ratio, loss_ratio=_UNPROBED_LOSS_RATIO[_plain(name)])
        for name, ratio in ratios.items()
        if name in probed or _plain(name) in _UNPROBED_LOSS_RATIO
    ]
    if artifact is not None:
        found += [
            Candidate(
                codec=f"{PREFIX}{artifact.digest[:16]}:{s.name}",
                ratio=min(q.coded_ratio for q in s.quality),
                loss_ratio=max(0.0, s.worst_loss_ratio),
            )
            for s in artifact.settings
            if s.quality
        ]
    return tuple(found)


def smallest_within(found: Sequence[Candidate], max_loss_ratio: float = DEFAULT_MAX_LOSS_RATIO) -> Candidate | None:
    """The candidate that saves most among those that lose at most `max_loss_ratio`; None if there is none."""
    allowed = [c for c in found if c.loss_ratio <= max_loss_ratio]
    return max(allowed, key=lambda c: (c.ratio, -c.loss_ratio), default=None)


def _plain(name: str) -> str:
    return name.removesuffix("+zstd")
