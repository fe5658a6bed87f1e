"""KV transfers as protobuf, and back: frames, orders, reports. Pure; errors as in mesh.node.wire.

What a frame must be in its place is the business of mesh.kv.transfer; here only its own bounds are checked.
"""

from __future__ import annotations

from mesh.errors import InvalidRequest, KvIncompatible, RevisionMismatch, told_details
from mesh.identity.receipt import record_from_wire, record_to_wire
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.kv.manifest import KvManifest
from mesh.kv.transfer_frames import Abort, Chunk, Commit, Done, Offer, Piece, Want
from mesh.node import wire_bounds as bounds
from mesh.node.engine import RunId
from mesh.node.host_frames import Ack, HostFrame, KvOpen, Resume, Resumed
from mesh.node.port import KvDirection, KvOrder, KvReport, KvSource, Peer
from mesh.node.wire import (
    context_from_wire,
    context_to_wire,
    order_from_wire,
    order_to_wire,
    place_from_wire,
    place_to_wire,
)
from mesh.v1 import common_pb2, node_pb2

_DIRECTIONS = {
    KvDirection.PUSH: node_pb2.KV_DIRECTION_PUSH,
    KvDirection.PULL: node_pb2.KV_DIRECTION_PULL,
}
_DIRECTIONS_BACK = {wire: direction for direction, wire in _DIRECTIONS.items()}
_DTYPES_BACK = {dtype.value: dtype for dtype in KvDtype}
_MAX_BLOCKS = bounds.MAX_TOKENS // BLOCK_TOKENS


def frame_to_wire(frame: HostFrame) -> node_pb2.KvFrame:
    """Dataclass to protobuf."""
    match frame:
        case KvOpen():
            return node_pb2.KvFrame(open=open_to_wire(frame))
        case Offer():
            return node_pb2.KvFrame(offer=node_pb2.KvOffer(manifest=manifest_to_wire(frame.manifest)))
        case Want():
            return node_pb2.KvFrame(want=want_to_wire(frame))
        case Chunk():
            return node_pb2.KvFrame(
                chunk=node_pb2.KvChunk(
                    index=frame.index,
                    start=frame.start,
                    stop=frame.stop,
                    size_bytes=frame.size_bytes,
                    digest=frame.digest,
                    prefix_hash=frame.prefix_hash,
                )
            )
        case Piece():
            return node_pb2.KvFrame(
                piece=node_pb2.KvPiece(
                    chunk_index=frame.chunk_index,
                    offset_bytes=frame.offset_bytes,
                    data=frame.data,
                    digest=frame.digest,
                )
            )
        case Commit():
            leg = None if frame.leg is None else record_to_wire(frame.leg)
            commit = node_pb2.KvCommit(chunks=frame.chunks, stop=frame.stop, digest=frame.digest, leg=leg)
            return node_pb2.KvFrame(commit=commit)
        case Done():
            return node_pb2.KvFrame(done=node_pb2.KvDone(tokens=frame.tokens))
        case Abort():
            return node_pb2.KvFrame(
                abort=node_pb2.KvAbort(reason=frame.reason, message=frame.message, details=dict(frame.details))
            )
        case Ack():
            return node_pb2.KvFrame(ack=node_pb2.KvAck(consumed_frames=frame.consumed))
        case Resume():
            resume = node_pb2.KvResume(transfer_id=frame.transfer_id, token=frame.token, received_frames=frame.received)
            return node_pb2.KvFrame(resume=resume)
        case Resumed():
            return node_pb2.KvFrame(resumed=node_pb2.KvResumed(received_frames=frame.received))


