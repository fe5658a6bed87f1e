"""Fetch a file of the mesh by its digest: resumed where it broke off, verified whole, and only then where it belongs.

What has arrived lies beside the target as `.DIGEST.part`. A crash, a cut link or a full disk leaves that, and the next
attempt goes on from its end. Nothing is at the target before every byte was hashed.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import grpc.aio

from mesh.errors import AlreadyExists, InvalidRequest, MeshError, NodeUnreachable, Overloaded, PayloadCorrupt, Retry
from mesh.identity.files import sync_folder, write_error
from mesh.rpc.errors import translate_rpc_errors
from mesh.telemetry.log import get_logger
from mesh.v1 import blobs_pb2 as pb
from mesh.v1 import blobs_pb2_grpc

log = get_logger(__name__)
KEEP_FREE_BYTES = 64 << 20
"""What a fetch leaves of a disk: receipts and state must still find room."""
_SYNC_EVERY_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")

OnProgress = Callable[[int, int], None]
"""Bytes that are here, bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """How patient a fetch is. An attempt that brought anything starts the count of attempts anew."""

    max_bytes: int = 1 << 40
    silence_s: float = 30.0
    attempts: int = 5
    pause_s: float = 1.0


async def list_blobs(dial: Callable[[], grpc.aio.Channel], *, timeout_s: float = 30.0) -> tuple[pb.Blob, ...]:
    """What the node at the other end gives. Raises NodeUnreachable and what the servicer raises."""
    async with dial() as channel:
        with translate_rpc_errors("the node that gives files"):
            answer = await blobs_pb2_grpc.BlobsStub(channel).ListBlobs(pb.ListBlobsRequest(), timeout=timeout_s)
    return tuple(answer.blobs)


async def fetch_blob(
    dial: Callable[[], grpc.aio.Channel],
    digest: str,
    target: Path,
    *,
    limits: FetchLimits | None = None,
    on_progress: OnProgress = lambda here, size: None,
) -> None:
    """The file of this digest, at `target`, whose folder must be there.

    `dial` makes a new channel for each attempt. Raises InvalidRequest (no digest), NotFound (nobody gives it),
    AlreadyExists (another process is at it), Overloaded (the disk is full; what is here is kept), PayloadCorrupt (the
    bytes are not those of the digest; they are removed) or NodeUnreachable (given up after the attempts; what is here
    is kept)."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest(f"a digest is 64 lower-case hex digits, got {digest[:80]!r}", field="digest")
    limits = limits or FetchLimits()
    part = part_of(target, digest)
    failed = 0
    while True:
        before = _size(part)
        try:
            await _attempt(dial, digest, part, limits, on_progress)
            break
        except _NoRoomError as no_room:
            raise no_room.error from no_room
        except MeshError as error:
            if error.retry not in (Retry.ELSEWHERE, Retry.BACK_OFF):
                raise
            failed = 1 if _size(part) > before else failed + 1
            if failed >= limits.attempts:
                raise
            log.warning("fetch_broke_off", reason=error.reason, error=error.message, here_bytes=_size(part))
            await asyncio.sleep(limits.pause_s * failed)
    await asyncio.to_thread(_finish, part, digest, target)


def part_of(target: Path, digest: str) -> Path:
    """Where the bytes lie that have arrived so far."""
    return target.with_name(f".{digest}.part")


class _NoRoomError(Exception):
    """The disk of this machine is full, as opposed to a peer that is busy: trying again does not help."""

    def __init__(self, error: Overloaded) -> None:
        super().__init__(error.message)
        self.error = error


async def _attempt(
    dial: Callable[[], grpc.aio.Channel], digest: str, part: Path, limits: FetchLimits, on_progress: OnProgress
) -> None:
    try:
        with await asyncio.to_thread(_open, part) as file:
            here = file.tell()
            async with dial() as channel:
                request = pb.FetchBlobRequest(digest=digest, offset_bytes=here)
                call = blobs_pb2_grpc.BlobsStub(channel).FetchBlob(request)
                try:
                    await _receive(call, file, here, limits, on_progress)
                finally:
                    call.cancel()
    except OSError as error:
        known = write_error(part, error)
        raise (_NoRoomError(known) if isinstance(known, Overloaded) else known) from error
    except InvalidRequest:  # more is here than the file has: it is not of this file
        await asyncio.to_thread(part.unlink, missing_ok=True)
        raise NodeUnreachable("what was here of the file is not of it: begun anew") from None


async def _receive(
    call: grpc.aio.UnaryStreamCall, file: BinaryIO, here: int, limits: FetchLimits, on_progress: OnProgress
) -> None:
    size, unsynced = -1, 0
    while size < 0 or here < size:
        message = await _next(call, limits.silence_s)
        if size < 0:
            size = message.size_bytes
            _check_room(Path(file.name), size, size - here, limits)
            on_progress(here, size)
        if message.size_bytes != size or here + len(message.data) > size:
            raise PayloadCorrupt("the node that gives the file says different sizes of it")
        await asyncio.to_thread(file.write, message.data)
        here += len(message.data)
        unsynced += len(message.data)
        if unsynced >= _SYNC_EVERY_BYTES:
            await asyncio.to_thread(_sync, file)
            unsynced = 0
        on_progress(here, size)
    await asyncio.to_thread(_sync, file)


async def _next(call: grpc.aio.UnaryStreamCall, silence_s: float) -> pb.FetchBlobResponse:
    try:
        async with asyncio.timeout(silence_s):
            with translate_rpc_errors("the node that gives files"):
                message = await call.read()
    except TimeoutError:
        raise NodeUnreachable(f"not a byte for {silence_s:g} s") from None
    if message is grpc.aio.EOF:
        raise NodeUnreachable("the file broke off")
    assert isinstance(message, pb.FetchBlobResponse)
    return message


def _check_room(part: Path, size: int, missing: int, limits: FetchLimits) -> None:
    if size > limits.max_bytes:
        raise InvalidRequest(f"the file has {size} bytes, the most is {limits.max_bytes}", field="size_bytes")
    free = shutil.disk_usage(part.parent).free
    if missing + KEEP_FREE_BYTES > free:
        mib = 1 << 20
        message = (
            f"{missing // mib} MiB are missing and {KEEP_FREE_BYTES // mib} MiB stay free, but the disk of "
            f"{part.parent} has {free // mib} MiB: free some; what has arrived is kept"
        )
        raise _NoRoomError(Overloaded(message, path=str(part.parent)))


def _finish(part: Path, digest: str, target: Path) -> None:
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        part.unlink()
        raise PayloadCorrupt(f"the file's SHA-256 is {found}, not {digest}: it was thrown away", field="digest")
    os.replace(part, target)
    sync_folder(target.parent)


def _open(part: Path) -> BinaryIO:
    """For this process alone, until it is closed. Raises OSError, AlreadyExists."""
    file = open(part, "ab", opener=_private)  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the descriptor, however the process ends
    except BlockingIOError:
        file.close()
        raise AlreadyExists("another process is fetching this file into the same folder", path=file.name) from None
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _size(part: Path) -> int:
    with suppress(FileNotFoundError):
        return part.stat().st_size
    return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
