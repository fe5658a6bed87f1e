"""Receiving KV from another node, whichever side dialled: makes room, decodes and writes around the machine of
mesh.kv.transfer.

The guard is asked about this node's own place. A receiving that fails leaves nothing in the engine.
"""

from __future__ import annotations

from dataclasses import replace

from mesh.errors import Cancelled, Internal
from mesh.kv.codecs import Codec, codec_named
from mesh.kv.manifest import CANONICAL, check_compatible, chosen_codec
from mesh.kv.slab import KvSlab
from mesh.kv.transfer import Limits, Receiver
from mesh.kv.transfer_frames import ChunkVerified, Committed, Offered, Want
from mesh.node.engine import ImportSpec
from mesh.node.host_checks import check_import
from mesh.node.host_frames import KvOpen
from mesh.node.host_ledger import Entry, Phase
from mesh.node.host_link import Link
from mesh.node.host_own_head import OwnHead, check_own_tokens
from mesh.node.host_transfer_parts import TransferParts, computed, make_report
from mesh.node.port import KvReport


async def receive(parts: TransferParts, order: KvOpen, link: Link) -> KvReport:
    """Take KV from the peer into a new hold `order.target`. Raises what went wrong here or there; then the hold is
    gone and the peer has been told."""
    parts.guard.check_kv(order.context, parts.signer.place)
    room = check_import(order, parts.engine.info)
    check_own_tokens(order)
    if order.own_tokens:
        parts.guard.check_prompt(order.context, parts.signer.place)
    codec = None if order.codec == CANONICAL else codec_named(order.codec)
    if codec is not None:
        codec.check(parts.engine.info.geometry)
    entry = parts.ledger.open(order.target, order.context, Phase.IMPORTING, order.token_ids)
    try:
        incoming = _Incoming(parts, replace(order, max_tokens=room), link, entry, codec)
        try:
            return await incoming.run()
        finally:
            await incoming.drop_head()
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
        self._head: OwnHead | None = None
        self._own_tokens = 0
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

    async def drop_head(self) -> None:
        """Free what was computed here and not joined."""
        if self._head is not None:
            head, self._head = self._head, None
            await head.drop()

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
        if order.own_tokens and await parts.engine.cached_tokens(known, order.context.salt) < order.own_tokens:
            spec = replace(spec, first_position=order.own_tokens)
        if order.source.prefill is not None:  # nothing is computed yet: better late than for nothing
            position = await parts.room.open(parts.engine, spec, self._check_wanted)
        else:
            position = await parts.engine.open_import(spec)
        self._check_wanted()
        if spec.first_position:
            self._head, self._own_tokens = OwnHead(parts, order), order.own_tokens
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
        if self._head is not None and self._head.failed:
            await self._head.join()  # raises why
        slab = await computed(len(chunk.data), self._decode, chunk)
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
        if self._head is not None:
            await self._head.join()
            self._head = None
        kv_tokens = await self._parts.engine.kv_tokens(self._order.target)
        self._check_wanted()
        if kv_tokens != committed.stop or self._prefix is None:
            raise Internal(f"the engine has {kv_tokens} tokens of an import of {committed.stop}")
        # A hold before the peer hears of it: it may order a run on it at once.
        self._parts.ledger.hold(entry, kv_tokens, self._prefix)
        await self._link.send(receiver.done())
        return make_report(
            self._order,
            codec=self._agreed_codec.name,
            tokens=kv_tokens,
            skipped_tokens=receiver.first_wanted,
            wire_bytes=receiver.wire_bytes,
            duration_s=self._elapsed_s(),
            first_chunk_s=self._first_chunk_s,
            leg=committed.leg,
            own_tokens=self._own_tokens,
        )

    def _elapsed_s(self) -> float:
        return self._parts.clock.monotonic_s() - self._started_s
