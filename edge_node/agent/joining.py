"""What `kvmesh edge join` does on the box: key, certificate, settings file, self-test; and nothing half.

The key is made first and kept, so that an attempt whose answer was lost is repeated with the same key and the same
token. The certificate is written last: a folder that has one has joined.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edge_node.engine.selftest import run_self_test
from mesh import __version__
from mesh.address import HostPort
from mesh.configfile import to_yaml
from mesh.errors import AlreadyExists, InvalidRequest, MeshError, NotImplementedHere
from mesh.identity.ca import NODE_CERT_FILE, NODE_KEY_FILE
from mesh.identity.enrolment import Token
from mesh.identity.files import make_private_folder, write_private
from mesh.identity.keyring import Keyring
from mesh.identity.requests import new_key_pem
from mesh.machine import usable_threads
from mesh.model.catalogue import find_model
from mesh.rpc.enrol import MOST_SKEW_S, Joined, join, renew, skew_words
from mesh.settings import EdgeEngine, EdgeListeners, EdgeSettings, Identity, ModelFile, PlacementPeer

CONFIG_FILE = "edge.yaml"
UNIT = "kvmesh-edge.service"
_SELF_TEST_TIMEOUT_S = 300.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What the operator asked for. `model`: a GGUF file or the demo model's name; `model_id` empty: the mesh's first
    model; `n_threads` 0: all CPUs; `service`: there must be a systemd unit to start afterwards."""

    mesh: HostPort
    token: Token
    folder: Path
    model: str
    model_id: str
    public: HostPort
    http: HostPort
    n_threads: int
    service: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """One step of the self-test."""

    name: str
    ok: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReport:
    """What came of it."""

    node_id: str
    site: str
    region: str
    jurisdiction: str
    config_file: Path
    clock_skew_s: float
    not_after: datetime
    tests: tuple[Tested, ...]

    @property
    def ok(self) -> bool:
        """The self-test found nothing wrong."""
        return all(test.ok for test in self.tests)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **asdict(self),
            "event": "joined",
            "ok": self.ok,
            "config_file": str(self.config_file),
            "not_after": self.not_after.isoformat(),
        }


async def join_mesh(options: JoinOptions, tell: Tell) -> JoinReport:
    """Join, write settings, test. Raises AlreadyExists if this box has joined, what mesh.rpc.enrol.join raises, and
    InvalidRequest for a model that is not there; nothing is used up then, but that the key stays for the next try."""
    identity = options.folder / "identity"
    _check_free(identity)
    if options.service:
        _check_unit()
    model_path = find_model(options.model).absolute()
    make_private_folder(options.folder)
    make_private_folder(identity)
    key_pem = _own_key(identity / NODE_KEY_FILE)
    joined = await join(options.mesh, options.token, f"kvmesh {__version__}", key_pem=key_pem)
    place = joined.place
    tell(f"joined mesh {place.mesh} as {place.node_id}: site {place.site}, {place.region}, {place.jurisdiction}")
    settings = _settings(options, joined, model_path)
    config = options.folder / CONFIG_FILE
    write_private(config, to_yaml(settings).encode())
    joined.credentials.save(identity)
    tests = await _self_test(joined, identity, model_path, settings, tell)
    return JoinReport(
        node_id=place.node_id,
        site=place.site,
        region=place.region,
        jurisdiction=place.jurisdiction,
        config_file=config,
        clock_skew_s=joined.clock_skew_s,
        not_after=joined.credentials.not_after,
        tests=tests,
    )


def start_service() -> None:
    """Enable and start the systemd unit. Blocking. Raises InvalidRequest with what systemctl said."""
    done = subprocess.run(["systemctl", "enable", "--now", UNIT], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise InvalidRequest(f"systemctl could not start {UNIT}: {done.stderr.strip()[:400]}", field="service")


def _check_free(identity: Path) -> None:
    if (identity / NODE_CERT_FILE).exists():
        place = Keyring.load(identity).now.place
        raise AlreadyExists(
            f"this box has joined already, as {place.node_id} of mesh {place.mesh} ({identity}); to join anew, stop "
            "the agent, remove this folder and take a new token",
            field="folder",
        )


def _check_unit() -> None:
    if shutil.which("systemctl") is None:
        raise NotImplementedHere("--service needs systemd; start the agent another way")
    known = subprocess.run(["systemctl", "cat", UNIT], capture_output=True, timeout=30)
    if known.returncode:
        raise InvalidRequest(f"there is no unit {UNIT}; install it first (deploy/systemd)", field="service")


def _own_key(file: Path) -> bytes:
    """The key of an attempt before, or a new one, mode 0600."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        key_pem = new_key_pem()
        write_private(file, key_pem)
        return key_pem


def _settings(options: JoinOptions, joined: Joined, model_path: Path) -> EdgeSettings:
    model_id = options.model_id or next(iter(joined.model_ids), "")
    if not model_id:
        raise InvalidRequest("the mesh names no model; give --model-id", field="model_id")
    return EdgeSettings(
        identity=Identity(folder=options.folder / "identity"),
        state_folder=options.folder / "state",
        placement=PlacementPeer(address=joined.node_address, node_id=joined.placement_node_id),
        model=ModelFile(id=model_id, path=model_path),
        listeners=EdgeListeners(public=options.public, http=options.http),
        engine=EdgeEngine(n_threads=options.n_threads),
    )


async def _self_test(
    joined: Joined, identity: Path, model_path: Path, settings: EdgeSettings, tell: Tell
) -> tuple[Tested, ...]:
    tests: list[Tested] = []

    def found(name: str, ok: bool, says: str) -> None:
        tests.append(Tested(name=name, ok=ok, says=says))
        tell(f"  {'ok  ' if ok else 'FAIL'} {name}: {says}")

    skew_s = joined.clock_skew_s
    found("clock", abs(skew_s) <= MOST_SKEW_S, f"{skew_words(skew_s)} (give or take {joined.rtt_s / 2:.3f} s)")
    not_after = joined.credentials.not_after
    valid = not_after > datetime.now(UTC)
    found("certificate", valid, f"valid until {not_after:%Y-%m-%d %H:%M} UTC, renewed by itself before")
    peer = settings.placement
    try:
        await renew(str(peer.address), Keyring.load(identity), peer.node_id)
    except MeshError as error:
        found("uplink", False, error.message)
    else:
        found("uplink", True, f"{peer.address} took this box's certificate and renews it")
    n_threads = settings.engine.n_threads or usable_threads()
    result = await asyncio.to_thread(run_self_test, model_path, n_threads, _SELF_TEST_TIMEOUT_S)
    found("engine", result.ok, result.says if result.ok else f"{result.says}; {result.remedy}")
    return tuple(tests)
