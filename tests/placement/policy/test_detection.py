"""The `detectors` section: what is refused, where, and what it compiles to."""

from __future__ import annotations

import pytest

from placement.policy.model import check_policy, parse_policy


def test_a_detector_stands_for_its_kinds_and_a_kind_wins_over_it() -> None:
    text = "version: 1\ndetectors: {raise_to: {iban: restricted, identifiers: confidential}}\n"
    detection = parse_policy(text, version=1).detection
    assert detection.raise_to["payment_card"] == "confidential"
    assert detection.raise_to["iban"] == "restricted"
    assert detection.on_failure == "restricted", "the top label"
    assert detection.wanted


def test_without_the_section_nothing_is_looked_for() -> None:
    assert not parse_policy("version: 1\n", version=1).detection.wanted


@pytest.mark.parametrize(
    ("section", "line", "path", "words"),
    [
        ("raise_to: {ibann: restricted}", 3, "detectors.raise_to.ibann", "no such kind"),
        ("raise_to: {iban: secret}", 3, "detectors.raise_to.iban", "unknown label"),
        ("on_failure: secret", 3, "detectors.on_failure", "unknown label"),
        ("patterns: {p: {regex: '(', raise_to: internal}}", 3, "detectors.patterns.p.regex", "not a regular"),
        ("patterns: {p: {regex: 'a*', raise_to: internal}}", 3, "detectors.patterns.p.regex", "empty text"),
        ("patterns: {p: {regex: '(?=a)b', raise_to: internal}}", 3, "detectors.patterns.p.regex", "not a regular"),
        ("patterns: {p: {regex: 'ab', raise_to: secret}}", 3, "detectors.patterns.p.raise_to", "unknown label"),
        ("patterns: {p: {regex: 'ab'}}", 3, "detectors.patterns.p.raise_to", "required"),
        ("kinds: [iban]", 3, "detectors.kinds", "unknown key"),
    ],
)
def test_problems_are_told_with_their_place(section: str, line: int, path: str, words: str) -> None:
    (problem,) = check_policy(f"version: 1\ndetectors:\n  {section}\n")
    assert (problem.path, words in problem.message) == (path, True), problem
    assert problem.line == line
