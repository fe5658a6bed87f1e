"""A bundle from its making to a box without a network: what is refused, what is chosen, what is left after a fault."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mesh import __version__
from mesh.bundle.create import BundleOrder, create
from mesh.bundle.manifest import BASELINE_FLAGS, BundleManifest
from mesh.errors import InvalidRequest, NotFound
from tests.deploy.fake_wheels import DIES, RUNS, llama, wheelhouse

INSTALLER = Path(__file__).parents[2] / "deploy" / "bundle" / "install.py"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
WITHOUT_NETWORK = ("unshare", "--net", "--map-root-user")


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvmesh_install", INSTALLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def order(tmp_path: Path, install: ModuleType) -> BundleOrder:
    """`fast` is for this very CPU, but dies on it; `baseline` runs."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF" * 100)
    return BundleOrder(
        out=tmp_path / "dist",
        llama={
            "baseline": llama(tmp_path / "l" / "baseline", RUNS, ""),
            "fast": llama(tmp_path / "l" / "fast", DIES, " ".join(install.cpu_flags())),
        },
        python=(HERE,),
        model_id="tiny",
        model_path=model,
        wheels=wheelhouse(tmp_path / "wheels"),
    )


def made(order: BundleOrder) -> Path:
    """The bundle's folder."""
    return create(order, lambda step: None).with_suffix("")


def run(bundle: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*WITHOUT_NETWORK, bundle / "install.sh", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def needs_namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no network namespaces")


def test_from_a_bundle_into_an_empty_folder_without_a_network(order: BundleOrder, tmp_path: Path) -> None:
    needs_namespaces()
    bundle, prefix = made(order), tmp_path / "opt"
    done = run(bundle, "--prefix", prefix, "--no-systemd")
    assert done.returncode == 0, done.stdout + done.stderr
    kvmesh = prefix / "current" / "venv" / "bin" / "kvmesh"
    assert subprocess.run([kvmesh, "--version"], capture_output=True, text=True).stdout == f"kvmesh {__version__}\n"
    assert (prefix / "current" / "model" / "tiny.gguf").read_bytes() == b"GGUF" * 100
    # The faster build should have run on this CPU, and did not.
    assert "the build fast does not run here (signal 4); trying the next" in done.stdout
    assert json.loads((prefix / "current" / "complete").read_text())["llama"] == "baseline"
    again = run(bundle, "--prefix", prefix, "--no-systemd")
    assert again.returncode == 0
    assert "is installed already" in again.stdout


@pytest.mark.soak
def test_an_update_and_the_way_back(order: BundleOrder, tmp_path: Path) -> None:
    needs_namespaces()
    prefix = tmp_path / "opt"
    first = made(order)
    assert run(first, "--prefix", prefix, "--no-systemd").returncode == 0
    assert run(first, "--prefix", prefix, "--rollback").returncode == 1  # there is nothing to go back to
    assert order.model_path is not None
    order.model_path.write_bytes(b"GGUF" * 200)
    second = made(replace(order, out=tmp_path / "dist2"))
    assert run(second, "--prefix", prefix, "--no-systemd").returncode == 0
    model = prefix / "current" / "model" / "tiny.gguf"
    assert model.stat().st_size == 800
    assert run(second, "--prefix", prefix, "--rollback").returncode == 0
    assert model.stat().st_size == 400
    # A bundle that cannot be installed leaves everything as it is, and a second try begins anew.
    broken = made(replace(order, out=tmp_path / "dist3", llama={"fast": order.llama["fast"]}))
    failed = run(broken, "--prefix", prefix, "--no-systemd")
    assert failed.returncode == 1
    assert "no llama.cpp build of the bundle runs on this box" in failed.stderr
    assert model.stat().st_size == 400


def test_systemd_files_are_put_in_place(order: BundleOrder, tmp_path: Path, install: ModuleType) -> None:
    bundle = made(order)
    install.set_up_systemd(bundle, tmp_path / "root")
    unit = tmp_path / "root" / "etc" / "systemd" / "system" / "kvmesh-edge.service"
    assert "ExecStart=/opt/kvmesh/current/venv/bin/kvmesh edge" in unit.read_text()
    assert (tmp_path / "root" / "etc" / "sysusers.d" / "kvmesh.conf").is_file()


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: _append(b / "model" / "tiny.gguf"), "model/tiny.gguf is damaged"),
        (lambda b: _flip(b / "llama" / "fast" / "llama_cpp_python-0.3.36-py3-none-any.whl"), "is damaged"),
        (lambda b: (b / "model" / "tiny.gguf").unlink(), "tiny.gguf is missing"),
        (lambda b: (b / "wheels" / "evil-1-py3-none-any.whl").touch(), "does not belong to the bundle"),
        (lambda b: (b / "wheels" / "evil.whl").symlink_to("/etc/passwd"), "does not belong to the bundle"),
        (lambda b: (b / "manifest.json").write_text("{"), "cannot be read"),
        (lambda b: (b / "manifest.json").unlink(), "cannot be read"),
        (lambda b: (b / "manifest.json").write_text('{"format": 2, "files": []}'), "another format"),
        (
            lambda b: (b / "manifest.json").write_text('{"format": 1, "files": [{"path": "../../etc/passwd"}]}'),
            "another format",
        ),
    ],
)
def test_a_bundle_that_is_not_whole_is_refused(
    order: BundleOrder, install: ModuleType, change: Callable[[Path], None], says: str
) -> None:
    bundle = made(order)
    install.check_files(bundle, install.read_manifest(bundle))
    change(bundle)
    with pytest.raises(install.Refused, match=says):
        install.check_files(bundle, install.read_manifest(bundle))


