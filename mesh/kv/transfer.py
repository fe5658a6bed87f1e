"""Sender and receiver of a KV transfer as state machines without I/O.

Frames go in, frames and effects come out; who owns a machine does the I/O. The order of frames is one table per
side, and a frame that the table does not have is refused. Any deviation (order, digest, size, gap, more than was
announced) raises, the machine is dead after it, and nothing unverified ever comes out of a receiver.

This module knows nothing of engines, codecs or networks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from mesh.errors import InvalidRequest, MeshError, PayloadCorrupt
from mesh.identity.signing import SignedRecord
from mesh.kv.chunks import CHUNK_TOKENS, DIGEST_BYTES, PIECE_BYTES, digest_of
from mesh.kv.manifest import KvManifest
from mesh.kv.transfer_frames import (
    Abort,
    Chunk,
    ChunkVerified,
    Commit,
    Committed,
    Done,
    Effect,
    Frame,
    Offer,
    Offered,
    Piece,
    Want,
)


class State(Enum):
    """Where a transfer is, the same on both sides. `IN_CHUNK`: announced bytes are still missing."""

    START = "start"
    WANTED = "wanted"
    BETWEEN_CHUNKS = "between_chunks"
    IN_CHUNK = "in_chunk"
    COMMITTED = "committed"
    DONE = "done"
    FAILED = "failed"


# What may happen when. The last piece of a chunk leads back to BETWEEN_CHUNKS; which one that is, is counted.
_TRANSITIONS: Mapping[tuple[State, type[Frame]], State] = {
    (State.START, Want): State.WANTED,
    (State.WANTED, Offer): State.BETWEEN_CHUNKS,
    (State.BETWEEN_CHUNKS, Chunk): State.IN_CHUNK,
    (State.IN_CHUNK, Piece): State.IN_CHUNK,
    (State.BETWEEN_CHUNKS, Commit): State.COMMITTED,
    (State.COMMITTED, Done): State.DONE,
}


class _Machine:
    """The table, and death by the first error."""

    def __init__(self) -> None:
        self.state = State.START

    def _step(self, frame: Frame) -> None:
        try:
            self.state = _TRANSITIONS[self.state, type(frame)]
        except KeyError:
            self._fail(
                InvalidRequest(
                    f"{type(frame).__name__.lower()} is out of order in a KV transfer that is {self.state.value}",
                    field="frame",
                )
            )

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            self._fail(PayloadCorrupt(message))

    def _fail(self, error: MeshError) -> None:
        self.state = State.FAILED
        raise error

    def _receive_abort(self, frame: Frame) -> None:
        if isinstance(frame, Abort):
            self._fail(frame.error())


class Sender(_Machine):
    """The side that has the KV. Owner: receive(Want), offer, (chunk)*, commit, receive(Done)."""

    def __init__(self, *, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._wanted: Want | None = None
        self._chunk_digests = hashlib.sha256()
        self._n_chunks = 0
        self.position = 0  # the next to ship; after Want the receiver's
        self.first_wanted = 0
        self.wire_bytes = 0

    @property
    def wanted(self) -> Want:
        """What the receiver said of itself; from State.WANTED on."""
        assert self._wanted is not None
        return self._wanted

    def offer(self, manifest: KvManifest) -> Offer:
        """Answer a Want that was compared."""
        frame = Offer(manifest)
        self._step(frame)
        return frame

    def receive(self, frame: Frame) -> None:
        """Take Want, Done or Abort. Raises what the peer's Abort says, InvalidRequest or PayloadCorrupt."""
        self._receive_abort(frame)
        if not isinstance(frame, Want | Done):
            self._fail(InvalidRequest(f"a receiver sends no {type(frame).__name__.lower()}", field="frame"))
        self._step(frame)
        if isinstance(frame, Want):
            self._check(
                0 <= frame.from_position <= self._max_tokens,
                f"the receiver wants position {frame.from_position} of at most {self._max_tokens}",
            )
            self._wanted = frame
            self.position = self.first_wanted = frame.from_position
        elif isinstance(frame, Done):
            self._check(
                frame.tokens == self.position, f"the receiver has {frame.tokens} tokens, {self.position} were sent"
            )

    def chunk(self, stop: int, data: bytes, *, digest: bytes, prefix_hash: bytes) -> Iterator[Chunk | Piece]:
        """Frames that carry positions [self.position, stop). Take them all before the next call; each piece's
        digest is computed when it is taken."""
        frame = Chunk(
            index=self._n_chunks,
            start=self.position,
            stop=stop,
            size_bytes=len(data),
            digest=digest,
            prefix_hash=prefix_hash,
        )
        self._step(frame)
        yield frame
        view = memoryview(data)
        for at in range(0, len(data), PIECE_BYTES):
            part = bytes(view[at : at + PIECE_BYTES])
            piece = Piece(chunk_index=frame.index, offset_bytes=at, data=part, digest=digest_of(part))
            self._step(piece)
            yield piece
        self.state = State.BETWEEN_CHUNKS
        self._chunk_digests.update(digest)
        self._n_chunks += 1
        self.position = stop
        self.wire_bytes += len(data)

    def commit(self, leg: SignedRecord | None = None) -> Commit:
        frame = Commit(chunks=self._n_chunks, stop=self.position, digest=self._chunk_digests.digest(), leg=leg)
        self._step(frame)
        return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a receiver takes.

    `max_tokens`: one after the last position that may come. `exact`: what is offered is all that comes (no
    running source). `encoded_bytes(n_tokens)`: the size of a chunk; the largest, unless the codec is `fixed_size`.
    `prefix_hash(n_tokens)`: the name of that prefix where the receiver knows the tokens, else None.
    """

    max_tokens: int
    exact: bool
    encoded_bytes: Callable[[int], int]
    prefix_hash: Callable[[int], bytes | None]
    fixed_size: bool = True


class Receiver(_Machine):
    """The side that wants the KV. Owner: want, receive(Offer), (receive(Chunk), receive(Piece)*)*,
    receive(Commit), done."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self._chunk: Chunk | None = None
        self._buffer = bytearray()
        self._chunk_digests = hashlib.sha256()
        self._n_chunks = 0
        self._announced_tokens = 0
        self.position = 0  # one after the last verified position
        self.first_wanted = 0
        self.wire_bytes = 0

    def receive(self, frame: Frame) -> Effect | None:
        """Take a frame of the sender. Raises what the peer's Abort says, InvalidRequest or PayloadCorrupt."""
        self._receive_abort(frame)
        if isinstance(frame, Want | Done):
            self._fail(InvalidRequest(f"a sender sends no {type(frame).__name__.lower()}", field="frame"))
        self._step(frame)
        match frame:
            case Offer():
                self._announced_tokens = frame.manifest.count_tokens
                return Offered(frame.manifest)
            case Chunk():
                self._begin(frame)
            case Piece():
                return self._add(frame)
            case Commit():
                return self._commit(frame)
        return None

    def want(self, frame: Want) -> Want:
        """Begin: say what is here already, and what this end is."""
        self._step(frame)
        self.position = self.first_wanted = frame.from_position
        return frame

    def done(self) -> Done:
        """Answer a commit whose KV is written."""
        frame = Done(self.position)
        self._step(frame)
        return frame

    def _begin(self, frame: Chunk) -> None:
        n_tokens = frame.stop - frame.start
        self._check(frame.index == self._n_chunks, f"chunk {frame.index} came where {self._n_chunks} was due")
        self._check(frame.start == self.position, f"KV from {frame.start} came where {self.position} was due")
        self._check(1 <= n_tokens <= CHUNK_TOKENS, f"a chunk has 1 to {CHUNK_TOKENS} tokens, got {n_tokens}")
        room = self._announced_tokens if self._limits.exact else self._limits.max_tokens
        self._check(frame.stop <= room, f"KV up to {frame.stop} came where at most {room} tokens were announced")
        size = self._limits.encoded_bytes(n_tokens)
        least = size if self._limits.fixed_size else 1
        self._check(
            least <= frame.size_bytes <= size,
            f"a chunk of {n_tokens} tokens has {least} to {size} bytes, got {frame.size_bytes}",
        )
        self._check(len(frame.digest) == DIGEST_BYTES, "a chunk's digest has 32 bytes")
        self._check(len(frame.prefix_hash) == DIGEST_BYTES, "a chunk's prefix hash has 32 bytes")
        known = self._limits.prefix_hash(frame.stop)
        self._check(known is None or known == frame.prefix_hash, "a chunk's KV is of other tokens")
        self._chunk, self._buffer = frame, bytearray()

    def _add(self, piece: Piece) -> ChunkVerified | None:
        chunk = self._chunk
        assert chunk is not None  # IN_CHUNK
        got = len(self._buffer)
        self._check(piece.chunk_index == chunk.index, f"a piece of chunk {piece.chunk_index} came in {chunk.index}")
        self._check(piece.offset_bytes == got, f"a piece at byte {piece.offset_bytes} came where {got} was due")
        self._check(1 <= len(piece.data) <= PIECE_BYTES, f"a piece has 1 to {PIECE_BYTES} bytes")
        self._check(got + len(piece.data) <= chunk.size_bytes, "more bytes came than the chunk announced")
        self._check(digest_of(piece.data) == piece.digest, "a piece's digest does not match its bytes")
        self._buffer += piece.data
        if len(self._buffer) < chunk.size_bytes:
            return None
        data = bytes(self._buffer)
        self._check(digest_of(data) == chunk.digest, "a chunk's digest does not match its bytes")
        self.state = State.BETWEEN_CHUNKS
        self._chunk, self._buffer = None, bytearray()
        self._chunk_digests.update(chunk.digest)
        self._n_chunks += 1
        self.position = chunk.stop
        self.wire_bytes += len(data)
        return ChunkVerified(start=chunk.start, stop=chunk.stop, data=data, prefix_hash=chunk.prefix_hash)

    def _commit(self, frame: Commit) -> Committed:
        self._check(frame.chunks == self._n_chunks, f"{frame.chunks} chunks are committed, {self._n_chunks} came")
        self._check(frame.stop == self.position, f"KV up to {frame.stop} is committed, up to {self.position} came")
        self._check(frame.digest == self._chunk_digests.digest(), "the commit's digest does not match the chunks")
        # What the receiver had before may reach further than the source's KV.
        least = max(self._announced_tokens, self.first_wanted)
        self._check(self.position >= least, f"{least} tokens were announced, only {self.position} came")
        return Committed(frame.stop, frame.leg)
