"""The `detectors` section of a policy, checked and compiled. Pure; knows the kinds that ship with the package.

A kind with a dot in it (`acme.badge`) is a plug-in's: whether it is installed is known only where prompts are
looked at, and an entry that lacks it treats the prompt as not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from placement.detect.catalogue import built_in
from placement.detect.patterns import compile_pattern
from placement.policy.document import DetectorRules
from placement.policy.labels import Lattice
from placement.policy.rules import Detection

Wrong = Callable[[tuple[str | int, ...], str], None]


def compile_detection(written: DetectorRules, labels: Lattice, wrong: Wrong) -> Detection:
    """Kinds spelt out, detector names replaced by their kinds; a kind's own entry wins over its detector's.
    Problems go to `wrong(location below "detectors", message)`."""
    known = ", ".join(labels.names)
    detectors = {d.name: d.kinds for d in built_in().values()}
    kinds = frozenset().union(*detectors.values())
    spread: dict[str, str] = {}
    single: dict[str, str] = {}
    for name, label in written.raise_to.items():
        if label not in labels.above:
            wrong(("raise_to", name), f"unknown label {label!r}: one of {known}")
        if name in detectors:
            spread.update(dict.fromkeys(detectors[name], label))
        elif name in kinds or "." in name:
            single[name] = label
        else:
            wrong(("raise_to", name), f"no such kind or detector: one of {', '.join(sorted([*detectors, *kinds]))}")
    for name, pattern in written.patterns.items():
        if pattern.raise_to not in labels.above:
            wrong(("patterns", name, "raise_to"), f"unknown label {pattern.raise_to!r}: one of {known}")
        try:
            if compile_pattern(pattern.regex).match("") is not None:
                wrong(("patterns", name, "regex"), "matches the empty text, so it would match everywhere")
        except ValueError as exc:
            wrong(("patterns", name, "regex"), f"not a regular expression of RE2: {exc}")
    if written.on_failure is not None and written.on_failure not in labels.above:
        wrong(("on_failure",), f"unknown label {written.on_failure!r}: one of {known}")
    return Detection(
        raise_to=MappingProxyType({**spread, **single}),
        patterns=MappingProxyType({n: (p.regex, p.raise_to) for n, p in written.patterns.items()}),
        on_failure=written.on_failure or labels.top,
    )
