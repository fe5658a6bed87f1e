"""Verifying the receipt of a request, offline: signatures, chain to the mesh CA, and that the legs belong to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mesh.errors import PayloadCorrupt
from mesh.identity.place import Place
from mesh.identity.signing import SignedRecord, verify_record
from mesh.v1 import common_pb2 as common


def record_to_wire(record: SignedRecord) -> common.SignedRecord:
    """Dataclass to protobuf."""
    return common.SignedRecord(body=record.body, signature=record.signature, certificate=record.certificate)


def record_from_wire(record: common.SignedRecord) -> SignedRecord:
    """Protobuf to dataclass."""
    return SignedRecord(body=record.body, signature=record.signature, certificate=record.certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedReceipt:
    """A receipt whose signatures, chain to the CA and digests are right."""

    body: dict[str, Any]
    entry: Place
    legs: tuple[tuple[dict[str, Any], Place], ...]


def verify_receipt(receipt: common.Receipt, ca_pem: bytes, *, at_time: datetime | None = None) -> VerifiedReceipt:
    """Check a receipt offline. `at_time` (aware; default now): when certificates must have been valid.

    Raises PayloadCorrupt (a signature or digest is wrong, a leg is missing or of another node or request) or
    Unauthenticated (certificate not of this CA)."""
    body, entry = verify_record(record_from_wire(receipt.record), ca_pem, at_time=at_time)
    digests = [hashlib.sha256(leg.body).hexdigest() for leg in receipt.legs]
    if digests != body.get("legs"):
        raise PayloadCorrupt("the receipt's legs are not those that the entry signed")
    legs = tuple(verify_record(record_from_wire(leg), ca_pem, at_time=at_time) for leg in receipt.legs)
    for leg, place in legs:
        if leg.get("request_id") != body["request_id"] or leg.get("node") != place.node_id:
            raise PayloadCorrupt(f"a leg signed by {place.node_id} speaks for another node or request")
    if entry.uri != body["entry"]:
        raise PayloadCorrupt("the receipt was signed by another node than its entry")
    return VerifiedReceipt(body=body, entry=entry, legs=legs)
