"""Verifying audit logs offline: chains, signatures, and what one node's log says of another's.

What a report vouches for: every entry up to the last head that is signed (`signed_seq`), and against a node that
cuts off its own tail, up to the last head that another node keeps (`witnessed_seq`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from mesh.audit.chain import Entry, EntryKind, Head, head_of_body, read_line
from mesh.audit.log import record_from_json
from mesh.audit.segments import read_lines, segments
from mesh.errors import InvalidRequest, MeshError, PayloadCorrupt
from mesh.identity.place import Place
from mesh.identity.receipt import VerifiedReceipt, verify_receipt
from mesh.identity.sealing import Sealer
from mesh.identity.signing import canonical_json, verify_record
from mesh.v1 import common_pb2 as common


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """A head of `node` that `witness` keeps."""

    node: str
    head: Head
    witness: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLeg:
    """A leg that a node kept in its own log. `digest`: SHA-256 of its signed body, hex, as receipts name it."""

    seq: int
    unix_s: float  # of the entry
    body: dict[str, Any]
    place: Place
    digest: str


@dataclass(kw_only=True)
class LogReport:
    """One node's log. Times are those of entries; -1: none."""

    folder: Path
    node: str = ""
    n_entries: int = 0
    n_receipts: int = 0
    first_unix_s: float = -1.0
    signed_seq: int = -1
    signed_unix_s: float = -1.0
    witnessed_seq: int = -1
    witnessed_unix_s: float = -1.0
    problems: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # by seq
    times: list[float] = field(default_factory=list)  # by seq, Unix seconds
    witnessed: list[Witnessed] = field(default_factory=list)  # heads of others that this log keeps
    receipts: list[tuple[int, VerifiedReceipt]] = field(default_factory=list)  # seq, receipt
    legs: list[LoggedLeg] = field(default_factory=list)  # of this node itself

    @cached_property
    def leg_digests(self) -> frozenset[str]:
        """Of all legs; once the log has been read."""
        return frozenset(leg.digest for leg in self.legs)

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


def verify_logs(folders: Iterable[Path], ca_pem: bytes, sealer: Sealer | None = None) -> list[LogReport]:
    """Each log by itself, then what they say of one another. `sealer`: of the box whose sealed log is among them.
    Raises InvalidRequest for a folder without a log, PayloadCorrupt for a sealed one without its key."""
    reports = [verify_log(folder, ca_pem, sealer) for folder in folders]
    by_node: dict[str, list[LogReport]] = {}
    for report in reports:
        by_node.setdefault(report.node, []).append(report)
    for witness in reports:
        for seen in witness.witnessed:
            for report in by_node.get(seen.node, ()):
                _check_witness(report, seen)
    for report in reports:
        for seq, receipt in report.receipts:
            for leg, place in receipt.legs:
                for log in by_node.get(place.uri, ()):
                    _check_leg(log, leg, f"entry {seq} of {report.node}")
    return reports


def verify_log(folder: Path, ca_pem: bytes, sealer: Sealer | None = None) -> LogReport:
    """One log. Stops at the first entry that breaks the chain; wrong receipts and heads are listed and passed."""
    report, before = LogReport(folder=folder), None
    for line in _lines(folder, sealer):
        try:
            entry = read_line(before, line)
        except PayloadCorrupt as error:
            report.problems.append(f"{error.message}; nothing after it is vouched for")
            break
        before = entry.head
        try:
            _take(report, entry, ca_pem)
        except MeshError as error:
            report.problems.append(f"entry {entry.seq}: {error.message}")
    return report


def _lines(folder: Path, sealer: Sealer | None) -> Iterator[bytes]:
    files = segments(folder)
    if not files:
        raise InvalidRequest(f"no audit log in {folder}", field="folder")
    for path in files:
        read_bytes = 0
        for line, after in read_lines(path, sealer):
            yield line
            read_bytes = after
        if read_bytes < path.stat().st_size:
            yield b""  # something is there that is no whole line


