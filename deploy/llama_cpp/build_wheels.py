"""Build the llama-cpp-python wheels that a bundle carries: one for this CPU, one for every x86-64-v2 CPU.

    python3 deploy/llama_cpp/build_wheels.py [--only baseline|native]

Prints NAME=WHEEL for each, as `kvmesh bundle create --llama` takes them. Wheels that were built before are found in the
cache of the set-up (../setup/llama_wheel.py), in which they lie apart by their flags. Each build takes minutes. Runs on
the system's Python with the standard library alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "setup"))

from build_server import ROOT, pinned_version
from llama_wheel import CMAKE_OPTIONS, Build, build_wheel, this_build
from steps import SetupFailed, Show

# ggml's switches for x86; each that is off here is one that x86-64-v2 does not promise.
BASELINE_OPTIONS = " ".join(
    [
        CMAKE_OPTIONS,
        "-DGGML_NATIVE=OFF",
        "-DGGML_SSE42=ON",
        *(f"-DGGML_{name}=OFF" for name in ("AVX", "AVX2", "AVX_VNNI", "AVX512", "BMI2", "F16C", "FMA", "AMX_TILE")),
    ]
)


def builds(version: str) -> dict[str, Build]:
    """Both, by name. The baseline's does not depend on the CPU that builds it."""
    native = this_build(version)
    return {
        "native": native,
        "baseline": dataclasses.replace(native, cmake_options=BASELINE_OPTIONS, cpu_flags="x86-64-v2"),
    }


def main() -> int:
    """Build what is missing; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build llama-cpp-python's wheels for a bundle.")
    parser.add_argument("--only", choices=("baseline", "native"), help="one of the two")
    options = parser.parse_args()
    try:
        for name, build in builds(pinned_version()).items():
            if options.only in (None, name):
                log = ROOT / ".kvmesh" / "logs" / f"wheel-{name}.log"
                wheel = build.wheel() or build_wheel(build, Path(sys.executable), log, Show(out=sys.stderr))
                print(f"{name}={wheel}")
    except SetupFailed as exc:
        print(f"build failed: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
