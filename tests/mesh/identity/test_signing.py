"""Signed records: what is accepted, and that every change of a byte is not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, PayloadCorrupt, Unauthenticated
from mesh.identity.ca import CertificateAuthority
from mesh.identity.certificates import load_key
from mesh.identity.place import Place
from mesh.identity.signing import NodeIdentity, SignedRecord, canonical_json, verify_record

BODY = {"tokens": 17, "label": "internal", "nodes": ["edge-1"], "time_s": 0.25, "text": "naïve ✓"}


@pytest.fixture
def identity(authority: CertificateAuthority, place: Place) -> NodeIdentity:
    return NodeIdentity(place, authority.issue(place))


def test_round_trip(identity: NodeIdentity, authority: CertificateAuthority, place: Place) -> None:
    record = identity.sign(BODY)
    assert verify_record(record, authority.ca_pem) == (BODY, place)
    assert record.body == json.dumps(BODY, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_any_changed_field_is_corrupt(identity: NodeIdentity, authority: CertificateAuthority) -> None:
    record = identity.sign(BODY)
    changed = [
        replace(record, body=record.body.replace(b"17", b"18")),
        replace(record, signature=record.signature[:-1] + bytes([record.signature[-1] ^ 1])),
        replace(record, signature=b""),
        replace(record, certificate=record.certificate[:-10]),
        replace(record, certificate=b"not DER"),
    ]
    for bad in changed:
        with pytest.raises(PayloadCorrupt):
            verify_record(bad, authority.ca_pem)


def test_another_nodes_certificate_does_not_fit(
    identity: NodeIdentity, authority: CertificateAuthority, place: Place
) -> None:
    other = NodeIdentity(replace(place, node_id="edge-2"), authority.issue(replace(place, node_id="edge-2")))
    with pytest.raises(PayloadCorrupt, match="signature"):
        verify_record(
            replace(identity.sign(BODY), certificate=other.sign(BODY).certificate),
            authority.ca_pem,
        )


def test_another_authority_is_refused(identity: NodeIdentity, tmp_path: Path) -> None:
    other = CertificateAuthority.create_or_load(tmp_path / "other", "demo")
    with pytest.raises(Unauthenticated, match="not issued"):
        verify_record(identity.sign(BODY), other.ca_pem)


def test_time_of_the_record_counts(authority: CertificateAuthority, place: Place) -> None:
    then = datetime.now(UTC) - timedelta(days=400)
    # The authority is younger than the record here, so it is what refuses.
    record = NodeIdentity(place, authority.issue(place, now=then)).sign(BODY)
    with pytest.raises(Unauthenticated, match="valid from"):
        verify_record(record, authority.ca_pem)
    with pytest.raises(Unauthenticated, match="authority's"):
        verify_record(record, authority.ca_pem, at_time=then)
    short = NodeIdentity(place, authority.issue(place, lifetime=timedelta(minutes=1))).sign(BODY)
    assert verify_record(short, authority.ca_pem, at_time=datetime.now(UTC))[1] == place
    with pytest.raises(Unauthenticated, match="node's"):
        verify_record(short, authority.ca_pem, at_time=datetime.now(UTC) + timedelta(minutes=2))


@pytest.mark.parametrize(
    "raw", [b'{"a":1,"a":2}', b'{ "a": 1 }', b'{"b":1,"a":2}', b"[1]", b"not json", b"\xff", b"NaN"]
)
def test_a_signed_body_that_is_not_canonical_is_corrupt(
    authority: CertificateAuthority, place: Place, raw: bytes
) -> None:
    credentials = authority.issue(place)
    certificate = NodeIdentity(place, credentials).sign({}).certificate
    signature = load_key(credentials.key_pem, "key").sign(raw, ec.ECDSA(hashes.SHA256()))
    with pytest.raises(PayloadCorrupt):
        verify_record(SignedRecord(body=raw, signature=signature, certificate=certificate), authority.ca_pem)


@pytest.mark.parametrize(
    "body", [{"a": float("nan")}, {"a": b"bytes"}, {1: "a"}, {"a": {1: 2, "1": 3}}, {"a": "\ud800"}]
)
def test_what_json_cannot_hold_is_not_signed(identity: NodeIdentity, body: dict[Any, Any]) -> None:
    with pytest.raises(InvalidRequest):
        identity.sign(body)


def test_identity_must_match_its_certificate(authority: CertificateAuthority, place: Place) -> None:
    credentials = authority.issue(place)
    with pytest.raises(InvalidRequest, match="certificate is of"):
        NodeIdentity(replace(place, site="osaka"), credentials)
    with pytest.raises(InvalidRequest, match="do not belong together"):
        NodeIdentity(place, replace(credentials, key_pem=authority.issue(place).key_pem))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_canonical_json_is_one_encoding_per_object(body: dict[str, Any]) -> None:
    try:
        raw = canonical_json(body)
    except InvalidRequest:
        return  # a lone surrogate
    assert json.loads(raw) == body
    backwards = dict(reversed(list(body.items())))
    assert hashlib.sha256(canonical_json(backwards)).digest() == hashlib.sha256(raw).digest()
