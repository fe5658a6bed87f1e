"""The audit log of this node on disk: appended, synced, then told as done. Writes wait for one another in batches.

Files `audit-NNNNNN.jsonl` of about SEGMENT_BYTES, one chain over all of them. After a crash a half-written last line
is cut off and an entry says so. A write that fails (disk full) raises for all that waited for it, and every later
append tries again: nothing is answered as kept that is not on disk.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mesh.audit.chain import Entry, EntryKind, Head, head_body, make_line, read_line
from mesh.errors import MeshError, PayloadCorrupt
from mesh.identity.files import make_private_folder, write_error
from mesh.identity.place import Place
from mesh.identity.signing import SignedRecord
from mesh.v1 import common_pb2 as common

AUDIT_FOLDER = "audit"
"""Name of the folder inside a process' state folder."""
SEGMENT_BYTES = 64 << 20
HEAD_EVERY = 256
"""Entries between two heads that the node signs by itself."""

_NO_NEWS = frozenset({EntryKind.HEAD, EntryKind.WITNESS})


class Signer(Protocol):
    """A node's identity."""

    @property
    def place(self) -> Place: ...

    def sign(self, body: dict[str, Any]) -> SignedRecord: ...


def segments(folder: Path) -> list[Path]:
    """The log's files in order."""
    return sorted(folder.glob("audit-*.jsonl"))


class AuditLog:
    """One per process; `append` from its event loop. Opening reads the last file once, which blocks."""

    def __init__(self, folder: Path, signer: Signer, *, now: Callable[[], float] = time.time) -> None:
        """Raises PayloadCorrupt if the last file is damaged (not just cut off), Overloaded or Internal if the folder
        cannot be written."""
        self._folder = folder
        self._signer = signer
        self._now = now
        self._waiting: list[tuple[EntryKind, dict[str, Any], asyncio.Future[Head]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._failed = False  # the last write
        self._content_seq = 0
        make_private_folder(folder)
        self._head = self._recover()
        if self._head is None:
            self._write([(EntryKind.START, {"node": signer.place.uri})])
        assert self._head is not None

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
        """Raises Overloaded or Internal while nothing can be written; after a failure each call tries again."""
        if self._failed:
            await self.append(*self._head_entry())

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
            except MeshError as error:
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
            lines += line
            heads.append(head)
        path = self._segment()
        try:
            with open(path, "ab", opener=_private) as file:
                size = file.tell()
                try:
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise write_error(path, error) from error
        crosses = self._head is not None and heads[-1].seq // HEAD_EVERY > self._head.seq // HEAD_EVERY
        self._head, self._content_seq = head, content_seq
        if crosses:
            self._write([self._head_entry()])
        return heads

    def _segment(self) -> Path:
        found = segments(self._folder)
        if found and found[-1].stat().st_size < SEGMENT_BYTES:
            return found[-1]
        return self._folder / f"audit-{len(found) + 1:06d}.jsonl"

    def _recover(self) -> Head | None:
        """The head on disk. Reads the last file only, taking its first entry's word for what is before it."""
        found = segments(self._folder)
        if not found:
            return None
        raw = found[-1].read_bytes()
        whole = raw.rfind(b"\n") + 1
        entry: Entry | None = None
        for line in raw[:whole].splitlines(keepends=True):
            entry = _first(line) if entry is None else read_line(entry.head, line)
            self._content_seq = self._content_seq if entry.kind in _NO_NEWS else entry.seq
        if whole < len(raw):
            with found[-1].open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        if entry is None:
            if len(found) > 1:
                raise PayloadCorrupt(f"{found[-1].name} has no whole entry: restore it, or move the folder away")
            return None
        self._head = entry.head
        if whole < len(raw):
            self._write([(EntryKind.RECOVERED, {"bytes": len(raw) - whole})])
        return self._head


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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
