"""Signed records: canonical JSON, an ECDSA P-256 signature, and the signer's certificate, verifiable offline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """`body` is canonical JSON (UTF-8, sorted keys, no spaces), `signature` DER ECDSA-SHA256 over it,
    `certificate` the signer's, DER. One leg of a request, or the receipt over all of them."""

    body: bytes
    signature: bytes
    certificate: bytes
