"""The systemd units: hardened by systemd's own measure, and in step with what the processes understand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mesh.configfile import Group, leaves
from mesh.identity.ca import NODE_CA_FILE, NODE_CERT_FILE, NODE_KEY_FILE
from mesh.settings import CoreSettings, EdgeSettings, PlacementSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS: dict[str, type[Group]] = {"edge": EdgeSettings, "core": CoreSettings, "placement": PlacementSettings}
MAX_EXPOSURE = 3.0


def unit(role: str) -> str:
    return (FOLDER / f"kvmesh-{role}.service").read_text()


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("role", UNITS)
def test_each_flag_of_a_unit_is_a_setting(role: str) -> None:
    (start,) = values(unit(role), "ExecStart")
    program, command, *flags = start.split()
    assert (program, command) == ("/opt/kvmesh/current/venv/bin/kvmesh", role)
    known = {f"--{leaf.key}" for leaf in leaves(UNITS[role])} | {"--config"}
    assert set(flags[::2]) <= known
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--systemd.notify_socket"] == "${NOTIFY_SOCKET}"
    assert given["--systemd.watchdog_us"] == "${WATCHDOG_USEC}"
    assert values(unit(role), "WatchdogSec") != []
    assert values(unit(role), "Type") == ["notify"]


@pytest.mark.parametrize("role", ["core", "placement"])
def test_secrets_come_as_credentials(role: str) -> None:
    loaded = [value.partition(":")[0] for value in values(unit(role), "LoadCredential")]
    assert sorted(loaded) == sorted([NODE_KEY_FILE, NODE_CERT_FILE, NODE_CA_FILE])
    assert "--identity.folder %d" in unit(role)


@pytest.mark.parametrize("role", UNITS)
def test_own_user_no_capabilities_read_only_system(role: str) -> None:
    text = unit(role)
    assert values(text, "User") == ["kvmesh"]
    assert values(text, "CapabilityBoundingSet") == [""]
    assert values(text, "NoNewPrivileges") == ["yes"]
    assert values(text, "ProtectSystem") == ["strict"]
    assert values(text, "MemoryMax") != []
    assert "u kvmesh " in (FOLDER / "kvmesh.sysusers.conf").read_text()


@pytest.mark.parametrize("role", UNITS)
def test_exposure_by_systemds_own_measure(role: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(FOLDER / f"kvmesh-{role}.service")],
        capture_output=True,
        text=True,
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) < MAX_EXPOSURE


@pytest.mark.parametrize("role", UNITS)
def test_systemd_understands_every_line(role: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / f"kvmesh-{role}.service"
    file.write_text(unit(role).replace("/opt/kvmesh/current/venv/bin/kvmesh", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if file.name in line]
    assert ours == []
