"""Tiny wheels that stand for kvmesh and llama.cpp, so that an installation takes seconds and needs no index."""

from __future__ import annotations

import ensurepip
import json
import shutil
import zipfile
from pathlib import Path

from mesh import __version__

RUNS = "def llama_backend_init() -> None:\n    pass\n"
DIES = "import os, signal\ndef llama_backend_init() -> None:\n    os.kill(os.getpid(), signal.SIGILL)\n"
LLAMA_VERSION = "0.3.36"


def wheel(folder: Path, name: str, version: str, module: str, code: str, *, meta: str = "", scripts: str = "") -> Path:
    """A wheel with one module. `meta`: further lines of METADATA."""
    folder.mkdir(parents=True, exist_ok=True)
    distribution = name.replace("-", "_")
    info = f"{distribution}-{version}.dist-info"
    files = {
        f"{module}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{meta}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if scripts:
        files[f"{info}/entry_points.txt"] = scripts
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{distribution}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
    return path


def wheelhouse(folder: Path) -> Path:
    """What an edge box needs, but for llama.cpp."""
    code = f"import llama_cpp\ndef main() -> None:\n    print('kvmesh {__version__}')\n"
    wheel(
        folder, "kvmesh", __version__, "fake_kvmesh", code,
        meta=f'Provides-Extra: edge\nRequires-Dist: llama-cpp-python=={LLAMA_VERSION}; extra == "edge"\n',
        scripts="[console_scripts]\nkvmesh = fake_kvmesh:main\n",
    )  # fmt: skip
    bundled = next(iter(sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))))
    shutil.copyfile(bundled, folder / bundled.name)
    return folder


def llama(folder: Path, code: str, cpu_flags: str) -> Path:
    """A build of llama.cpp as the set-up leaves it."""
    made = wheel(folder, "llama-cpp-python", LLAMA_VERSION, "llama_cpp", code)
    (folder / "build.json").write_text(json.dumps({"cpu_flags": f"{cpu_flags} / model test"}))
    return made
