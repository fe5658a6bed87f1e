"""Compiles the C++ step on first use and keeps it under ~/.cache/kvmesh/kernels.

One translation unit, no dependency but the standard library, so a plain compiler call is all the build there is.
The file's name is a hash of the sources, the compiler and its flags: a change of any of them builds anew. One build is
for one instruction set: AVX-512 with bf16 products (AMX among its flags; used where the processor has it), or AVX2 with
FMA, which computes in f32. A processor with neither runs the torch step.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import NotImplementedHere

_SOURCES = Path(__file__).parent / "src"
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off")
_AVX512_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512bf16", "amx-tile", "amx-bf16")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the step. `flags` build it; `needed` is what /proc/cpuinfo must list."""

    name: str
    flags: tuple[str, ...]
    needed: frozenset[str]
    amx: bool = False


AVX2 = Variant(name="AVX2", flags=("-mavx2", "-mfma"), needed=frozenset({"avx2", "fma"}))
AVX512 = Variant(
    name="AVX-512",
    flags=(*AVX2.flags, *(f"-m{name}" for name in _AVX512_FLAGS)),
    needed=AVX2.needed | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"},
)
AMX = Variant(name="AMX", flags=AVX512.flags, needed=AVX512.needed | {"amx_tile", "amx_bf16"}, amx=True)
VARIANTS = (AMX, AVX512, AVX2)  # the fastest first


def cpu_features() -> frozenset[str]:
    """What the kernel says the processor has; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def best_variant() -> Variant:
    """The fastest that the processor can run. Raises NotImplementedHere, naming what is missing, if there is none."""
    features = cpu_features()
    found = next((v for v in VARIANTS if v.needed <= features), None)
    if found is None:
        raise NotImplementedHere(f"the processor has no {', '.join(sorted(VARIANTS[-1].needed - features))}")
    return found


def library(variant: Variant, cache: Path | None = None) -> Path:
    """The compiled step, built if it is not there. Raises NotImplementedHere if it cannot be built."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if sys.platform != "linux" or compiler is None:
        raise NotImplementedHere("there is no C++ compiler" if sys.platform == "linux" else f"not on {sys.platform}")
    folder = cache or Path.home() / ".cache" / "kvmesh" / "kernels"
    path = folder / f"llama_step-{_key(compiler, variant)}.so"
    if path.exists():
        return path
    # Several processes may build at once; each renames its own whole file into place.
    part = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        command = [compiler, *_FLAGS, *variant.flags, str(_SOURCES / "llama_step.cpp"), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        part.replace(path)
    except subprocess.CalledProcessError as exc:
        error = next((line for line in exc.stderr.splitlines() if "error" in line), exc.stderr[-200:])
        raise NotImplementedHere(f"{compiler} failed: {error}") from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotImplementedHere(f"the kernels could not be built: {exc}") from exc
    finally:
        part.unlink(missing_ok=True)
    return path


def _key(compiler: str, variant: Variant) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    digest = hashlib.sha256(f"{version.stdout}\0{_FLAGS + variant.flags}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]
