"""The audit chain of one node: numbered entries of which each names the digest of the one before. Pure.

An entry is one line of canonical JSON: `chain` (drawn when the log began), `seq` from 0, `prev` (SHA-256 of the line
before, hex), `unix_s`, `kind`, `payload`. Taking out, changing or reordering lines breaks a digest. Cutting off the
end breaks none: for that a `head` is signed from time to time and given to another node, which keeps it as a
`witness` entry in its own chain (the idea of Crosby and Wallach, "Efficient Data Structures for Tamper-Evident
Logging", 2009, in its plainest form).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mesh.errors import PayloadCorrupt
from mesh.identity.signing import canonical_json

MAX_LINE_BYTES = 4 << 20
_BEFORE_ALL = "0" * 64


class EntryKind(Enum):
    """What an entry tells."""

    START = "start"  # {"node": URI}: the first of a chain
    RECOVERED = "recovered"  # {"bytes": n}: a half-written line was cut off at start-up
    RESTORED = "restored"  # {"made_unix_s", "last_seq"}: this log was put back from a backup; what came after is lost
    RECEIPT = "receipt"  # {"receipt": base64 of mesh.v1.Receipt}
    LEG = "leg"  # {"record": signed leg of this node}: work that it did for an entry
    ADMIN = "admin"  # {"actor", "action", "target", ...}: who changed what
    HEAD = "head"  # {"record": signed head of this chain}
    WITNESS = "witness"  # {"record": signed head of another node's chain}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last entry of a chain at some time."""

    chain: str
    seq: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry as read; `digest` is of its line."""

    chain: str
    seq: int
    unix_s: float
    kind: EntryKind
    payload: dict[str, Any]
    digest: str

    @property
    def head(self) -> Head:
        """This entry as the last."""
        return Head(chain=self.chain, seq=self.seq, digest=self.digest)


def make_line(before: Head | None, chain: str, unix_s: float, kind: EntryKind, payload: dict[str, Any]) -> bytes:
    """The next line, newline included. `before` None: the first of `chain`."""
    body = {
        "chain": chain,
        "seq": 0 if before is None else before.seq + 1,
        "prev": _BEFORE_ALL if before is None else before.digest,
        "unix_s": unix_s,
        "kind": kind.value,
        "payload": payload,
    }
    return canonical_json(body) + b"\n"


def read_line(before: Head | None, line: bytes) -> Entry:
    """Check that a line (newline included) follows `before`, and read it. Raises PayloadCorrupt, which says why."""
    at = f"entry {0 if before is None else before.seq + 1}"
    if not line.endswith(b"\n") or len(line) > MAX_LINE_BYTES:
        raise PayloadCorrupt(f"{at} is cut off or too long")
    try:
        body = json.loads(line)
        entry = Entry(
            chain=body["chain"],
            seq=body["seq"],
            unix_s=float(body["unix_s"]),
            kind=EntryKind(body["kind"]),
            payload=body["payload"],
            digest=hashlib.sha256(line).hexdigest(),
        )
        prev = body["prev"]
        canonical = canonical_json(body) + b"\n" == line and isinstance(entry.payload, dict)
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise PayloadCorrupt(f"{at} cannot be read ({type(exc).__name__})") from exc
    if not canonical:
        raise PayloadCorrupt(f"{at} is not as it was written")
    if before is None:
        if entry.seq != 0 or prev != _BEFORE_ALL or entry.kind is not EntryKind.START:
            raise PayloadCorrupt("the first entry is not the beginning of a chain: what was before it is missing")
    elif entry.chain != before.chain or entry.seq != before.seq + 1:
        raise PayloadCorrupt(f"after entry {before.seq} comes entry {entry.seq} of chain {str(entry.chain)[:16]}")
    elif prev != before.digest:
        raise PayloadCorrupt(f"{at} does not continue the one before: one of the two was changed")
    return entry


def head_body(node: str, head: Head, unix_s: float) -> dict[str, Any]:
    """What is signed of a head; `node` is the chain's owner as a URI."""
    return {
        "audit_head": {"node": node, "chain": head.chain, "seq": head.seq, "digest": head.digest},
        "unix_s": unix_s,
    }


def head_of_body(body: dict[str, Any]) -> tuple[str, Head, float]:
    """Owner, head and time of a signed body. Raises PayloadCorrupt."""
    try:
        told = body["audit_head"]
        head = Head(chain=str(told["chain"]), seq=int(told["seq"]), digest=str(told["digest"]))
        return str(told["node"]), head, float(body["unix_s"])
    except (KeyError, TypeError, ValueError) as exc:
        raise PayloadCorrupt("a signed head without its fields") from exc
