"""The audit log of this node on disk: appended, synced, then told as done. Writes wait for one another in batches.

Files `audit-NNNNNN.jsonl` (segments.py), one chain over all of them. After a crash a half-written last line is cut off
and an entry says so. A write that fails (disk full) raises for all that waited for it, and every later append tries
again: nothing is answered as kept that is not on disk.

On a site the log is also the spool of what the mesh has yet to hear. Entries are never dropped for want of room:
`check` refuses new work while too much waits to be merged or the disk is nearly full. What was merged is kept as long
as there is room for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh.audit.chain import Entry, EntryKind, Head, head_body, make_line, read_line
from mesh.audit.segments import Segments, append_durably, made, segments, stored
from mesh.errors import Internal, MeshError, Overloaded, PayloadCorrupt
from mesh.identity.files import make_private_folder, write_private
from mesh.identity.place import Place
from mesh.identity.sealing import Sealer
from mesh.identity.signing import SignedRecord
from mesh.telemetry.log import get_logger
from mesh.v1 import common_pb2 as common

log = get_logger(__name__)
AUDIT_FOLDER = "audit"
"""Name of the folder inside a process' state folder."""
SEGMENT_BYTES = 64 << 20
HEAD_EVERY = 256
"""Entries between two heads that the node signs by itself."""

_MERGED_FILE = "merged.json"
_MIB = 1 << 20
_NO_NEWS = frozenset({EntryKind.HEAD, EntryKind.WITNESS})