def frame_from_wire(message: node_pb2.KvFrame) -> HostFrame:
    """Protobuf to dataclass."""
    match message.WhichOneof("frame"):
        case "open":
            return open_from_wire(message.open)
        case "offer":
            return Offer(manifest_from_wire(message.offer.manifest))
        case "want":
            return want_from_wire(message.want)
        case "chunk":
            chunk = message.chunk
            return Chunk(
                index=chunk.index,
                start=chunk.start,
                stop=chunk.stop,
                size_bytes=chunk.size_bytes,
                digest=chunk.digest,
                prefix_hash=chunk.prefix_hash,
            )
        case "piece":
            piece = message.piece
            return Piece(
                chunk_index=piece.chunk_index, offset_bytes=piece.offset_bytes, data=piece.data, digest=piece.digest
            )
        case "commit":
            commit = message.commit
            leg = record_from_wire(commit.leg) if commit.HasField("leg") else None
            return Commit(chunks=commit.chunks, stop=commit.stop, digest=commit.digest, leg=leg)
        case "done":
            return Done(message.done.tokens)
        case "abort":
            abort = message.abort
            details = tuple(sorted(told_details(abort.details).items()))
            return Abort(reason=abort.reason, message=abort.message, details=details)
        case "ack":
            return Ack(message.ack.consumed_frames)
        case "resume":
            resume = message.resume
            return Resume(
                transfer_id=bounds.name("transfer_id", resume.transfer_id),
                token=resume.token,
                received=resume.received_frames,
            )
        case "resumed":
            return Resumed(message.resumed.received_frames)
        case _:
            raise RevisionMismatch("a frame of a KV transfer is of a kind that this build does not know")


def want_to_wire(want: Want) -> node_pb2.KvWant:
    """Dataclass to protobuf."""
    return node_pb2.KvWant(
        from_position=want.from_position,
        layout_hash=want.layout_hash,
        weights_lineage=want.weights_lineage,
        dtype=want.dtype.value,
        window_bytes=want.window_bytes,
    )


def want_from_wire(message: node_pb2.KvWant) -> Want:
    """Protobuf to dataclass. Raises KvIncompatible for an element type that this build does not know."""
    return Want(
        from_position=message.from_position,
        layout_hash=bounds.name("layout_hash", message.layout_hash),
        weights_lineage=bounds.name("weights_lineage", message.weights_lineage),
        dtype=_dtype_from_wire(message.dtype),
        window_bytes=message.window_bytes,
    )


def _dtype_from_wire(name: str) -> KvDtype:
    dtype = _DTYPES_BACK.get(name)
    if dtype is None:
        raise KvIncompatible(f"KV refused, dtype: {name[:32]!r} is not known here", field="dtype")
    return dtype


def manifest_to_wire(manifest: KvManifest) -> node_pb2.KvManifest:
    """Dataclass to protobuf."""
    return node_pb2.KvManifest(
        format=manifest.format,
        layout_hash=manifest.layout_hash,
        weights_lineage=manifest.weights_lineage,
        dtype=manifest.dtype.value,
        codec=manifest.codec,
        first_position=manifest.first_position,
        count_tokens=manifest.count_tokens,
        block_hashes=manifest.block_hashes,
        label=manifest.label,
        tenant=manifest.tenant,
        expires_unix_s=manifest.expires_unix_s,
        producer_build=manifest.producer_build,
    )


def manifest_from_wire(message: node_pb2.KvManifest) -> KvManifest:
    """Protobuf to dataclass. Raises KvIncompatible for an element type that this build does not know."""
    dtype = _dtype_from_wire(message.dtype)
    bounds.at_most("block_hashes", len(message.block_hashes), _MAX_BLOCKS)
    return KvManifest(
        format=message.format,
        layout_hash=bounds.name("layout_hash", message.layout_hash),
        weights_lineage=bounds.name("weights_lineage", message.weights_lineage),
        dtype=dtype,
        codec=bounds.name("codec", message.codec),
        first_position=message.first_position,
        count_tokens=message.count_tokens,
        block_hashes=tuple(message.block_hashes),
        label=bounds.name("label", message.label),
        tenant=bounds.name("tenant", message.tenant),
        expires_unix_s=message.expires_unix_s,
        producer_build=bounds.name("producer_build", message.producer_build, empty=True),
    )


