"""Processes on CPUs of their own, so that a benchmark's parties do not take each other's time. Linux; elsewhere nothing
is pinned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path


def pin(cpus: Mapping[int, Set[int]]) -> bool:
    """Bind each process (by id), its threads and its children to its CPUs; False, and nothing is bound, if this machine
    has not all of them or cannot bind. What is started later inherits it."""
    if not hasattr(os, "sched_setaffinity") or not set().union(*cpus.values()) <= os.sched_getaffinity(0):
        return False
    for pid, allowed in cpus.items():
        for thread in _threads_of(pid):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(thread, allowed)
    return True


def _threads_of(pid: int) -> Iterator[int]:
    """Thread ids of a process and its descendants."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        yield int(task.name)
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _threads_of(int(child))
