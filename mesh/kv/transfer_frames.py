"""Frames of a KV transfer as values, and what a receiver makes of them. Frozen; protobuf is mesh.node.wire_kv's.

Order on the wire: (open,) want, offer, (chunk, its pieces)*, commit, done; abort at any time. `open` is the
node's: it says whose data it is and which way it goes (mesh.node.host_frames).
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.errors import MeshError, by_reason, told_details
from mesh.identity.signing import SignedRecord
from mesh.kv.geometry import KvDtype
from mesh.kv.manifest import KvManifest

_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Offer:
    """From the sender."""

    manifest: KvManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """From the receiver, first: send from this position on, it has the rest; and what its engine is, so that the
    sender refuses what does not fit before it computes or sends anything; and how much may be under way to it."""

    from_position: int
    layout_hash: str
    weights_lineage: str
    dtype: KvDtype
    window_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """From the sender: announces positions [start, stop), all layers, as `size_bytes` encoded bytes with this
    SHA-256. `prefix_hash` names all tokens up to `stop`."""

    index: int
    start: int
    stop: int
    size_bytes: int
    digest: bytes
    prefix_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """From the sender: a part of the announced chunk, with its SHA-256."""

    chunk_index: int
    offset_bytes: int
    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """From the sender, after the last chunk. `digest` is the SHA-256 over all chunk digests in order; `leg` the
    sender's signed report of a prefill that it did for this transfer."""

    chunks: int
    stop: int
    digest: bytes
    leg: SignedRecord | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """From the receiver: positions [0, tokens) are in its engine."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """From either side: nothing of it may be used. `reason` is a reason word of mesh.errors."""

    reason: str
    message: str
    details: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: MeshError) -> Abort:
        details = tuple(told_details(error.details).items())
        return cls(reason=error.reason, message=error.message[:_MAX_MESSAGE_CHARS], details=details)

    def error(self) -> MeshError:
        """The peer's error as an exception of ours."""
        message = f"the peer ended the transfer: {self.message[:_MAX_MESSAGE_CHARS]}"
        return by_reason(self.reason)(message, **told_details(dict(self.details)))


Frame = Offer | Want | Chunk | Piece | Commit | Done | Abort


@dataclass(frozen=True, slots=True)
class Offered:
    """The receiver has the manifest: compare it before anything that follows is used."""

    manifest: KvManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerified:
    """A whole chunk whose digests are right: decode and write it."""

    start: int
    stop: int
    data: bytes
    prefix_hash: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    """All that was announced is verified. When it is written, answer with Receiver.done."""

    stop: int
    leg: SignedRecord | None


Effect = Offered | ChunkVerified | Committed