def open_to_wire(opening: KvOpen) -> node_pb2.KvOpen:
    """Dataclass to protobuf."""
    prefill = opening.source.prefill
    return node_pb2.KvOpen(
        transfer_id=opening.transfer_id,
        direction=_DIRECTIONS[opening.direction],
        context=context_to_wire(opening.context),
        source_run_id=opening.source.run_id,
        prefill=None if prefill is None else order_to_wire(prefill),
        pause=opening.source.pause,
        stop_first=opening.source.stop_first,
        pace_s=opening.source.pace_s,
        target_run_id=opening.target,
        tokens=common_pb2.TokenIds(ids=opening.token_ids),
        max_tokens=opening.max_tokens,
        codec=opening.codec,
        token=opening.token,
        own_tokens=opening.own_tokens,
    )


def open_from_wire(message: node_pb2.KvOpen) -> KvOpen:
    """Protobuf to dataclass."""
    direction = _DIRECTIONS_BACK.get(message.direction)
    if direction is None:
        raise InvalidRequest("direction must be push or pull", field="direction")
    if not 1 <= message.max_tokens <= bounds.MAX_TOKENS:
        raise InvalidRequest(
            f"max_tokens must be in [1, {bounds.MAX_TOKENS}], got {message.max_tokens}", field="max_tokens"
        )
    source = KvSource(
        run_id=RunId(bounds.name("source_run_id", message.source_run_id)),
        prefill=order_from_wire(message.prefill) if message.HasField("prefill") else None,
        pause=message.pause,
        stop_first=message.stop_first,
        pace_s=bounds.not_negative("pace_s", message.pace_s),
    )
    return KvOpen(
        transfer_id=bounds.name("transfer_id", message.transfer_id),
        direction=direction,
        context=context_from_wire(message.context),
        source=source,
        target=RunId(bounds.name("target_run_id", message.target_run_id)),
        token_ids=bounds.token_ids("tokens", message.tokens.ids),
        max_tokens=message.max_tokens,
        codec=bounds.name("codec", message.codec),
        token=message.token,
        own_tokens=bounds.at_most("own_tokens", message.own_tokens, bounds.MAX_TOKENS),
    )


def kv_order_to_wire(order: KvOrder) -> tuple[node_pb2.KvOpen, str, common_pb2.Place]:
    """An order to a node that dials: what it shall open, the peer's address and place."""
    return open_to_wire(KvOpen.of(order)), order.peer.address, place_to_wire(order.peer.place)


def kv_order_from_wire(opening: node_pb2.KvOpen, address: str, place: common_pb2.Place) -> KvOrder:
    """The way back."""
    opened = open_from_wire(opening)
    return KvOrder(
        context=opened.context,
        transfer_id=opened.transfer_id,
        direction=opened.direction,
        peer=Peer(address=bounds.name("peer_address", address, empty=True), place=place_from_wire(place)),
        source=opened.source,
        target=opened.target,
        token_ids=opened.token_ids,
        max_tokens=opened.max_tokens,
        codec=opened.codec,
        own_tokens=opened.own_tokens,
    )


def report_to_wire(report: KvReport) -> node_pb2.KvReport:
    """Dataclass to protobuf."""
    return node_pb2.KvReport(
        transfer_id=report.transfer_id,
        tokens=report.tokens,
        skipped_tokens=report.skipped_tokens,
        wire_bytes=report.wire_bytes,
        codec=report.codec,
        duration_s=report.duration_s,
        first_chunk_s=report.first_chunk_s,
        leg=None if report.leg is None else record_to_wire(report.leg),
        own_tokens=report.own_tokens,
    )


def report_from_wire(message: node_pb2.KvReport) -> KvReport:
    """Protobuf to dataclass."""
    return KvReport(
        transfer_id=bounds.name("transfer_id", message.transfer_id),
        tokens=message.tokens,
        skipped_tokens=message.skipped_tokens,
        wire_bytes=message.wire_bytes,
        codec=bounds.name("codec", message.codec),
        duration_s=bounds.not_negative("duration_s", message.duration_s),
        first_chunk_s=bounds.not_negative("first_chunk_s", message.first_chunk_s),
        leg=record_from_wire(message.leg) if message.HasField("leg") else None,
        own_tokens=message.own_tokens,
    )
