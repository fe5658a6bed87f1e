"""What `kvmesh doctor` asks of a check. Packages bring theirs through the entry points `kvmesh.checks`.

An entry point is a callable `checks() -> Sequence[Check]`; one that names an extra is asked only where it is
installed. A check returns a finding and does not raise for a machine that is not as wished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Verdict(Enum):
    """OK; WARN: it runs, but less well; FAIL: something will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report: what is so, and what to do about it (empty if nothing)."""

    verdict: Verdict
    says: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What checks look at: the clone's state folder, the model file (None: not found)."""

    state_folder: Path
    model_path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A named check; `run` may block for seconds."""

    name: str
    run: Callable[[Examined], Finding]


def ok(says: str) -> Finding:
    """All is well."""
    return Finding(verdict=Verdict.OK, says=says)


def warn(says: str, remedy: str) -> Finding:
    """It runs, but less well."""
    return Finding(verdict=Verdict.WARN, says=says, remedy=remedy)


def fail(says: str, remedy: str) -> Finding:
    """Something will not work."""
    return Finding(verdict=Verdict.FAIL, says=says, remedy=remedy)
