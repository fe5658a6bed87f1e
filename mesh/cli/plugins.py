"""Entry points of this installation, without those whose extra is not installed."""

from __future__ import annotations

import re
from importlib import metadata

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)")


def installed_entry_points(group: str) -> list[metadata.EntryPoint]:
    """Entry points of a group sorted by name. Nothing is imported."""
    found = sorted(metadata.entry_points(group=group), key=lambda e: e.name)
    return [e for e in found if all(_extra_is_installed(e, extra) for extra in e.extras)]


def _extra_is_installed(entry_point: metadata.EntryPoint, extra: str) -> bool:
    """True if every distribution that the extra requires is there, in whatever version."""
    requirements = entry_point.dist.requires if entry_point.dist is not None else None
    marker = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    for requirement in requirements or []:
        name = _REQUIREMENT.match(requirement)
        if name is None or not marker.search(requirement):
            continue
        try:
            metadata.distribution(name["name"])
        except metadata.PackageNotFoundError:
            return False
    return True
