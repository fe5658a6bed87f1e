"""Installs a kvmesh edge box from the bundle that this file lies in. No network, standard library only.

    ./install.sh [--prefix DIR] [--trust PUBLIC_KEY.pem] [--no-systemd]

In this order: the bundle is checked against its manifest (and the manifest's signature, with --trust), the fastest
llama.cpp build that this CPU can run is chosen, everything goes into a folder of its own version under the prefix, is
tried, and only then becomes `current`. An earlier version stays beside it; `--rollback` makes it current again.
With systemd and as root the service's user, folders and units are put in place as well; nothing is started.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FORMAT = 1
PREFIX = Path("/opt/kvmesh")
UNITS = ("kvmesh-edge.service",)
TRIAL = "import llama_cpp; llama_cpp.llama_backend_init(); print('ok')"
SAFE_PATH = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*(/[A-Za-z0-9_+][A-Za-z0-9._+-]*)*")


class Refused(Exception):
    """The message says what is wrong and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="install.sh", description="Install a kvmesh edge box from this bundle.")
    parser.add_argument("--prefix", type=Path, default=PREFIX, help="where to install (default: /opt/kvmesh)")
    parser.add_argument("--trust", type=Path, metavar="PEM", help="public key that must have signed the bundle")
    parser.add_argument("--no-systemd", action="store_true", help="touch nothing outside the prefix")
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)  # for tests
    parser.add_argument("--rollback", action="store_true", help="make the version before current again")
    parser.add_argument("--fits", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.fits:
            return 0 if _python() in read_manifest(options.fits)["python"] else 1
        if options.rollback:
            print(f"current is {rollback(options.prefix)} now; restart the service: systemctl restart kvmesh-edge")
            return 0
        install(HERE, options)
    except Refused as refused:
        print(f"install: {refused}", file=sys.stderr)
        return 1
    return 0


def install(bundle: Path, options: argparse.Namespace) -> None:
    """Everything. Raises Refused; `current` is as it was then."""
    if options.trust:
        check_signature(bundle, options.trust)
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    signed = "signature and checksums" if options.trust else "checksums"
    print(f"  {signed} of {len(manifest['files'])} files are right")
    if manifest["machine"] != platform.machine():
        raise Refused(f"the bundle is for {manifest['machine']}, this box is {platform.machine()}")
    builds = usable_builds(manifest, cpu_flags())
    target = options.prefix / "versions" / version_name(manifest, bundle)
    if (target / "complete").exists():
        print(f"  {target.name} is installed already")
    else:
        shutil.rmtree(target, ignore_errors=True)  # of an installation that was broken off
        build = _install_version(bundle, manifest, builds, target)
        (target / "complete").write_text(json.dumps({"llama": build, "kvmesh": manifest["kvmesh"]}))
    switch(options.prefix, target)
    if not options.no_systemd:
        set_up_systemd(bundle, options.root)
    _say_what_next(options, manifest, target)


def read_manifest(bundle: Path) -> dict[str, Any]:
    """Raises Refused for a file that is no manifest of ours."""
    try:
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        known = manifest["format"] == FORMAT and all(SAFE_PATH.fullmatch(file["path"]) for file in manifest["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"manifest.json cannot be read ({type(error).__name__}): copy the bundle again") from error
    if not known:
        raise Refused("the bundle is of another format: use the installer that it came with")
    return dict(manifest)


def check_signature(bundle: Path, key: Path) -> None:
    """The manifest against its signature, by openssl. Raises Refused."""
    signature = bundle / "manifest.sig"
    if not signature.is_file():
        raise Refused("the bundle is not signed, and --trust asks for a signature")
    if shutil.which("openssl") is None:
        raise Refused("--trust needs the program openssl on this box")
    command = ["openssl", "dgst", "-sha256", "-verify", str(key), "-signature", str(signature)]
    done = subprocess.run([*command, str(bundle / "manifest.json")], capture_output=True, text=True)
    if done.returncode or "Verified OK" not in done.stdout:
        raise Refused(f"the bundle was not signed by the key in {key}, or was changed since: do not install it")


def check_files(bundle: Path, manifest: dict[str, Any]) -> None:
    """Every file is there, is what the manifest says, and no other is there. Raises Refused naming the first."""
    listed = {file["path"]: file for file in manifest["files"]}
    there = {
        path.relative_to(bundle).as_posix()
        for path in bundle.rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    } - {"manifest.json", "manifest.sig"}
    if odd := sorted(there - listed.keys()):
        raise Refused(f"{odd[0]} does not belong to the bundle: unpack it into an empty folder")
    for name, file in listed.items():
        path = bundle / name
        if not path.is_file() or path.is_symlink():
            raise Refused(f"{name} is missing: copy the bundle again")
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if path.stat().st_size != file["size_bytes"] or digest != file["sha256"]:
            raise Refused(f"{name} is damaged: copy the bundle again")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the kernel says the CPU has."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def usable_builds(manifest: dict[str, Any], flags: frozenset[str]) -> list[dict[str, Any]]:
    """The llama.cpp builds that this CPU can run, the fastest first. Raises Refused naming what is missing."""
    found = [build for build in manifest["llama"] if flags.issuperset(build["needs"])]
    if not found:
        lacks = {build["name"]: sorted(set(build["needs"]) - flags) for build in manifest["llama"]}
        words = "; ".join(f"{name} needs {', '.join(missing)}" for name, missing in lacks.items())
        raise Refused(f"no llama.cpp build of the bundle runs on this CPU: {words}")
    return found


def version_name(manifest: dict[str, Any], bundle: Path) -> str:
    """Two bundles of one kvmesh version may differ in model or builds, so a digest is part of the name."""
    return f"{manifest['kvmesh']}-{hashlib.sha256((bundle / 'manifest.json').read_bytes()).hexdigest()[:8]}"


def _install_version(bundle: Path, manifest: dict[str, Any], builds: list[dict[str, Any]], target: Path) -> str:
    target.mkdir(parents=True)
    print(f"  Python environment in {target / 'venv'}")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(target / "venv")
    python = target / "venv" / "bin" / "python"
    pip_wheel = next(iter(sorted((bundle / "wheels").glob("pip-*.whl"))), None)
    if pip_wheel is None:
        raise Refused("the bundle holds no wheel of pip")
    pip = [str(python), str(pip_wheel / "pip"), "--isolated", "--disable-pip-version-check", "install", "--no-index"]
    build = _install_llama(bundle, pip, python, builds)
    print("  kvmesh")
    _run([*pip, "--find-links", str(bundle / "wheels"), "--find-links", str(bundle / build["folder"]),
          f"kvmesh[edge]=={manifest['kvmesh']}"])  # fmt: skip
    _run([str(target / "venv" / "bin" / "kvmesh"), "--version"])
    if manifest["model"]:
        model = bundle / manifest["model"]["path"]
        print(f"  model {manifest['model']['model_id']}")
        (target / "model").mkdir()
        shutil.copyfile(model, target / "model" / model.name)
    if (bundle / "docs").is_dir():
        shutil.copytree(bundle / "docs", target / "docs")
    return str(build["name"])


def _install_llama(bundle: Path, pip: list[str], python: Path, builds: list[dict[str, Any]]) -> dict[str, Any]:
    """The first build that not only should but does run here. Raises Refused."""
    for build in builds:
        wheel = next(iter(sorted((bundle / build["folder"]).glob("*.whl"))))
        _run([*pip, "--force-reinstall", "--find-links", str(bundle / "wheels"), str(wheel)])
        done = subprocess.run([str(python), "-c", TRIAL], capture_output=True, text=True, env=_plain_environment())
        if done.returncode == 0:
            print(f"  llama.cpp: the build {build['name']}")
            return build
        how = f"signal {-done.returncode}" if done.returncode < 0 else done.stderr.strip()[-200:]
        print(f"  llama.cpp: the build {build['name']} does not run here ({how}); trying the next")
    raise Refused("no llama.cpp build of the bundle runs on this box")


def switch(prefix: Path, target: Path) -> None:
    """Make a version `current`, by one rename; what was current becomes `previous`."""
    current = prefix / "current"
    old = os.readlink(current) if current.is_symlink() else None
    _link(prefix, "current", os.path.relpath(target, prefix))
    if old is not None and old != os.path.relpath(target, prefix):
        _link(prefix, "previous", old)


def rollback(prefix: Path) -> str:
    """Exchange `current` and `previous`; returns what is current now. Raises Refused."""
    previous = prefix / "previous"
    if not previous.is_symlink() or not (prefix / os.readlink(previous) / "complete").exists():
        raise Refused(f"there is no version before under {prefix}")
    target = prefix / os.readlink(previous)
    switch(prefix, target)
    return target.name


def _link(prefix: Path, name: str, to: str) -> None:
    new = prefix / f".{name}.new"
    new.unlink(missing_ok=True)
    new.symlink_to(to)
    new.rename(prefix / name)


def set_up_systemd(bundle: Path, root: Path) -> None:
    """User, folders and units. Raises Refused where that is not possible, saying how to go without."""
    if root == Path("/") and (os.geteuid() != 0 or not Path("/run/systemd/system").is_dir()):
        why = "this box does not run systemd" if os.geteuid() == 0 else "you are not root"
        raise Refused(f"{why}: run it with sudo on a box with systemd, or with --no-systemd")
    _put(bundle / "systemd" / "kvmesh.sysusers.conf", root / "etc/sysusers.d/kvmesh.conf")
    for unit in UNITS:
        _put(bundle / "systemd" / unit, root / "etc/systemd/system" / unit)
    (root / "etc/kvmesh").mkdir(parents=True, exist_ok=True)
    if root == Path("/"):
        _run(["systemd-sysusers", "/etc/sysusers.d/kvmesh.conf"])
        _run(["systemctl", "daemon-reload"])


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _say_what_next(options: argparse.Namespace, manifest: dict[str, Any], target: Path) -> None:
    kvmesh = options.prefix / "current" / "venv" / "bin" / "kvmesh"
    print(f"installed: {kvmesh}")
    if manifest["model"]:
        model = options.prefix / "current" / "model" / Path(manifest["model"]["path"]).name
        print(f"model:     {manifest['model']['model_id']} in {model}")
    print("next:      join the mesh with what its admin gave you, as the site operator's guide says:")
    print(f"           {options.prefix / 'current' / 'docs' / 'site-operator.md'}")


def _plain_environment() -> dict[str, str]:
    """Without what would point Python or pip elsewhere: another kvmesh on PYTHONPATH would count as installed."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_plain_environment())
    if done.returncode:
        raise Refused(f"`{' '.join(command[:4])} ...` failed: {(done.stderr or done.stdout).strip()[-800:]}")


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.exit(main())
