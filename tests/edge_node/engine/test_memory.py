"""Memory is counted before llama.cpp starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_node.engine.memory import MemoryNeed, available_bytes
from mesh.errors import Overloaded

MIB = 1 << 20
NEED = MemoryNeed(weights_bytes=100 * MIB, kv_bytes=50 * MIB, logits_bytes=6 * MIB, transfer_bytes=32 * MIB)


def test_it_fits_or_the_sum_is_named() -> None:
    NEED.check(NEED.total_bytes)
    with pytest.raises(Overloaded, match=r"348 MiB \(weights 100 \+ KV 50 \+ logits 6 .* and 347 MiB are free"):
        NEED.check(NEED.total_bytes - 1)


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