__all__ = ["AUDIT_FOLDER", "HEAD_EVERY", "SEGMENT_BYTES", "AuditLog", "LogLimits", "segments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """How much a log may take. None: no limit."""

    segment_bytes: int | None = None  # of one file; None: SEGMENT_BYTES
    most_unmerged_bytes: int | None = None  # from here on `check` refuses new work
    keep_merged_bytes: int | None = None  # of files that the mesh has
    keep_free_bytes: int = 0  # of the disk, for what is running when it gets full


class Signer(Protocol):
    """A node's identity."""

    @property
    def place(self) -> Place: ...

    def sign(self, body: dict[str, Any]) -> SignedRecord: ...


class AuditLog:
    """One per process; `append` from its event loop. Opening reads the last file once, which blocks."""

    def __init__(
        self,
        folder: Path,
        signer: Signer,
        *,
        now: Callable[[], float] = time.time,
        limits: LogLimits | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        """Raises PayloadCorrupt if the last file is damaged (not just cut off) or sealed with another key, Overloaded
        or Internal if the folder cannot be written."""
        self._folder = folder
        self._signer = signer
        self._now = now
        self._limits = limits or LogLimits()
        self._sealer = sealer
        self._waiting: list[tuple[EntryKind, dict[str, Any], asyncio.Future[Head]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._failed = False  # the last write
        self._content_seq = 0
        self._head: Head | None = None
        make_private_folder(folder)
        cut_bytes = self._recover()
        self._segments = Segments(folder, sealer)
        if self._head is None:
            self._write([(EntryKind.START, {"node": signer.place.uri})])
        elif cut_bytes:
            self._write([(EntryKind.RECOVERED, {"bytes": cut_bytes})])
        assert self._head is not None
        self._merged_seq: int = self._read_merged(self._head)

    @property
    def head(self) -> Head:
        """The last entry on disk."""
        assert self._head is not None
        return self._head

    def news_since(self, kept: Head | None) -> bool:
        """Whether a node that keeps this head of ours should get a newer one. Heads and witnesses are no news: else
        two nodes would tell each other of their telling for ever."""
        return kept is None or kept.chain != self.head.chain or kept.seq < self._content_seq

    def sign_head(self) -> SignedRecord:
        """The last entry on disk, signed: for another node to keep."""
        return self._signer.sign(head_body(self._signer.place.uri, self.head, self._now()))

    async def append(self, kind: EntryKind, payload: dict[str, Any]) -> Head:
        """Write one entry and wait until it is on disk. Raises Overloaded (disk full) or Internal, and it is not."""
        done: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, payload, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._drain(), name="audit-log")
        return await asyncio.shield(done)

    async def append_receipt(self, receipt: common.Receipt) -> Head:
        """See `append`."""
        raw = base64.b64encode(receipt.SerializeToString(deterministic=True)).decode()
        return await self.append(EntryKind.RECEIPT, {"receipt": raw})

    async def append_leg(self, leg: SignedRecord) -> Head:
        """Keep this node's own report of a leg. See `append`."""
        return await self.append(EntryKind.LEG, {"record": record_to_json(leg)})

    async def check(self) -> None:
        """Raises Overloaded or Internal while new work should not begin: nothing can be written (after a failure each
        call tries again), the disk is nearly full, or too much waits for the mesh."""
        if self._failed:
            await self.append(*self._head_entry())
        limits = self._limits
        if limits.keep_free_bytes and (free := shutil.disk_usage(self._folder).free) < limits.keep_free_bytes:
            raise Overloaded(
                f"the disk has {free // _MIB} MiB left, {limits.keep_free_bytes // _MIB} MiB are for the receipts of "
                "requests that run: nothing new until some is free",
                path=str(self._folder),
            )
        if limits.most_unmerged_bytes is not None and self.unmerged_bytes >= limits.most_unmerged_bytes:
            raise Overloaded(
                f"{self.unmerged_bytes // _MIB} MiB of receipts wait for the mesh, the most is "
                f"{limits.most_unmerged_bytes // _MIB} MiB: nothing new until the mesh was reached",
                path=str(self._folder),
            )

    @property
    def unmerged_bytes(self) -> int:
        """Size of what the mesh has yet to hear, in whole files."""
        return 0 if self.head.seq <= self._merged_seq else self._segments.bytes_after(self._merged_seq)

    def read(self, from_seq: int, max_bytes: int) -> list[bytes]:
        """Lines of the entries from `from_seq` on, as they were made; at least one, if there is one. Blocking. Raises
        PayloadCorrupt for what was let go."""
        return self._segments.read(from_seq, self.head.seq, max_bytes)

    def merged(self, seq: int) -> None:
        """The mesh keeps the entries up to this one: they may be let go. Blocking; an older number is no news."""
        seq = min(seq, self.head.seq)
        if seq <= self._merged_seq:
            return
        try:
            write_private(self._folder / _MERGED_FILE, json.dumps({"chain": self.head.chain, "seq": seq}).encode())
        except MeshError:
            pass  # a full disk: it is told again
        self._merged_seq = seq
        if self._limits.keep_merged_bytes is not None:
            self._segments.drop_up_to(seq, self._limits.keep_merged_bytes)

    async def append_witness(self, record: SignedRecord) -> Head:
        """Keep another node's signed head; the caller has verified it."""
        return await self.append(EntryKind.WITNESS, {"record": record_to_json(record)})

    async def close(self) -> None:
        """Write what waits, and a signed head. Errors are the appenders' to tell."""
        if self._writer is not None:
            await self._writer
        try:
            await asyncio.to_thread(self._write, [self._head_entry()])
        except MeshError:
            pass  # the disk is full: the chain ends with its last entry

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                heads = await asyncio.to_thread(self._write, [(kind, payload) for kind, payload, _ in batch])
            except Exception as exc:  # whatever it is: nobody waits for an entry that is never written
                error = exc if isinstance(exc, MeshError) else _by_bug(exc)
                self._failed = True
                for _, _, done in batch:
                    if not done.done():
                        done.set_exception(type(error)(error.message))
            else:
                self._failed = False
                for (_, _, done), head in zip(batch, heads, strict=True):
                    if not done.done():
                        done.set_result(head)

    def _head_entry(self) -> tuple[EntryKind, dict[str, Any]]:
        return EntryKind.HEAD, {"record": record_to_json(self.sign_head())}

    def _write(self, entries: list[tuple[EntryKind, dict[str, Any]]]) -> list[Head]:
        """All or nothing: what was half written is cut off again. Blocks for the sync."""
        lines, heads, head, content_seq = bytearray(), list[Head](), self._head, self._content_seq
        chain = head.chain if head is not None else secrets.token_hex(8)
        for kind, payload in entries:
            line = make_line(head, chain, self._now(), kind, payload)
            head = read_line(head, line).head
            content_seq = content_seq if kind in _NO_NEWS else head.seq
            lines += stored(line, self._sealer)
            heads.append(head)
        path = self._segments.for_append(
            0 if self._head is None else self._head.seq + 1, self._limits.segment_bytes or SEGMENT_BYTES
        )
        append_durably(path, lines)
        crosses = self._head is not None and heads[-1].seq // HEAD_EVERY > self._head.seq // HEAD_EVERY
        self._head, self._content_seq = head, content_seq
        if crosses:
            self._write([self._head_entry()])
        return heads

    def _recover(self) -> int:
        """Find the head on disk; returns the size of what was half written and is cut off. Reads the last file only,
        taking its first entry's word for what is before it."""
        found, cut_bytes = segments(self._folder), 0
        while found:
            raw = found[-1].read_bytes()
            whole = raw.rfind(b"\n") + 1
            cut_bytes += len(raw) - whole
            if whole or len(found) == 1:
                break
            found.pop().unlink()  # a file that was begun, with nothing in it that was ever told as kept
        if not found:
            return 0
        entry: Entry | None = None
        for line in raw[:whole].splitlines(keepends=True):
            line = made(line, self._sealer)
            entry = _first(line) if entry is None else read_line(entry.head, line)
            self._content_seq = self._content_seq if entry.kind in _NO_NEWS else entry.seq
        if whole < len(raw):
            with found[-1].open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        self._head = None if entry is None else entry.head
        return cut_bytes

    def _read_merged(self, head: Head) -> int:
        """The last entry that the mesh is known to keep; -1: none. Believed for this chain only."""
        try:
            told = json.loads((self._folder / _MERGED_FILE).read_bytes())
            return min(int(told["seq"]), head.seq) if told["chain"] == head.chain else -1
        except (OSError, ValueError, KeyError, TypeError):
            return -1


def _by_bug(error: Exception) -> MeshError:
    log.error("audit_log_failed_by_bug", exc_info=error)
    return Internal(f"the audit log could not be written: {type(error).__name__}")


def _first(line: bytes) -> Entry:
    """The first entry of a file: of a chain that may have begun in an earlier one."""
    try:
        body = json.loads(line)
        before = None if body["seq"] == 0 else Head(chain=body["chain"], seq=body["seq"] - 1, digest=body["prev"])
    except (ValueError, KeyError, TypeError) as exc:
        raise PayloadCorrupt("the audit log's last file does not begin with an entry") from exc
    return read_line(before, line)


def record_to_json(record: SignedRecord) -> dict[str, str]:
    """A signed record inside an entry."""
    parts = {"body": record.body, "signature": record.signature, "certificate": record.certificate}
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


def record_from_json(value: Any) -> SignedRecord:
    """Raises PayloadCorrupt."""
    try:
        return SignedRecord(
            **{name: base64.b64decode(value[name], validate=True) for name in ("body", "signature", "certificate")}
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise PayloadCorrupt("a signed record that cannot be read") from exc
