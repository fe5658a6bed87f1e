"""KV transfers of a node: one `send` and one `receive`, whichever side dialled.

The rim around the state machines of mesh.kv.transfer: exports, encodes and sends; receives, decodes and writes.
Borders are checked here: a sender asks its guard about the receiver's place (from the certificate) before any byte
of KV leaves, a receiver about its own. A transfer that fails leaves nothing at the target; at the source a run
that was paused for it stays a hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from mesh.errors import Cancelled, Internal
from mesh.identity.signing import SignedRecord
from mesh.kv.chunks import chunk_ranges, digest_of
from mesh.kv.codecs import Codec, codec_named
from mesh.kv.manifest import (
    CANONICAL,
    KvManifest,
    check_compatible,
    check_receiver,
    chosen_codec,
    make_manifest,
)
from mesh.kv.slab import KvSlab
from mesh.kv.transfer import Limits, Receiver, Sender, State
from mesh.kv.transfer_frames import ChunkVerified, Committed, Offered, Want
from mesh.node.engine import Engine, ImportSpec, RunId
from mesh.node.host_checks import check_import
from mesh.node.host_frames import KvOpen
from mesh.node.host_ledger import Entry, Ledger, Phase
from mesh.node.host_link import Inbox, Link
from mesh.node.host_sources import Source
from mesh.node.legs import Clock, Signer
from mesh.node.port import BorderGuard, KvReport

_P = ParamSpec("_P")
_R = TypeVar("_R")
_INLINE_BYTES = 256 * 1024  # about a millisecond of encoding and hashing

Free = Callable[[RunId], Awaitable[None]]
OpenSource = Callable[[KvOpen, int], AbstractAsyncContextManager[Source]]
"""Makes the source of an order for a receiver that has the first so many positions, and keeps it while it ships."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParts:
    """What both directions work with; owned by the NodeHost. `free` releases a run id in engine and ledger, and
    finishes even if the caller is cancelled."""

    engine: Engine
    ledger: Ledger
    guard: BorderGuard
    signer: Signer
    clock: Clock
    kv_lifetime_s: float
    free: Free


async def send(parts: TransferParts, order: KvOpen, link: Link, open_source: OpenSource) -> KvReport:
    """Ship a source to the peer; it is opened when the peer has said what it has and wants. Raises what went wrong
    here or there; the peer has been told."""
    parts.guard.check_kv(order.context, link.peer_place)
    outgoing = _Outgoing(parts, order, link)
    return await outgoing.inbox.guard(outgoing.run(open_source))


class _Outgoing:
    """One sending."""

    def __init__(self, parts: TransferParts, order: KvOpen, link: Link) -> None:
        self._parts = parts
        self._order = order
        self._link = link
        self._sender = Sender(max_tokens=order.max_tokens)
        self.inbox = Inbox(link, self._sender)
        self._started_s = parts.clock.monotonic_s()
        self._first_chunk_s: float | None = None

    async def run(self, open_source: OpenSource) -> KvReport:
        sender = self._sender
        await self.inbox.reached(State.WANTED)
        self._link.grant(sender.wanted.window_bytes)
        codec = self._agreed_codec()
        async with open_source(self._order, sender.first_wanted) as source:
            await self._link.send(sender.offer(self._manifest(source, codec.name)))
            last = False
            while not last:
                if source.settles:
                    await self._link.settled()
                ready = await source.next(sender.position)
                last = ready.last
                for _, stop in chunk_ranges(sender.position, ready.stop):
                    await self._ship(source.entry, codec, stop)
            await self._link.send(sender.commit(source.leg()))
            await self.inbox.reached(State.DONE)
            return self._report(source, codec.name)

    def _report(self, source: Source, codec: str) -> KvReport:
        sender = self._sender
        return _report(
            self._order,
            codec=codec,
            tokens=sender.position,
            skipped_tokens=sender.first_wanted,
            wire_bytes=sender.wire_bytes,
            duration_s=self._elapsed_s(),
            first_chunk_s=self._first_chunk_s,
            leg=source.leg(),
        )

    def _agreed_codec(self) -> Codec:
        info, want = self._parts.engine.info, self._sender.wanted
        name = chosen_codec(self._order.codec, info.kv_dtype, want.dtype)
        check_receiver(
            info,
            codec=name,
            layout_hash=want.layout_hash,
            weights_lineage=want.weights_lineage,
            dtype=want.dtype,
        )
        return codec_named(name)

    def _manifest(self, source: Source, codec: str) -> KvManifest:
        order, parts, count = self._order, self._parts, source.count_tokens
        return make_manifest(
            parts.engine.info,
            codec=codec,
            count_tokens=count,
            block_hashes=source.entry.names.full_blocks(count),
            tenant=order.context.tenant,
            label=order.context.label,
            expires_unix_s=parts.clock.unix_s() + parts.kv_lifetime_s,
        )

    async def _ship(self, entry: Entry, codec: Codec, stop: int) -> None:
        sender = self._sender
        slab = await self._parts.engine.export_kv(entry.run_id, sender.position, stop)
        data, digest = await _computed(slab.n_bytes, _encode, codec, slab)
        for frame in sender.chunk(stop, data, digest=digest, prefix_hash=entry.names.prefix(stop)):
            await self._link.send(frame)
        entry.kv_out_bytes += len(data)
        if self._first_chunk_s is None:
            self._first_chunk_s = self._elapsed_s()

    def _elapsed_s(self) -> float:
        return self._parts.clock.monotonic_s() - self._started_s


