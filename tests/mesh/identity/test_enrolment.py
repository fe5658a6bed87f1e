"""Tokens and site records: good once, for one key, for a while; what is refused and how."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from mesh.errors import AlreadyExists, InvalidRequest, NotFound, PayloadCorrupt, PolicyDenied, Unauthenticated
from mesh.identity.enrolment import (
    MOST_ATTEMPTS,
    Box,
    SiteRecord,
    Terms,
    Token,
    TokenRecord,
    site_named,
    site_of_token,
)
from mesh.identity.requests import key_digest, new_key_pem, requested_key, signing_request

NOW = 1_000_000.0
CA = "ab" * 32


def paris() -> tuple[SiteRecord, Token, TokenRecord]:
    site = SiteRecord(site="paris", region="eu-west", jurisdiction="FR", created_unix_s=NOW)
    return site.with_token(Terms(node_id="edge-paris", valid_s=3600.0), CA, NOW)


def box(key: str, node_id: str = "edge-paris") -> Box:
    return Box(
        node_id=node_id, key=key, joined_unix_s=NOW, joined_from="ipv4:192.0.2.7", not_after_unix_s=NOW, clock_skew_s=0
    )


def test_a_token_reads_back_and_its_secret_is_kept_as_a_hash_only() -> None:
    site, token, record = paris()
    assert Token.parse(f" {token}\n") == token
    assert token.ca_sha256 == CA
    assert token.secret not in site.to_json().decode()
    assert token.secret not in repr(token)
    assert SiteRecord.from_json(site.to_json()) == site
    assert site.check_token(token, "key-1", NOW) == record


@pytest.mark.parametrize("text", ["", "kvj_1", "kvm_0123456789abcdef_x", "kvj_" + "0" * 200])
def test_what_is_no_whole_token_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Token.parse(text)
    assert not text or text not in refusal.value.message


def test_a_used_token_is_refused_for_another_key_and_taken_again_for_the_same() -> None:
    site, token, record = paris()
    used = site.with_box(record, box("key-1"), NOW)
    assert used.check_token(token, "key-1", NOW + 60).used_by == "key-1"
    with pytest.raises(AlreadyExists, match="used 5 min ago by a box with another key"):
        used.check_token(token, "key-2", NOW + 300)


@pytest.mark.parametrize(
    "names",
    [
        {"dns_names": ("a" * 254,)},
        {"dns_names": ("",)},
        {"dns_names": ("box\0.kvmesh.internal",)},
        {"dns_names": ("box.example/x",)},
        {"ip_addresses": ("999.1.1.1",)},
        {"ip_addresses": ("1" * 1_000_000,)},
    ],
)
def test_names_of_a_token_are_held_to_what_a_certificate_takes(names: dict[str, tuple[str, ...]]) -> None:
    Terms(node_id="edge-paris", dns_names=("box.example", "*.box.example", "box_1"), ip_addresses=("192.0.2.7", "::1"))
    with pytest.raises(InvalidRequest) as refusal:
        Terms(node_id="edge-paris", **names)  # type: ignore[arg-type]
    assert len(refusal.value.message) < 200


def test_an_expired_token_says_so() -> None:
    site, token, _ = paris()
    with pytest.raises(Unauthenticated, match="expired 60 s ago"):
        site.check_token(token, "key-1", NOW + 3660)


def test_wrong_secrets_are_counted_and_then_the_right_one_is_refused_too() -> None:
    site, token, _ = paris()
    guess = replace(token, secret="x" * 43)
    for _ in range(MOST_ATTEMPTS):
        with pytest.raises(Unauthenticated):
            site.check_token(guess, "key-1", NOW)
        site = site.with_wrong_attempt(guess)
    with pytest.raises(Unauthenticated):
        site.check_token(token, "key-1", NOW)
    assert site.with_wrong_attempt(token) == site  # a right secret costs none


def test_a_revoked_site_takes_no_token_and_no_box() -> None:
    site, token, record = paris()
    used = site.with_box(record, box("key-1"), NOW)
    place = used.place("m", "edge-paris")
    used.check_box(place, "key-1")
    revoked = used.revoked(NOW + 1)
    assert revoked.revoked(NOW + 9).revoked_unix_s == NOW + 1
    with pytest.raises(PolicyDenied) as refusal:
        revoked.check_box(place, "key-1")
    assert refusal.value.details["rule"] == "site_revoked"
    with pytest.raises(Unauthenticated):
        revoked.check_token(token, "key-1", NOW)
    with pytest.raises(PolicyDenied):
        revoked.with_token(Terms(node_id="edge-paris"), CA, NOW)
    with pytest.raises(PolicyDenied):
        revoked.with_expiry("edge-paris", "key-1", NOW)


def test_a_box_that_was_replaced_is_refused_and_one_that_joined_otherwise_is_not() -> None:
    site, _, record = paris()
    place = site.place("m", "edge-paris")
    site.check_box(place, "anything")  # `kvmesh ca issue`
    old = site.with_box(record, box("old"), NOW)
    changed, _, second = old.with_token(Terms(node_id="edge-paris"), CA, NOW)
    replaced = changed.with_box(second, box("new"), NOW)
    replaced.check_box(place, "new")
    with pytest.raises(PolicyDenied, match="given to another box"):
        replaced.check_box(place, "old")
    assert [b.key for b in replaced.boxes] == ["new"]


@pytest.mark.parametrize("valid_s", [0.0, 59.0, 604_801.0, float("nan")])
def test_terms_are_bounded(valid_s: float) -> None:
    with pytest.raises(InvalidRequest):
        Terms(node_id="edge-paris", valid_s=valid_s)


def test_sites_are_found_by_name_and_token() -> None:
    site, token, _ = paris()
    assert site_of_token((site,), token) is site
    assert site_named((site,), "paris") is site
    with pytest.raises(Unauthenticated):
        site_of_token((), token)
    with pytest.raises(NotFound):
        site_named((site,), "osaka")


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"format":1}', b'{"format":2,"tokens":[],"boxes":[]}', b"\xff"])
def test_a_damaged_record_is_told(raw: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        SiteRecord.from_json(raw)


def test_a_request_proves_its_key() -> None:
    csr = signing_request(new_key_pem())
    key = requested_key(csr)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert len(key_digest(key)) == 64
    for bad in (b"", csr[:-1], csr[:-3] + b"\0\0\0", b"\x30" * 5000):
        with pytest.raises(InvalidRequest):
            requested_key(bad)
