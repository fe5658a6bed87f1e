"""What this process may use of the machine: memory and cores, by Linux's own accounts and control groups (v2).

Inside a container the machine's numbers mislead: threads beyond a CPU quota spin for each other's time slices, and
memory beyond a limit is a kill. The tightest limit on the way up from our control group counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Memory that may still be taken; file pages that nobody has used lately count as free. 0 if nobody says."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    free = int(found[1]) * 1024 if found else 0
    for folder in _groups(proc, cgroup):
        limit, current = _words(folder / "memory.max"), _words(folder / "memory.current")
        if limit and current and limit[0] != "max":
            stat = _words(folder / "memory.stat")
            idle = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
            free = min(free, max(0, int(limit[0]) - int(current[0]) + idle))
    return free


def usable_threads(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Cores that may be kept busy: those of our affinity, or the CPU quota rounded down; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(proc, cgroup):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            cores = min(cores, int(words[0]) // int(words[1]))
    return max(1, cores)


def _groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Folders of our control group and those above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        if line.startswith("0::"):  # version 2: one hierarchy
            group = cgroup / line[3:].lstrip("/")
            yield group
            for folder in group.parents:
                if folder == cgroup.parent:
                    return
                yield folder


def _words(file: Path) -> list[str]:
    """A control file's words; none where the group does not have it, which means no limit."""
    try:
        return file.read_text().split()
    except OSError:
        return []