async def receive(parts: TransferParts, order: KvOpen, link: Link) -> KvReport:
    """Take KV from the peer into a new hold `order.target`. Raises what went wrong here or there; then the hold is
    gone and the peer has been told."""
    parts.guard.check_kv(order.context, parts.signer.place)
    room = check_import(order, parts.engine.info)
    codec = None if order.codec == CANONICAL else codec_named(order.codec)
    if codec is not None:
        codec.check(parts.engine.info.geometry)
    entry = parts.ledger.open(order.target, order.context, Phase.IMPORTING, order.token_ids)
    try:
        return await _Incoming(parts, replace(order, max_tokens=room), link, entry, codec).run()
    except BaseException:
        await parts.free(order.target)
        raise


class _Incoming:
    """One receiving; `entry` is the target's. `codec` is None until the offer says what a canonical order means."""

    def __init__(self, parts: TransferParts, order: KvOpen, link: Link, entry: Entry, codec: Codec | None) -> None:
        self._parts = parts
        self._order = order
        self._link = link
        self._entry = entry
        self._codec = codec
        self._info = parts.engine.info
        self._started_s = parts.clock.monotonic_s()
        self._first_chunk_s: float | None = None
        self._prefix: bytes | None = None
        self._receiver = Receiver(
            Limits(
                max_tokens=order.max_tokens,
                exact=not order.source.pause,
                encoded_bytes=self._encoded_bytes,
                prefix_hash=self._known_prefix,
                fixed_size=codec is None or codec.fixed_size,
            )
        )

    async def run(self) -> KvReport:
        receiver = self._receiver
        await self._link.send(receiver.want(await self._open()))
        while True:
            match receiver.receive(await self._link.recv()):
                case Offered() as offered:
                    self._compare(offered)
                case ChunkVerified() as chunk:
                    await self._write(chunk)
                case Committed() as committed:
                    return await self._finish(committed)

    @property
    def _agreed_codec(self) -> Codec:
        assert self._codec is not None  # from the offer on
        return self._codec

    def _encoded_bytes(self, n_tokens: int) -> int:
        return self._agreed_codec.encoded_bytes(self._info.geometry, n_tokens, self._info.kv_dtype)

    def _known_prefix(self, n_tokens: int) -> bytes | None:
        names = self._entry.names
        return names.prefix(n_tokens) if n_tokens <= names.known_tokens else None

    def _compare(self, offered: Offered) -> None:
        order, manifest = self._order, offered.manifest
        codec = chosen_codec(order.codec, self._info.kv_dtype, manifest.dtype)
        check_compatible(
            manifest,
            self._info,
            now_unix_s=self._parts.clock.unix_s(),
            tenant=order.context.tenant,
            label=order.context.label,
            codec=codec,
            max_tokens=order.max_tokens,
            known_blocks=self._entry.names.full_blocks(len(order.token_ids)),
        )
        self._codec = codec_named(codec)

    async def _open(self) -> Want:
        """Make room in the engine, and see what it has already."""
        order, parts = self._order, self._parts
        known = order.token_ids
        if order.source.pause:
            # The run may stop right here: its last token has no KV then, and must be left to compute.
            known = known[:-1]
        spec = ImportSpec(run_id=order.target, token_ids=known, max_tokens=order.max_tokens, salt=order.context.salt)
        self._check_wanted()
        position = await parts.engine.open_import(spec)
        self._check_wanted()
        self._prefix = self._entry.names.prefix(position)
        return Want(
            from_position=position,
            layout_hash=self._info.geometry.layout_hash,
            weights_lineage=self._info.weights_lineage,
            dtype=self._info.kv_dtype,
            window_bytes=self._link.window_bytes,
        )

    def _check_wanted(self) -> None:
        """Raise Cancelled if the target was released meanwhile: the engine must not keep what nobody knows of."""
        if self._entry.phase is not Phase.IMPORTING:
            raise Cancelled(f"{self._order.target!r} was released while its KV arrived")

    async def _write(self, chunk: ChunkVerified) -> None:
        slab = await _computed(len(chunk.data), self._decode, chunk)
        await self._parts.engine.write_kv(self._order.target, slab)
        self._prefix = chunk.prefix_hash
        self._entry.kv_in_bytes += len(chunk.data)
        if self._first_chunk_s is None:
            self._first_chunk_s = self._elapsed_s()

    def _decode(self, chunk: ChunkVerified) -> KvSlab:
        return self._agreed_codec.decode(
            chunk.data,
            start=chunk.start,
            n_tokens=chunk.stop - chunk.start,
            geometry=self._info.geometry,
            dtype=self._info.kv_dtype,
        )

    async def _finish(self, committed: Committed) -> KvReport:
        receiver, entry = self._receiver, self._entry
        kv_tokens = await self._parts.engine.kv_tokens(self._order.target)
        self._check_wanted()
        if kv_tokens != committed.stop or self._prefix is None:
            raise Internal(f"the engine has {kv_tokens} tokens of an import of {committed.stop}")
        # A hold before the peer hears of it: it may order a run on it at once.
        self._parts.ledger.hold(entry, kv_tokens, self._prefix)
        await self._link.send(receiver.done())
        return _report(
            self._order,
            codec=self._agreed_codec.name,
            tokens=kv_tokens,
            skipped_tokens=receiver.first_wanted,
            wire_bytes=receiver.wire_bytes,
            duration_s=self._elapsed_s(),
            first_chunk_s=self._first_chunk_s,
            leg=committed.leg,
        )

    def _elapsed_s(self) -> float:
        return self._parts.clock.monotonic_s() - self._started_s


async def _computed(n_bytes: int, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """What `work` returns; off the event loop if it is long. The tail of a moving run is short, and a thread's
    turn would cost it more than the work."""
    if n_bytes <= _INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _encode(codec: Codec, slab: KvSlab) -> tuple[bytes, bytes]:
    data = codec.encode(slab)
    return data, digest_of(data)


def _report(
    order: KvOpen,
    *,
    codec: str,
    tokens: int,
    skipped_tokens: int,
    wire_bytes: int,
    duration_s: float,
    first_chunk_s: float | None,
    leg: SignedRecord | None,
) -> KvReport:
    return KvReport(
        transfer_id=order.transfer_id,
        tokens=tokens,
        skipped_tokens=skipped_tokens,
        wire_bytes=wire_bytes,
        codec=codec,
        duration_s=duration_s,
        first_chunk_s=duration_s if first_chunk_s is None else first_chunk_s,  # nothing had to travel
        leg=leg,
    )
