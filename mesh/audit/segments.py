"""The files of an audit log: which entries each holds, reading from an entry on, dropping whole ones.

A line is an entry as it was made, or (`sealed`) the same under a key: base64 after a `~`. What leaves this module is
always as it was made. Blocking; safe from any thread, one writer at a time.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.audit.chain import MAX_LINE_BYTES
from mesh.errors import PayloadCorrupt
from mesh.identity.files import sync_folder, write_error
from mesh.identity.sealing import Sealer

_SEALED = b"~"
_NAME = "audit line"
_MAX_STORED_BYTES = MAX_LINE_BYTES * 4 // 3 + 128


def segments(folder: Path) -> list[Path]:
    """The log's files in order."""
    return sorted(folder.glob("audit-*.jsonl"))


def stored(line: bytes, sealer: Sealer | None) -> bytes:
    """A line (newline included) as it goes to disk."""
    if sealer is None:
        return line
    return _SEALED + base64.b64encode(sealer.seal(line[:-1], _NAME)) + b"\n"


def made(line: bytes, sealer: Sealer | None) -> bytes:
    """A line from disk as it was made. Raises PayloadCorrupt if it is sealed and the key is not there or another."""
    if not line.startswith(_SEALED):
        return line
    if sealer is None:
        raise PayloadCorrupt("this log is sealed: its box's state key is needed to read it")
    try:
        sealed = base64.b64decode(line[1:].rstrip(b"\n"), validate=True)
    except ValueError as error:
        raise PayloadCorrupt("a sealed audit line that is damaged") from error
    return sealer.open(sealed, _NAME) + b"\n"


def read_lines(path: Path, sealer: Sealer | None, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Whole lines from a byte offset on, with the offset after each. A last line that is cut off is left out."""
    with path.open("rb") as file:
        file.seek(offset)
        while (line := file.readline(_MAX_STORED_BYTES)).endswith(b"\n"):
            yield made(line, sealer), file.tell()


def append_durably(path: Path, data: bytes | bytearray) -> None:
    """Append whole lines, synced, all or nothing: what was half written is cut off again. Raises Overloaded (the disk
    is full) or Internal."""
    try:
        with open(path, "ab", opener=_private) as file:
            size = file.tell()
            if size == 0:
                sync_folder(path.parent)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise write_error(path, error) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One file and the number of its first entry."""

    path: Path
    first_seq: int


class Segments:
    """The files of one log. Opening reads one line of each."""

    def __init__(self, folder: Path, sealer: Sealer | None) -> None:
        self._folder = folder
        self._sealer = sealer
        self._lock = threading.Lock()
        self._cursor: tuple[int, Path, int] | None = None  # entry, file, offset: where the last reading ended
        self._known = [Segment(path=p, first_seq=self._first(p)) for p in segments(folder)]

    def for_append(self, next_seq: int, segment_bytes: int) -> Path:
        """The file that the next entry goes to."""
        with self._lock:
            if self._known and _size(self._known[-1].path) < segment_bytes:
                return self._known[-1].path
            number = int(self._known[-1].path.stem.rpartition("-")[2]) + 1 if self._known else 1
            path = self._folder / f"audit-{number:06d}.jsonl"
            self._known.append(Segment(path=path, first_seq=next_seq))
            return path

    def read(self, from_seq: int, last_seq: int, max_bytes: int) -> list[bytes]:
        """Entries from `from_seq` to `last_seq` at most, as they were made; about `max_bytes`, but one at least.
        Raises PayloadCorrupt if what is asked for was dropped."""
        with self._lock:
            known, cursor = list(self._known), self._cursor
        if from_seq > last_seq:
            return []
        at = next((i for i in reversed(range(len(known))) if known[i].first_seq <= from_seq), None)
        if at is None:
            raise PayloadCorrupt(f"entry {from_seq} is no longer here: it had been merged")
        seq, offset = known[at].first_seq, 0
        if cursor is not None and cursor[0] == from_seq and cursor[1] == known[at].path:
            seq, offset = from_seq, cursor[2]
        found: list[bytes] = []
        total = 0
        for segment in known[at:]:
            for line, after in read_lines(segment.path, self._sealer, offset):
                if seq > last_seq or (found and total + len(line) > max_bytes):
                    return found
                if seq >= from_seq:
                    found.append(line)
                    total += len(line)
                    self._cursor = (seq + 1, segment.path, after)
                seq += 1
            offset = 0
        return found

    def bytes_after(self, seq: int) -> int:
        """Size of all files that hold entries after this one."""
        with self._lock:
            known = list(self._known)
        ends = [s.first_seq for s in known[1:]]
        return sum(_size(s.path) for i, s in enumerate(known) if i == len(ends) or ends[i] > seq + 1)

    def drop_up_to(self, seq: int, keep_bytes: int) -> int:
        """Delete files whose entries are all at or before `seq`, oldest first, until the rest takes at most
        `keep_bytes`; never the newest. Returns how many were deleted."""
        dropped = 0
        with self._lock:
            while len(self._known) > 1 and self._known[1].first_seq <= seq + 1:
                if sum(_size(s.path) for s in self._known) <= keep_bytes:
                    break
                os.unlink(self._known.pop(0).path)
                dropped += 1
        return dropped

    def _first(self, path: Path) -> int:
        try:
            line, _ = next(read_lines(path, self._sealer))
            return int(json.loads(line)["seq"])
        except StopIteration:
            return 0  # nothing whole is in it: the recovery says what that means
        except (ValueError, KeyError, TypeError) as exc:
            raise PayloadCorrupt(f"{path.name} does not begin with an entry") from exc


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
