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

_SPINS: Final = 1000  # what libgomp itself takes when it knows that there are more threads than cores

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Memory that may still be taken. 0 if the kernel does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    for folder in _groups(proc, cgroup):
        limit, current = _words(folder / "memory.max"), _words(folder / "memory.current")
        if limit and current and limit[0] != "max":
            free = min(free, int(limit[0]) - int(current[0]))
    return free


def usable_threads(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Cores that may be kept busy: those of our affinity, or the CPU quota rounded down; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for folder in _groups(proc, cgroup):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            cores = min(cores, int(words[0]) // int(words[1]))
    return max(1, cores)


def openmp_environment(n_threads: int) -> dict[str, str]:
    """The environment for a process that runs llama.cpp. OpenMP can be told in no other way.

    Its threads meet at hundreds of barriers in every step and by default spin there for milliseconds: with a third
    process on two cores a decode step of the demo model took 435 ms, and 60 ms with short spins. Loading would use
    one thread per core of the machine, whatever `n_threads` is."""
    return {**os.environ, "OMP_NUM_THREADS": str(n_threads), "GOMP_SPINCOUNT": str(_SPINS)}


def _groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Folders of our control group and those above it."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
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
