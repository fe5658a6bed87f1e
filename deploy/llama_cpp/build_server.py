"""Build llama.cpp's own server and tools from the tree that the llama-cpp-python source package carries.

    python3 deploy/llama_cpp/build_server.py FOLDER [--version 0.3.36] [--jobs N]

FOLDER/bin then has llama-server and llama-quantize. They are the same llama.cpp that an edge node runs, with the same
flags and the same mended header (see ../setup/llama_wheel.py), so the two can be compared. For benchmarks only: nothing
of kvmesh needs it. The web page of the server is left out, since its assets would be fetched at build time. Needs
cmake, a C++ compiler and pip; runs on the system's Python with the standard library alone. Run again, it goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "setup"))

from llama_wheel import CMAKE_OPTIONS, HEADER, PACKAGE, this_build
from steps import SetupFailed, Show, run, watch

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("llama-server", "llama-quantize")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    *CMAKE_OPTIONS.split(),
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
_MAKE_STEP = re.compile(r"\[ *(\d+)%\]")


def main() -> int:
    """Build; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build llama-server as a peer for benchmarks.")
    parser.add_argument("folder", type=Path, help="where the source, the build and bin/ go (about 1 GB)")
    parser.add_argument("--version", default=pinned_version(), help=f"of {PACKAGE} (default: the one kvmesh pins)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    options = parser.parse_args()
    try:
        build(options.folder.resolve(), options.version, options.jobs, Show())
    except SetupFailed as exc:
        print(f"build failed: {exc}", file=sys.stderr)
        return 1
    return 0


def pinned_version() -> str:
    """The version of llama-cpp-python in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(r.partition("==")[2] for group in extras.values() for r in group if r.startswith(f"{PACKAGE}=="))


def build(folder: Path, version: str, jobs: int, show: Show) -> None:
    """Fetch, configure, compile. Raises SetupFailed."""
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            raise SetupFailed(f"{program} is missing: install it (Debian: apt-get install cmake g++)")
    log = folder / "build.log"
    source = fetch_source(folder, version, log, show)
    header = folder / HEADER.name  # CMake hands the flag to the compiler unquoted
    if " " in str(header):
        raise SetupFailed(f"the folder's path has a blank, which CMake's flags cannot carry: {folder}")
    if not header.exists() or header.read_bytes() != HEADER.read_bytes():  # a newer file would be compiled for afresh
        shutil.copyfile(HEADER, header)
    tree = folder / "build"
    with show.step("configure"):
        run(["cmake", "-S", source, "-B", tree, *OPTIONS, f"-DCMAKE_CXX_FLAGS=-include {header}"], log)
    with show.step("compile"):
        command = ["cmake", "--build", tree, "--target", *TARGETS, "--parallel", str(jobs)]
        watch(command, log, lambda line: show.stage(_percent(line)) if _MAKE_STEP.search(line) else None)
    facts = {**this_build(version).facts(), "options": " ".join(OPTIONS)}
    (tree / "bin" / "build.json").write_text(json.dumps(facts, indent=1))
    link = folder / "bin"
    link.unlink(missing_ok=True)
    link.symlink_to(tree / "bin")
    show.line(f"  {', '.join(TARGETS)}: {link}")


def fetch_source(folder: Path, version: str, log: Path, show: Show) -> Path:
    """The llama.cpp tree of that package version under `folder`."""
    place = folder / f"{PACKAGE.replace('-', '_')}-{version}"
    source = place / "vendor" / "llama.cpp"
    if (source / "CMakeLists.txt").is_file():
        return source
    folder.mkdir(parents=True, exist_ok=True)
    with show.step(f"source of {PACKAGE} {version}"):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "-d", folder]
        run([*pip, f"{PACKAGE}=={version}"], log)
        with tarfile.open(place.with_name(place.name + ".tar.gz")) as archive:
            new = folder / "unpacking"
            shutil.rmtree(new, ignore_errors=True)
            archive.extractall(new, filter="data")
        shutil.rmtree(place, ignore_errors=True)
        (new / place.name).rename(place)
        shutil.rmtree(new)
    return source


def _percent(line: str) -> str:
    step = _MAKE_STEP.search(line)
    return f"llama.cpp {int(step[1]) // 10 * 10} %" if step else ""


if __name__ == "__main__":
    sys.exit(main())
