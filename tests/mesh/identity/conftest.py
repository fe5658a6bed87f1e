"""Authorities and places that the identity tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place, Role, Tier


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path / "ca", "demo")


@pytest.fixture
def place() -> Place:
    return Place(
        mesh="demo", role=Role.EDGE, tier=Tier.EDGE, site="paris", region="eu-west", jurisdiction="FR", node_id="edge-1"
    )
