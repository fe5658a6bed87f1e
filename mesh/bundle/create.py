"""Makes a bundle: one folder, and one tar of it, from which an edge box is installed without a network. Blocking."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import mesh
from mesh import __version__
from mesh.bundle.manifest import (
    BASELINE_FLAGS,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    BundleFile,
    BundleManifest,
    BundleModel,
    LlamaBuild,
    check_path,
    needed_flags,
)
from mesh.errors import Internal, InvalidRequest, NotFound

ROOT: Final = Path(mesh.__file__).resolve().parents[1]
BASELINE: Final = "baseline"
LLAMA: Final = "llama-cpp-python"
_INSTALLER: Final = ("deploy/bundle/install.sh", "deploy/bundle/install.py")
_EXTRAS: Final = ("deploy/systemd", "deploy/docs")
_SOURCE_FILES: Final = ("pyproject.toml", "README.md", "LICENSE")
_PACKAGES: Final = ("mesh", "placement", "core_node", "edge_node")
_LLAMA_OWN: Final = ("diskcache==5.6.3",)  # what llama-cpp-python requires beyond kvmesh's own requirements
_NAME_OF_BUNDLE: Final = "kvmesh-edge-{version}-{machine}"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleOrder:
    """What to put in. `llama`: build name -> wheel, with the build.json that its making left beside it, or the flags
    of BASELINE for a build of that name. `wheels`: a folder of wheels to take instead of asking a package index."""

    out: Path
    llama: Mapping[str, Path]
    python: tuple[str, ...]
    model_id: str = ""
    model_path: Path | None = None
    wheels: Path | None = None
    sign_key: Path | None = None
    root: Path = ROOT


def create(order: BundleOrder, tell: Tell) -> Path:
    """The bundle's tar; its folder lies beside it. Raises InvalidRequest, NotFound, Internal (a step failed)."""
    folder = order.out / _NAME_OF_BUNDLE.format(version=__version__, machine=platform.machine())
    if folder.exists():
        raise InvalidRequest(f"{folder} is there already: remove it, or choose another --out", field="out")
    if not order.llama:
        raise InvalidRequest("a bundle needs at least one build of llama.cpp: --llama NAME=WHEEL", field="llama")
    key = None if order.sign_key is None else _signing_key(order.sign_key)
    builds = [_llama_build(name, wheel) for name, wheel in order.llama.items()]
    folder.mkdir(parents=True)
    try:
        tell("wheels")
        _wheels(order, folder / "wheels")
        for build, wheel in zip(builds, order.llama.values(), strict=True):
            _copy(wheel, folder / build.folder / wheel.name)
        model = _model(order, folder, tell)
        _deploy_files(order.root, folder)
        tell("checksums")
        manifest = BundleManifest(
            kvmesh=__version__,
            machine=platform.machine(),
            python=order.python,
            created_unix_s=int(time.time()),
            llama=tuple(sorted(builds, key=lambda build: -len(build.needs))),  # what needs more is faster
            model=model,
            files=tuple(_digest(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()),
        )
        (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
        if key is not None:
            (folder / SIGNATURE_FILE).write_bytes(key.sign(manifest.to_json(), ec.ECDSA(hashes.SHA256())))
        tell("tar")
        return _pack(folder)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _wheels(order: BundleOrder, folder: Path) -> None:
    """kvmesh's own wheel, pip's, and those of everything that the edge requires, for each Python."""
    folder.mkdir()
    if order.wheels is not None:
        found = sorted(order.wheels.glob("*.whl"))
        if not found:
            raise NotFound(f"no wheel lies in {order.wheels}", field="wheels")
        for wheel in found:
            _copy(wheel, folder / wheel.name)
        return
    if not (order.root / "pyproject.toml").is_file():
        raise NotFound("kvmesh is not installed from its source tree here: give --wheels", field="wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="kvmesh-bundle-") as scratch:
        # Not in the tree itself: a build folder there may hold modules that are gone.
        source = Path(scratch) / "source"
        source.mkdir()
        for name in _SOURCE_FILES:
            shutil.copyfile(order.root / name, source / name)
        for name in _PACKAGES:
            shutil.copytree(order.root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)])
    for version in order.python:
        target = [] if version == _this_python() else ["--python-version", version]
        wanted = [*requirements(), *_LLAMA_OWN, "pip"]
        _run([*pip, "download", "--only-binary=:all:", *target, "-d", str(folder), *wanted])


def requirements() -> list[str]:
    """What the base of this installation requires, as pinned."""
    return [r for r in metadata.requires("kvmesh") or [] if "extra ==" not in r]


def _llama_build(name: str, wheel: Path) -> LlamaBuild:
    check_path(name)
    if wheel.suffix != ".whl" or not wheel.is_file():
        raise NotFound(f"there is no wheel {wheel}", field="llama")
    facts = wheel.parent / "build.json"
    if name == BASELINE:
        needs = tuple(sorted(BASELINE_FLAGS))
    elif facts.is_file():
        words = str(json.loads(facts.read_text()).get("cpu_flags", "")).partition(" / ")[0]
        needs = needed_flags(frozenset(words.split()))
    else:
        raise InvalidRequest(
            f"there is no build.json beside {wheel}, so nobody knows which CPUs it runs on; call it {BASELINE} if it "
            "runs on every x86-64-v2 CPU",
            field="llama",
        )
    return LlamaBuild(name=name, folder=f"llama/{name}", needs=needs)


def _model(order: BundleOrder, folder: Path, tell: Tell) -> BundleModel | None:
    if order.model_path is None:
        return None
    if not order.model_path.is_file():
        raise NotFound(f"there is no model file {order.model_path}", field="model")
    tell(f"model ({order.model_path.stat().st_size / 1e6:.0f} MB)")
    path = f"model/{order.model_path.name}"
    check_path(path)
    _copy(order.model_path, folder / path)
    return BundleModel(model_id=order.model_id, path=path)


def _deploy_files(root: Path, folder: Path) -> None:
    for name in _INSTALLER:
        source = root / name
        if not source.is_file():
            raise NotFound(f"{source} is missing: make bundles from kvmesh's source tree", field="deploy")
        _copy(source, folder / source.name)
        (folder / source.name).chmod(0o755)
    for name in _EXTRAS:
        for source in sorted((root / name).glob("*")):
            if source.is_file():
                _copy(source, folder / Path(name).name / source.name)


def _signing_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as exc:
        raise InvalidRequest(f"{path} is no PEM private key without a password", field="sign_key") from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidRequest("a bundle is signed with an elliptic-curve key (P-256)", field="sign_key")
    return key


def _digest(folder: Path, path: Path) -> BundleFile:
    name = path.relative_to(folder).as_posix()
    check_path(name)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return BundleFile(path=name, sha256=digest, size_bytes=path.stat().st_size)


def _pack(folder: Path) -> Path:
    """A tar without compression (wheels and weights are compressed), owners and times left out."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        return entry

    path = folder.with_name(f"{folder.name}.tar")
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=folder.name, filter=plain)
    return path


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Internal(f"`{' '.join(command[:5])} ...` failed: {done.stderr.strip()[-600:]}")


def _this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
