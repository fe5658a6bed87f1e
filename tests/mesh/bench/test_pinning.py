"""Binding processes to CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mesh.bench.pinning import pin

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes")
_SLEEPS = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def test_a_process_and_its_children_are_bound() -> None:
    cpu = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", _SLEEPS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert pin({process.pid: {cpu}})
            assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(child) == {cpu}
        finally:
            os.kill(child, 9)


def test_nothing_is_bound_to_what_is_not_there() -> None:
    before = os.sched_getaffinity(0)
    assert not pin({os.getpid(): {max(before) + 1000}})
    assert os.sched_getaffinity(0) == before
