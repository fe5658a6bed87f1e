"""Copies of other nodes' audit logs: what a site wrote, here too, exactly once and without a gap.

A copy is the very lines of the site's chain, so it is checked as one: each line must continue the one before, and the
first must be the beginning of a chain of that node. Offered again or out of order, a line changes nothing. A copy is a
log like any other for `kvmesh audit`. A box that began its log anew gets a new folder; the old one stays.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from mesh.audit.chain import Entry, EntryKind, Head, read_line
from mesh.audit.segments import append_durably, segments
from mesh.errors import PayloadCorrupt
from mesh.identity.files import make_private_folder, sync_folder
from mesh.identity.place import Place

SITE_LOGS_FOLDER = "site-logs"
"""Name of the folder inside placement's state folder: NODE_ID/CHAIN/audit-NNNNNN.jsonl."""
_SEGMENT_BYTES = 64 << 20


class Replica:
    """The copy of one chain. Not thread-safe; blocking. Opening reads the last file."""

    def __init__(self, folder: Path, place: Place, chain: str) -> None:
        """Raises PayloadCorrupt if the copy's last file is damaged, Overloaded or Internal if it cannot be written."""
        if not chain or not all(c in "0123456789abcdef" for c in chain) or len(chain) > 64:
            raise PayloadCorrupt(f"{place.node_id} names its log in a way that no log is named")
        self._folder = folder / place.node_id / chain
        self._place = place
        self.chain = chain
        make_private_folder(self._folder)
        for made in (self._folder.parent, folder):
            sync_folder(made)
        self.head: Head | None = self._recover()

    @property
    def next_seq(self) -> int:
        """The first entry that is not here."""
        return 0 if self.head is None else self.head.seq + 1

    def append(self, first_seq: int, lines: list[bytes]) -> int:
        """Keep what is new of these lines, which begin at entry `first_seq`; returns how many entries that were.

        Synced before it returns. Raises PayloadCorrupt if they do not continue what is here (nothing of them from
        there on is kept), Overloaded if the disk is full."""
        if first_seq > self.next_seq:
            raise PayloadCorrupt(f"{self._place.node_id} sent entry {first_seq}, the next one is {self.next_seq}")
        new = lines[self.next_seq - first_seq :]
        head, good = self.head, bytearray()
        trouble: PayloadCorrupt | None = None
        for line in new:
            try:
                entry = read_line(head, line)
                self._check(entry)
            except PayloadCorrupt as error:
                trouble = error
                break
            head, good = entry.head, good + line
        before = self.next_seq
        if good:
            append_durably(self._segment(), bytes(good))
            self.head = head
        if trouble is not None:
            raise trouble
        return self.next_seq - before

    def _check(self, entry: Entry) -> None:
        if entry.chain != self.chain:
            raise PayloadCorrupt(f"{self._place.node_id} sent an entry of another log")
        if entry.kind is EntryKind.START and entry.payload.get("node") != self._place.uri:
            raise PayloadCorrupt(f"{self._place.node_id} sent the log of {str(entry.payload.get('node'))[:200]}")

    def _segment(self) -> Path:
        found = segments(self._folder)
        if found and found[-1].stat().st_size < _SEGMENT_BYTES:
            return found[-1]
        return self._folder / f"audit-{len(found) + 1:06d}.jsonl"

    def _recover(self) -> Head | None:
        """The last whole entry on disk; what was half written is cut off, the node has it still."""
        found = segments(self._folder)
        while found:
            raw = found[-1].read_bytes()
            whole = raw.rfind(b"\n") + 1
            if whole < len(raw):
                with found[-1].open("r+b") as file:
                    file.truncate(whole)
                    os.fsync(file.fileno())
            if whole:
                return _last(raw[:whole])
            found.pop().unlink()
        return None


def _last(raw: bytes) -> Head:
    """The head after these whole lines. The copy was checked when it was written."""
    lines = raw.splitlines(keepends=True)
    if len(lines) == 1:
        return _unchecked(lines[0])
    return read_line(_unchecked(lines[-2]), lines[-1]).head


def _unchecked(line: bytes) -> Head:
    try:
        body = json.loads(line)
        return Head(chain=str(body["chain"]), seq=int(body["seq"]), digest=hashlib.sha256(line).hexdigest())
    except (ValueError, KeyError, TypeError) as exc:
        raise PayloadCorrupt("the copy of a site's log is damaged") from exc
