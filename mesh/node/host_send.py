"""Sending KV to another node, whichever side dialled: exports, encodes and sends around the machine of
mesh.kv.transfer.

The guard is asked about the receiver's place (from its certificate) before any byte of KV leaves. When a sending
fails, a run that was paused for it stays a hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mesh.errors import InvalidRequest, NotFound
from mesh.identity.signing import SignedRecord
from mesh.kv.chunks import chunk_ranges, digest_of
from mesh.kv.codecs import Codec, codec_named
from mesh.kv.manifest import KvManifest, check_receiver, chosen_codec, make_manifest
from mesh.kv.slab import KvSlab
from mesh.kv.transfer import Sender, State
from mesh.node.host_frames import KvOpen
from mesh.node.host_ledger import Entry, Phase
from mesh.node.host_link import Inbox, Link
from mesh.node.host_sources import Source
from mesh.node.host_transfer_parts import TransferParts, computed, make_report
from mesh.node.port import KvReport

_RECOMPUTE_POLL_S = 0.02

OpenSource = Callable[[KvOpen, int], AbstractAsyncContextManager[Source]]
"""Makes the source of an order for a receiver that has the first so many positions, and keeps it while it ships."""


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
            leg = await source.leg()
            await self._link.send(sender.commit(leg))
            await self.inbox.reached(State.DONE)
            return self._report(leg, codec.name)

    def _report(self, leg: SignedRecord | None, codec: str) -> KvReport:
        sender = self._sender
        return make_report(
            self._order,
            codec=codec,
            tokens=sender.position,
            skipped_tokens=sender.first_wanted,
            wire_bytes=sender.wire_bytes,
            duration_s=self._elapsed_s(),
            first_chunk_s=self._first_chunk_s,
            leg=leg,
            own_tokens=self._order.own_tokens if sender.first_wanted == self._order.own_tokens else 0,
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
        slab = await self._export(entry, sender.position, stop)
        data, digest = await computed(slab.n_bytes, _encode, codec, slab)
        for frame in sender.chunk(stop, data, digest=digest, prefix_hash=entry.names.prefix(stop)):
            await self._link.send(frame)
        entry.kv_out_bytes += len(data)
        if self._first_chunk_s is None:
            self._first_chunk_s = self._elapsed_s()

    async def _export(self, entry: Entry, start: int, stop: int) -> KvSlab:
        """KV of a run that may be preempted meanwhile: then its KV is there again when it was recomputed."""
        engine = self._parts.engine
        try:
            return await engine.export_kv(entry.run_id, start, stop)
        except (InvalidRequest, NotFound):
            # An engine does not tell of a preemption, nor when what it took is there again.
            while entry.phase is Phase.RUNNING and await engine.kv_tokens(entry.run_id) < stop:  # noqa: ASYNC110
                await asyncio.sleep(_RECOMPUTE_POLL_S)
            if entry.failed is not None:
                raise entry.failed from None
        return await engine.export_kv(entry.run_id, start, stop)

    def _elapsed_s(self) -> float:
        return self._parts.clock.monotonic_s() - self._started_s


def _encode(codec: Codec, slab: KvSlab) -> tuple[bytes, bytes]:
    data = codec.encode(slab)
    return data, digest_of(data)
