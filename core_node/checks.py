"""The doctor's check of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mesh.cli.checks import Check, Examined, Finding, ok, warn

OLDEST = (2, 6)


def checks() -> Sequence[Check]:
    """Entry point of `kvmesh.checks`."""
    return (Check(name="torch", run=_torch),)


def _torch(_: Examined) -> Finding:
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    elif torch.version.cuda is not None:
        device = "CPU (a CUDA build without a device)"
    else:
        device = f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    says = f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        return warn(says, f"kvmesh is tested from {OLDEST[0]}.{OLDEST[1]} on; run make setup for the pinned one")
    return ok(says)
