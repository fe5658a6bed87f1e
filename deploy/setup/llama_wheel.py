"""The llama-cpp-python wheel, built so that it does not crash, kept where only an equal build finds it.

GCC before 13 tells the optimiser that `ldtilecfg` reads 8 of its 64 bytes; llama.cpp built so dies of an illegal
instruction in the first prefill on a CPU with AMX. A force-included header mends that. pip's own wheel cache does
not know of flags, headers and CPUs and would hand back a crashing wheel, so it is neither read nor written here:
the wheel lies in a folder named by everything that went into it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from steps import SetupFailed, Show, duration, watch

PACKAGE = "llama-cpp-python"
CMAKE_OPTIONS = "-DLLAVA_BUILD=OFF"
HEADER = Path(__file__).resolve().parents[1] / "llama_cpp" / "amx_tile.h"
CACHE = Path.home() / ".cache" / "kvmesh" / "wheels"
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Everything that decides whether two wheels are the same."""

    version: str
    cmake_options: str
    header_sha256: str
    compiler: str
    machine: str
    cpu_flags: str

    @property
    def folder(self) -> Path:
        """Where a wheel of exactly this build lies, or will."""
        text = json.dumps(self.facts(), sort_keys=True)
        return CACHE / hashlib.sha256(text.encode()).hexdigest()[:20]

    def facts(self) -> dict[str, str]:
        """The fields as plain JSON, kept beside the wheel for people."""
        return {name: getattr(self, name) for name in self.__slots__}

    def wheel(self) -> Path | None:
        """The wheel if it was built before."""
        return next(iter(sorted(self.folder.glob("*.whl"))), None)


def this_build(version: str) -> Build:
    """The build that this machine would make."""
    return Build(
        version=version,
        cmake_options=CMAKE_OPTIONS,
        header_sha256=hashlib.sha256(HEADER.read_bytes()).hexdigest(),
        compiler=_compiler(),
        machine=platform.machine(),
        cpu_flags=_cpu_flags(),
    )


def build_wheel(build: Build, python: Path, log: Path, show: Show) -> Path:
    """Build and keep the wheel; minutes. Raises SetupFailed. A broken-off build leaves nothing in the cache."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    show.line(f"  llama.cpp is compiled for this CPU: about {max(1, round(10 / cores))} minutes on {cores} cores, once")
    CACHE.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()

    def seen(line: str) -> None:
        step = _NINJA_STEP.search(line)
        if step is None:
            return
        done, total = int(step[1]), int(step[2])
        show.progress(f"llama.cpp [{done}/{total}] {duration(time.monotonic() - started_s)}")
        show.stage(f"llama.cpp {done * 10 // total * 10} %")

    # The header is copied to a path without blanks: CMake hands the flag to the compiler unquoted.
    with tempfile.TemporaryDirectory(prefix="kvmesh-llama-") as scratch, tempfile.TemporaryDirectory(dir=CACHE) as new:
        header = Path(scratch) / HEADER.name
        shutil.copyfile(HEADER, header)
        env = os.environ | {
            "CMAKE_ARGS": f"{build.cmake_options} -DCMAKE_CXX_FLAGS='-include {header}'",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(cores),
        }
        command = [python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--no-binary", PACKAGE, "-v"]
        watch([*command, "-w", new, f"{PACKAGE}=={build.version}"], log, seen, env=env)
        if not list(Path(new).glob("*.whl")):
            raise SetupFailed(f"pip made no wheel of {PACKAGE}; its output is in {log}")
        (Path(new) / "build.json").write_text(json.dumps(build.facts(), indent=1))
        _keep(Path(new), build.folder)
    wheel = build.wheel()
    assert wheel is not None
    return wheel


def _keep(new: Path, folder: Path) -> None:
    """Move a finished build into its place at once; another set-up that was quicker wins."""
    complete = new.with_name(new.name + ".complete")
    shutil.copytree(new, complete)
    try:
        complete.rename(folder)
    except OSError:
        shutil.rmtree(complete)
        if not any(folder.glob("*.whl")):
            raise


def _compiler() -> str:
    name = os.environ.get("CXX") or "c++"
    try:
        output = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as exc:
        raise SetupFailed(f"no C++ compiler: {name} does not run ({exc})") from exc
    return output.splitlines()[0]


def _cpu_flags() -> str:
    """What `-march=native` looks at, so that a home folder shared by unlike machines is safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    model = next((line for line in lines if line.startswith("model\t")), "")
    return " ".join(sorted(flags.partition(":")[2].split())) + f" / model {model.partition(':')[2].strip()}"