def _key(path: Path) -> Path:
    """A private key at `path`; its public one lies beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public))
    return path


def test_signatures(order: BundleOrder, install: ModuleType, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    ours, theirs = _key(tmp_path / "ours.pem"), _key(tmp_path / "theirs.pem")
    bundle = made(replace(order, sign_key=ours))
    install.check_signature(bundle, ours.with_suffix(".pub"))
    with pytest.raises(install.Refused, match="not signed by the key"):
        install.check_signature(bundle, theirs.with_suffix(".pub"))
    _append(bundle / "manifest.json")
    with pytest.raises(install.Refused, match="or was changed since"):
        install.check_signature(bundle, ours.with_suffix(".pub"))
    (bundle / "manifest.sig").unlink()
    with pytest.raises(install.Refused, match="is not signed"):
        install.check_signature(bundle, ours.with_suffix(".pub"))


def test_the_build_follows_the_cpu(order: BundleOrder, install: ModuleType) -> None:
    flags_of_builder = f"fpu {' '.join(BASELINE_FLAGS)} avx avx2 fma syscall"
    avx2 = llama(order.out.parent / "l" / "avx2", RUNS, flags_of_builder)
    manifest = install.read_manifest(made(replace(order, llama={**order.llama, "avx2": avx2})))

    def names(*flags: str) -> list[str]:
        return [build["name"] for build in install.usable_builds(manifest, frozenset(flags))]

    assert names(*BASELINE_FLAGS) == ["baseline"]
    assert names(*BASELINE_FLAGS, "avx", "fma") == ["baseline"]
    assert names(*BASELINE_FLAGS, "avx", "avx2", "fma") == ["avx2", "baseline"]
    with pytest.raises(install.Refused, match=r"baseline needs .*sse4_2"):
        names("sse2")


def test_the_fastest_build_comes_first(order: BundleOrder, tmp_path: Path) -> None:
    manifest = BundleManifest.from_json((made(order) / "manifest.json").read_bytes())
    assert [build.name for build in manifest.llama] == ["fast", "baseline"]
    assert set(manifest.llama[1].needs) == BASELINE_FLAGS


def test_orders_that_cannot_be_filled(order: BundleOrder, tmp_path: Path) -> None:
    unknown = tmp_path / "bare" / "llama_cpp_python-1-py3-none-any.whl"
    unknown.parent.mkdir()
    unknown.touch()
    for bad, error, says in (
        (replace(order, llama={}), InvalidRequest, "at least one build"),
        (replace(order, llama={"x": unknown}), InvalidRequest, "nobody knows which CPUs"),
        (replace(order, llama={"x": tmp_path / "no.whl"}), NotFound, "there is no wheel"),
        (replace(order, model_path=tmp_path / "no.gguf"), NotFound, "no model file"),
        (replace(order, wheels=tmp_path / "l"), NotFound, "no wheel lies"),
        (replace(order, root=tmp_path), NotFound, "source tree"),
        (replace(order, sign_key=unknown), InvalidRequest, "no PEM private key"),
    ):
        with pytest.raises(error, match=says):
            create(bad, lambda step: None)
        assert not list(tmp_path.glob("dist/*")), "a bundle that failed leaves nothing"
    made(order)
    with pytest.raises(InvalidRequest, match="is there already"):
        create(order, lambda step: None)
