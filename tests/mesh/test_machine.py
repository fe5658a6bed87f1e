"""Limits of the machine and of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.machine import available_bytes, usable_threads

MIB = 1 << 20


def machine(tmp_path: Path, groups: dict[str, tuple[str, int]]) -> tuple[Path, Path]:
    """A /proc with 1000 MiB free in control group /a/b, and a cgroup tree with (limit, current) per group."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  1024000 kB\n")
    (proc / "self" / "cgroup").write_text("3:cpu:/old\n0::/a/b\n")
    for name, (limit, current) in groups.items():
        folder = cgroup / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
    return proc, cgroup


@pytest.mark.parametrize(
    ("groups", "want_mib"),
    [
        ({}, 1000),
        ({"a/b": ("max", 5)}, 1000),
        ({"a/b": (str(300 * MIB), 100 * MIB)}, 200),
        ({"a/b": (str(300 * MIB), 100 * MIB), "a": (str(200 * MIB), 150 * MIB)}, 50),
        ({"a/b": (str(9000 * MIB), 0)}, 1000),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, groups: dict[str, tuple[str, int]], want_mib: int) -> None:
    proc, cgroup = machine(tmp_path, groups)
    assert available_bytes(proc, cgroup) == want_mib * MIB


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
    assert usable_threads() >= 1


@pytest.mark.parametrize(
    ("groups", "want"),
    [
        ({}, 8),
        ({"a/b": "max 100000"}, 8),
        ({"a/b": "250000 100000"}, 2),  # rounded down
        ({"a/b": "max 100000", "a": "400000 100000"}, 4),
        ({"a/b": "50000 100000"}, 1),
        ({"a/b": "9900000 100000"}, 8),
    ],
)
def test_a_cpu_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, str], want: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    proc, cgroup = machine(tmp_path, {})
    for name, quota in groups.items():
        (cgroup / name).mkdir(parents=True, exist_ok=True)
        (cgroup / name / "cpu.max").write_text(f"{quota}\n")
    assert usable_threads(proc, cgroup) == want


def test_idle_file_pages_count_as_free(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, {"a/b": (str(300 * MIB), 250 * MIB)})
    (cgroup / "a/b" / "memory.stat").write_text(f"anon {50 * MIB}\ninactive_file {120 * MIB}\nactive_file 9\n")
    assert available_bytes(proc, cgroup) == 170 * MIB


def test_a_system_without_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path) > 0
    assert usable_threads(tmp_path / "none", tmp_path) >= 1
