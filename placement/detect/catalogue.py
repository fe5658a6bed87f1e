"""Which detectors there are: ours, and those that installed packages bring as `kvmesh.detectors` entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType

from placement.detect.contacts import Contacts
from placement.detect.credentials import Credentials
from placement.detect.identifiers import Identifiers
from placement.detect.types import Detector

GROUP = "kvmesh.detectors"


@cache
def built_in() -> Mapping[str, Detector]:
    """Ours, by name."""
    return MappingProxyType({d.name: d for d in (Identifiers(), Contacts(), Credentials())})


@cache
def installed() -> Mapping[str, Detector]:
    """Ours and the plug-ins'. An entry point names a Detector. What fails to load raises: a missing detector must
    not look like one that found nothing."""
    found = dict(built_in())
    for point in entry_points(group=GROUP):
        detector: Detector = point.load()
        if detector.name in found:
            raise ValueError(f"two detectors are named {detector.name!r}: the second is {point.value}")
        found[detector.name] = detector
    return MappingProxyType(found)


def kinds() -> Mapping[str, str]:
    """Every kind that can be found, with its detector's name."""
    return {kind: detector.name for detector in installed().values() for kind in sorted(detector.kinds)}
