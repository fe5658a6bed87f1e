"""Will the model fit? Counted before llama.cpp is started, since a box that swaps or kills is worse than an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import Overloaded

_MIB = 1 << 20
_RUNTIME_BYTES = 160 * _MIB  # interpreter, libraries and llama.cpp's work buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that an engine takes."""

    weights_bytes: int
    kv_bytes: int
    logits_bytes: int
    transfer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.logits_bytes + self.transfer_bytes + _RUNTIME_BYTES

    def check(self, available_bytes: int) -> None:
        """Raise Overloaded with the sum if it does not fit."""
        if self.total_bytes > available_bytes:
            parts = (
                ("weights", self.weights_bytes),
                ("KV", self.kv_bytes),
                ("logits", self.logits_bytes),
                ("transfer", self.transfer_bytes),
                ("runtime", _RUNTIME_BYTES),
            )
            terms = " + ".join(f"{name} {size // _MIB}" for name, size in parts)
            raise Overloaded(
                f"the model needs {self.total_bytes // _MIB} MiB ({terms}) and {available_bytes // _MIB} MiB are free; "
                "use a smaller n_ctx_tokens or model",
                need_bytes=str(self.total_bytes),
                available_bytes=str(available_bytes),
            )


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: the machine's, or its control group's if that is less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        if line.startswith("0::"):  # version 2, one hierarchy
            group = cgroup / line[3:].lstrip("/")
            for folder in (group, *group.parents):
                if folder == cgroup.parent:
                    break
                free = min(free, _left_in(folder, free))
    return free


def _left_in(folder: Path, free: int) -> int:
    try:
        limit = (folder / "memory.max").read_text().strip()
        return free if limit == "max" else int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no limit is set at this level
