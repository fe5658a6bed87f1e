"""Nodes that sign, and logs of receipts that they wrote."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.audit.log import AuditLog
from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place, Role, Tier
from mesh.identity.receipt import record_to_wire
from mesh.identity.signing import NodeIdentity
from mesh.v1 import common_pb2 as common


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("audit") / "ca", "toy")


@pytest.fixture(scope="session")
def node(authority: CertificateAuthority) -> Callable[..., NodeIdentity]:
    def make(node_id: str, site: str = "paris") -> NodeIdentity:
        place = Place(
            mesh="toy", role=Role.EDGE, tier=Tier.EDGE, site=site, region="eu", jurisdiction="FR", node_id=node_id
        )
        return NodeIdentity(place, authority.issue(place))

    return make


@pytest.fixture
def log_of(tmp_path: Path) -> Callable[..., AuditLog]:
    def make(signer: NodeIdentity, now_s: float | None = None) -> AuditLog:
        return AuditLog(tmp_path / signer.place.node_id, signer, now=time.time if now_s is None else lambda: now_s)

    return make


def receipt_of(
    entry: NodeIdentity,
    *legs: NodeIdentity,
    request_id: str = "r",
    tenant: str = "acme",
    label: str = "restricted",
    ended_unix_s: float | None = None,
    saw: dict[str, str] | None = None,
) -> common.Receipt:
    ended_s = time.time() if ended_unix_s is None else ended_unix_s
    signed = [n.sign({"request_id": request_id, "node": n.place.node_id, "kind": "run"}) for n in legs]
    sites = {n.place.node_id: n.place.site for n in legs} if saw is None else saw
    body: dict[str, Any] = {
        "request_id": request_id, "tenant": tenant, "entry": entry.place.uri, "outcome": "stop",
        "label": {"claimed": label, "effective": label}, "saw_prompt": sites, "held_kv": sites,
        "legs": [hashlib.sha256(leg.body).hexdigest() for leg in signed], "ended_unix_s": ended_s,
    }  # fmt: skip
    return common.Receipt(record=record_to_wire(entry.sign(body)), legs=[record_to_wire(leg) for leg in signed])
