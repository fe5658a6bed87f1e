"""All detectors over a whole text, window by window, so that neither memory nor a single call grows with it. Pure.

Windows overlap by more than the longest thing that a detector looks at (a number and the word in front of it), so
what lies across a border is whole in one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mesh.errors import Internal
from placement.detect.plain import plain
from placement.detect.types import Detector, Finding

WINDOW_CHARS = 8_192
OVERLAP_CHARS = 512
MAX_FINDINGS = 1_000
"""At most this many are told of, and the first of each further kind: each kind may raise the label."""


def scan(text: str, detectors: Sequence[Detector]) -> tuple[Finding, ...]:
    """Findings in the order of their start, none twice: the first MAX_FINDINGS, and the first of each kind that is not
    among them. Whatever a detector raises goes on to the caller, which has to treat the text as unclassified. Raises
    Internal if a detector tells of a kind or a place that it does not have."""
    found: set[Finding] = set()
    for window in windows(text, detectors):
        # The whole text is looked at, however much is in its first part: that may be there to hide what follows.
        found |= window if len(found) < MAX_FINDINGS else _new_kinds(found, window)
    ordered = sorted(found)
    told = ordered[:MAX_FINDINGS]
    return tuple(told + sorted(_new_kinds(set(told), ordered[MAX_FINDINGS:])))


def _new_kinds(found: set[Finding], more: Iterable[Finding]) -> set[Finding]:
    """The first finding of each kind that none of `found` is of."""
    known = {f.kind for f in found}
    first: dict[str, Finding] = {}
    for finding in sorted(more):
        if finding.kind not in known:
            first.setdefault(finding.kind, finding)
    return set(first.values())


def windows(text: str, detectors: Sequence[Detector]) -> Iterator[frozenset[Finding]]:
    """Findings of one window after the other, in positions of the whole text; those of an overlap come twice."""
    step = WINDOW_CHARS - OVERLAP_CHARS
    for offset in range(0, max(1, len(text) - OVERLAP_CHARS), step):
        seen = plain(text[offset : offset + WINDOW_CHARS])
        yield frozenset(
            Finding(offset + seen.position(f.start), offset + seen.position(f.end - 1) + 1, f.kind)
            for detector in detectors
            for f in _checked(detector, seen.text)
        )


def _checked(detector: Detector, text: str) -> Iterator[Finding]:
    for finding in detector.find(text):
        if finding.kind not in detector.kinds or not 0 <= finding.start < finding.end <= len(text):
            raise Internal(f"the detector {detector.name} told of something that cannot be")
        yield finding