def _take(report: LogReport, entry: Entry, ca_pem: bytes) -> None:
    """One entry of an intact chain. Raises MeshError if what it holds is not right."""
    report.n_entries += 1
    report.digests.append(entry.digest)
    report.times.append(entry.unix_s)
    match entry.kind:
        case EntryKind.START:
            report.node, report.first_unix_s = str(entry.payload.get("node")), entry.unix_s
        case EntryKind.RECEIPT:
            report.n_receipts += 1
            verified = _receipt(entry, ca_pem)
            if verified.entry.uri != report.node:
                raise PayloadCorrupt(f"a receipt of {verified.entry.uri} in the log of {report.node}")
            report.receipts.append((entry.seq, verified))
        case EntryKind.LEG:
            report.legs.append(_leg(report, entry, ca_pem))
        case EntryKind.HEAD:
            node, head, unix_s, signer = _head(entry, ca_pem)
            if (node, signer) != (report.node, report.node) or not _holds(report, head):
                raise PayloadCorrupt(f"a signed head of entry {head.seq} that this chain does not have")
            report.signed_seq, report.signed_unix_s = max(report.signed_seq, head.seq), unix_s
        case EntryKind.WITNESS:
            node, head, _, signer = _head(entry, ca_pem)
            if node != signer:
                raise PayloadCorrupt(f"a head of {node} that {signer} signed")
            report.witnessed.append(Witnessed(node=node, head=head, witness=report.node))
        case EntryKind.ADMIN | EntryKind.RECOVERED | EntryKind.RESTORED:
            pass


def _receipt(entry: Entry, ca_pem: bytes) -> VerifiedReceipt:
    try:
        receipt = common.Receipt.FromString(base64.b64decode(entry.payload["receipt"], validate=True))
    except (KeyError, ValueError, TypeError, DecodeError) as exc:
        raise PayloadCorrupt("a receipt that cannot be read") from exc
    return verify_receipt(receipt, ca_pem, at_time=_time(entry))


def _leg(report: LogReport, entry: Entry, ca_pem: bytes) -> LoggedLeg:
    record = record_from_json(entry.payload.get("record"))
    body, place = verify_record(record, ca_pem, at_time=_time(entry))
    if place.uri != report.node or body.get("node") != place.node_id:
        raise PayloadCorrupt(f"a leg of {place.uri} in the log of {report.node}")
    if any(not isinstance(body.get(name), str) for name in ("request_id", "tenant", "label", "kind", "outcome")):
        raise PayloadCorrupt("a leg without its fields")
    digest = hashlib.sha256(record.body).hexdigest()
    return LoggedLeg(seq=entry.seq, unix_s=entry.unix_s, body=body, place=place, digest=digest)


def _check_leg(log: LogReport, leg: dict[str, Any], where: str) -> None:
    """A leg that a receipt shows must be in the log of the node that signed it, if that node kept legs by then."""
    if not log.legs or float(leg.get("ended_unix_s", 0.0)) < log.legs[0].unix_s:
        return
    if hashlib.sha256(canonical_json(leg)).hexdigest() not in log.leg_digests:
        log.problems.append(f"a leg of {leg.get('request_id')} that {where} shows is not in this log: it was left out")


def _head(entry: Entry, ca_pem: bytes) -> tuple[str, Head, float, str]:
    body, place = verify_record(record_from_json(entry.payload.get("record")), ca_pem, at_time=_time(entry))
    return (*head_of_body(body), place.uri)


def _time(entry: Entry) -> datetime:
    """Certificates must have been valid when the entry was made."""
    try:
        return datetime.fromtimestamp(entry.unix_s, UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise PayloadCorrupt("an impossible time") from exc


def _holds(report: LogReport, head: Head) -> bool:
    return 0 <= head.seq < len(report.digests) and report.digests[head.seq] == head.digest


def _check_witness(report: LogReport, seen: Witnessed) -> None:
    if seen.head.seq >= len(report.digests):
        report.problems.append(
            f"{seen.witness} keeps a head of entry {seen.head.seq}, but this log ends at entry "
            f"{report.n_entries - 1}: its end was cut off"
        )
    elif not _holds(report, seen.head):
        report.problems.append(
            f"{seen.witness} keeps another entry {seen.head.seq} than this log has: it was rewritten"
        )
    elif seen.head.seq > report.witnessed_seq and seen.witness != report.node:
        report.witnessed_seq, report.witnessed_unix_s = seen.head.seq, report.times[seen.head.seq]
