"""`kvmesh ca`: credentials that a node can start with, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.cli.main import run
from mesh.identity.ca import NodeCredentials
from mesh.identity.place import Role, Tier

PLACE = ["--node-id", "edge-1", "--site", "paris", "--region", "eu-west", "--jurisdiction", "FR"]


def issue(folder: Path, out: Path, *more: str, role: str = "edge", mesh: str = "m") -> int:
    words = ["ca", "issue", "--mesh", mesh, "--ca", str(folder), "--role", role, *PLACE, "--out", str(out), *more]
    return run(words)


def test_a_node_gets_its_place_in_its_certificate(tmp_path: Path) -> None:
    assert issue(tmp_path / "ca", tmp_path / "node", "--dns", "paris.example", "--ip", "192.0.2.7") == 0
    place = NodeCredentials.load(tmp_path / "node").place
    assert (place.role, place.tier, place.site, place.node_id) == (Role.EDGE, Tier.EDGE, "paris", "edge-1")
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("more", [{"role": "king"}, {"mesh": "no such name!"}], ids=["unknown role", "bad mesh name"])
def test_bad_words_are_refused(tmp_path: Path, more: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert issue(tmp_path / "ca", tmp_path / "node", **more) != 0
    assert not (tmp_path / "node").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    assert issue(tmp_path / "ca", tmp_path / "node") == 0
    before = NodeCredentials.load(tmp_path / "node").cert_pem
    assert issue(tmp_path / "ca", tmp_path / "node") != 0
    assert NodeCredentials.load(tmp_path / "node").cert_pem == before
