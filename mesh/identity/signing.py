"""Signed records: canonical JSON, an ECDSA P-256 signature, and the signer's certificate, verifiable offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mesh.errors import InvalidRequest, PayloadCorrupt
from mesh.identity.ca import NodeCredentials
from mesh.identity.certificates import check_issued, load_certificate, load_key
from mesh.identity.place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """`body` is canonical JSON (UTF-8, sorted keys, no spaces), `signature` DER ECDSA-SHA256 over it,
    `certificate` the signer's, DER. One leg of a request, or the receipt over all of them."""

    body: bytes
    signature: bytes
    certificate: bytes


class NodeIdentity:
    """A node's place and the key that signs for it."""

    def __init__(self, place: Place, credentials: NodeCredentials) -> None:
        """Raises InvalidRequest if the certificate is of another place, or its key is not of the pair."""
        certificate = load_certificate(credentials.cert_pem, "the node certificate")
        self._key = load_key(credentials.key_pem, "the node key")
        if credentials.place != place:
            raise InvalidRequest(f"the certificate is of {credentials.place.uri}, not {place.uri}", field="place")
        if self._key.public_key() != certificate.public_key():
            raise InvalidRequest("the node's key and certificate do not belong together", field="credentials")
        self.place = place
        self.credentials = credentials
        self._certificate_der = certificate.public_bytes(serialization.Encoding.DER)

    def renew(self, credentials: NodeCredentials) -> None:
        """Show a newer certificate of the same key and place from now on. Raises InvalidRequest for another."""
        newer = NodeIdentity(self.place, credentials)
        self.credentials, self._key, self._certificate_der = credentials, newer._key, newer._certificate_der

    def sign(self, body: dict[str, Any]) -> SignedRecord:
        """Sign a JSON object. About 0.1 ms. Raises InvalidRequest if it does not survive JSON unchanged."""
        raw = canonical_json(body)
        signature = self._key.sign(raw, ec.ECDSA(hashes.SHA256()))
        return SignedRecord(body=raw, signature=signature, certificate=self._certificate_der)


def canonical_json(body: dict[str, Any]) -> bytes:
    """The one encoding of a JSON object that is signed. Raises InvalidRequest on NaN, foreign types and keys that
    are not strings."""
    if not _string_keys(body):
        raise InvalidRequest("a signed record's keys must be strings", field="body")
    try:
        return _dump(body)
    except (TypeError, ValueError) as error:  # UnicodeEncodeError (lone surrogates) is a ValueError
        raise InvalidRequest(f"a signed record must be plain JSON: {error}", field="body") from error


def verify_record(
    record: SignedRecord, ca_pem: bytes, *, at_time: datetime | None = None
) -> tuple[dict[str, Any], Place]:
    """The body of a record and the place of its signer, as the certificate in it says.

    `at_time` (aware; default now) is when certificates must have been valid: for an old record, its own time.
    Raises PayloadCorrupt if body, signature or certificate are damaged, Unauthenticated if the signer is not of
    this mesh or its certificate was not valid."""
    try:
        certificate = x509.load_der_x509_certificate(record.certificate)
        key = certificate.public_key()
    except (ValueError, TypeError) as error:
        raise PayloadCorrupt("the record's certificate cannot be read", field="certificate") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise PayloadCorrupt("the record's certificate is not of an ECDSA key", field="certificate")
    try:
        key.verify(record.signature, record.body, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise PayloadCorrupt("the record's signature does not match its body", field="signature") from error
    place = check_issued(certificate, load_certificate(ca_pem, "the CA"), at_time or datetime.now(UTC))
    try:
        body = json.loads(record.body)
        canonical = isinstance(body, dict) and _dump(body) == record.body
    except (ValueError, RecursionError) as error:
        raise PayloadCorrupt("the record's body is not JSON", field="body") from error
    if not canonical:
        raise PayloadCorrupt("the record's body is not a canonical JSON object", field="body")
    return body, place


def _dump(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _string_keys(body: Any) -> bool:
    """False if a key is not a string: json would turn 1 and "1" into the same key."""
    if isinstance(body, dict):
        return all(isinstance(key, str) and _string_keys(value) for key, value in body.items())
    return not isinstance(body, list | tuple) or all(_string_keys(value) for value in body)
