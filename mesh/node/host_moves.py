"""The transfers of a node: who may open one, where its KV comes from, and that its end is heard.

`move_kv` dials, `serve_transfer` was dialled; both end in one mesh.node.host_send.send or host_receive.receive.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from mesh.errors import AlreadyExists, Cancelled, Expired, InvalidRequest, MeshError, NotFound, PolicyDenied
from mesh.identity.place import Place
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.kv.precopy import Precopy
from mesh.node.host_checks import check_model
from mesh.node.host_desk import Desk
from mesh.node.host_frames import Dial, FrameStream, HostFrame, KvOpen, Resume
from mesh.node.host_ledger import Entry, Owner, Phase
from mesh.node.host_link import Link
from mesh.node.host_receive import receive
from mesh.node.host_room import ImportRoom, PrefillBacklog
from mesh.node.host_send import send
from mesh.node.host_session import Session
from mesh.node.host_session_ends import DiallingSession, ServedSession
from mesh.node.host_sources import HeldSource, MovingSource, PrefillSource, Source, shippable_tokens
from mesh.node.host_transfer_parts import TransferParts
from mesh.node.port import KvDirection, KvOrder, KvReport
from mesh.node.serving_role import check_import_role
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSettings:
    """Those of HostSettings that concern transfers."""

    idle_timeout_s: float
    kv_lifetime_s: float
    resume_timeout_s: float
    window_bytes: int
    pause_tokens: float
    room_timeout_s: float
    most_waiting_imports: int
    prefill_backlog_ratio: float


class Moves:
    """Owned by the NodeHost."""

    def __init__(self, desk: Desk, settings: MoveSettings) -> None:
        self._desk = desk
        self._settings = settings
        self._parts = TransferParts(
            engine=desk.engine,
            ledger=desk.ledger,
            guard=desk.guard,
            signer=desk.identity,
            clock=desk.clock,
            kv_lifetime_s=settings.kv_lifetime_s,
            free=desk.free,
            room=ImportRoom(
                desk.wait_change,
                # The source, which waits to hear what is wanted, must not lose patience first.
                patience_s=min(settings.room_timeout_s, settings.idle_timeout_s / 2),
                most_waiting=settings.most_waiting_imports,
            ),
        )
        self._backlog = PrefillBacklog(
            most_tokens=int(settings.prefill_backlog_ratio * desk.engine.info.kv_capacity_tokens)
        )
        self._transfers: set[asyncio.Task[Any]] = set()
        self._served: dict[tuple[str, str], tuple[ServedSession, asyncio.Task[KvReport]]] = {}  # by peer and transfer

    def __len__(self) -> int:
        """Transfers that go on now."""
        return len(self._transfers)

    @property
    def waiting_imports(self) -> int:
        """Imports that wait for KV blocks; no engine knows of them yet."""
        return self._parts.room.waiting

    async def close(self) -> None:
        """Cancel all and wait for their ends."""
        tasks = [task for task in self._transfers if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def move_kv(self, order: KvOrder, dial: Dial) -> KvReport:
        """Move KV as the dialling side; see NodePort.move_kv."""
        opening = KvOpen.of(order, token=secrets.token_bytes(TOKEN_BYTES))
        async with self._transfer(opening):
            if not order.peer.address:
                self._desk.guard.check_relay(order.context)
            if order.direction is KvDirection.PULL:
                self._check_target(opening)
                if order.source.prefill is not None:  # the order carries the prompt
                    self._desk.guard.check_prompt(order.context, order.peer.place)
            else:
                self._desk.guard.check_kv(order.context, order.peer.place)  # before the ids of its tokens leave
                self._check_source(opening)
            session = DiallingSession(
                dial,
                order.peer,
                opening,
                window_bytes=self._settings.window_bytes,
                resume_timeout_s=self._settings.resume_timeout_s,
            )
            async with self._link(session) as link:
                if order.direction is KvDirection.PULL:
                    return await self._receive(opening, link)
                return await self._send(opening, link)

    async def serve_transfer(self, first: HostFrame, stream: FrameStream) -> None:
        """Do a transfer as the dialled side, or go on with one; see NodeHost.serve_transfer."""
        match first:
            case KvOpen():
                session, work = self._serve(first, stream)
                await session.carry(stream, None, work)
            case Resume():
                session, work = self._parked(first, stream.peer_place)
                await session.carry(stream, first.received, work)
            case _:
                raise InvalidRequest("a KV transfer starts with an open or resume frame", field="frame")

    def _serve(self, opening: KvOpen, stream: FrameStream) -> tuple[ServedSession, asyncio.Task[KvReport]]:
        """Start a transfer that may outlive its stream."""
        key = (stream.peer_place.node_id, opening.transfer_id)
        if key in self._served:
            raise AlreadyExists(f"the transfer {opening.transfer_id!r} goes on already", field="transfer_id")
        # Without a token nobody can resume it.
        resume_timeout_s = self._settings.resume_timeout_s if len(opening.token) == TOKEN_BYTES else 0.0
        session = ServedSession(
            stream.peer_place,
            opening,
            window_bytes=self._settings.window_bytes,
            resume_timeout_s=resume_timeout_s,
        )
        work = asyncio.create_task(self._work(opening, session), name=f"kv:{opening.transfer_id}")
        self._served[key] = session, work
        work.add_done_callback(lambda _: self._end(key))
        return session, work

    def _end(self, key: tuple[str, str]) -> None:
        _, work = self._served.pop(key)
        if not work.cancelled():
            work.exception()  # who dialled may be gone; it was counted and logged

    def _parked(self, resume: Resume, peer: Place) -> tuple[ServedSession, asyncio.Task[KvReport]]:
        found = self._served.get((peer.node_id, resume.transfer_id))
        if (
            found is None
            or found[0].peer_place != peer
            or not hmac.compare_digest(found[0].token, resume.token)
            or len(resume.token) != TOKEN_BYTES
        ):
            raise NotFound(f"there is no transfer {resume.transfer_id!r} to resume here", field="transfer_id")
        return found

    async def _work(self, opening: KvOpen, session: ServedSession) -> KvReport:
        async with self._transfer(opening), self._link(session) as link:
            if opening.direction is KvDirection.PUSH:
                self._check_target(opening)
                return await self._receive(opening, link)
            self._desk.guard.check_kv(opening.context, link.peer_place)  # before any work is done for it
            self._check_source(opening)
            return await self._send(opening, link)

    async def _send(self, opening: KvOpen, link: Link) -> KvReport:
        report = await send(self._parts, opening, link, self._source)
        self._desk.counters.sent_kv(report)
        return report

    async def _receive(self, opening: KvOpen, link: Link) -> KvReport:
        report = await receive(self._parts, opening, link)
        self._desk.counters.received_kv(report)
        return report

    @asynccontextmanager
    async def _transfer(self, opening: KvOpen) -> AsyncIterator[None]:
        """Count it, and hold it to its deadline."""
        task = asyncio.current_task()
        assert task is not None
        self._transfers.add(task)
        self._desk.change()
        try:
            try:
                async with asyncio.timeout(opening.context.deadline_s) as limit:
                    yield
            except TimeoutError as exc:
                if not limit.expired():
                    raise
                raise Expired(f"the deadline of {opening.context.deadline_s:g} s passed") from exc
        except asyncio.CancelledError:
            self._desk.counters.transfer_failed(Cancelled("the transfer was cancelled"))
            raise
        except MeshError as exc:
            self._desk.counters.transfer_failed(exc)
            log.info("kv_transfer_failed", transfer_id=opening.transfer_id, reason=exc.reason, error=exc.message)
            raise
        finally:
            self._transfers.discard(task)
            self._desk.change()

    @asynccontextmanager
    async def _link(self, session: Session) -> AsyncIterator[Link]:
        """The session while it is needed; its peer is told whatever goes wrong here."""
        try:
            async with session:
                link = Link(session, idle_timeout_s=self._settings.idle_timeout_s)
                try:
                    yield link
                except BaseException as exc:
                    await link.abort(exc)
                    raise
        finally:
            self._desk.counters.resumed += session.resumed

    def _check_target(self, opening: KvOpen) -> None:
        self._desk.refuse_if_draining()
        self._desk.guard.check_kv(opening.context, self._desk.identity.place)
        check_import_role(self._desk.role, self._desk.identity.place.node_id)

    def _check_source(self, opening: KvOpen) -> None:
        """Raise what can be known to be wrong before the receiver has been asked for anything."""
        prefill = opening.source.prefill
        if prefill is None:
            self._existing(opening)
            return
        if prefill.run_id != opening.source.run_id or not prefill.prefill_only or opening.source.pause:
            raise InvalidRequest("a prefill for a transfer is prefill_only and named by source_run_id", field="prefill")
        if Owner.of(prefill.context) != Owner.of(opening.context):
            raise PolicyDenied("the prefill is of another tenant, label, namespace or model", rule="kv-owner")
        self._desk.check(prefill)

    @asynccontextmanager
    async def _source(self, opening: KvOpen, received_tokens: int) -> AsyncIterator[Source]:
        """The source of a transfer to a receiver that has the first `received_tokens`, kept while it is shipped."""
        prefill = opening.source.prefill
        if prefill is None:
            async with self._existing_source(opening) as source:
                yield source
            return
        if received_tokens and len(prefill.token_ids) - received_tokens < BLOCK_TOKENS:
            # Less than a block is missing, which the receiver computes by itself: nothing is to be done here.
            yield HeldSource(self._desk.ledger.detached(prefill), min(received_tokens, len(prefill.token_ids)))
            return
        with self._backlog.counted(len(prefill.token_ids)):
            run = self._desk.start(prefill)
            self._desk.ledger.pin(run.entry)
            try:
                yield PrefillSource(run, self._desk.report)
                await self._desk.free(run.entry.run_id)  # it was computed for this transfer alone
            finally:
                self._desk.ledger.unpin(run.entry)
                await self._desk.stop(run)  # a prefill that did end stays a hold for a while, for another try

    def _existing(self, opening: KvOpen) -> Entry:
        check_model(opening.context, self._desk.engine.info)
        entry = self._desk.ledger.get(opening.source.run_id, opening.context)
        if entry.phase is Phase.IMPORTING:
            raise InvalidRequest(f"{entry.run_id!r} is still being imported", field="source_run_id")
        return entry

    @asynccontextmanager
    async def _existing_source(self, opening: KvOpen) -> AsyncIterator[Source]:
        entry = self._existing(opening)
        self._desk.ledger.pin(entry)
        try:
            kv_tokens = await shippable_tokens(self._desk.engine, entry)
            if kv_tokens > entry.names.known_tokens:
                raise InvalidRequest(
                    f"{entry.run_id!r} was imported with tokens that are not known here yet", field="source_run_id"
                )
            if opening.source.pause:
                with self._moving(opening, entry, kv_tokens) as source:
                    yield source
            else:
                yield HeldSource(entry, kv_tokens)
        finally:
            self._desk.ledger.unpin(entry)

    @contextmanager
    def _moving(self, opening: KvOpen, entry: Entry, kv_tokens: int) -> Iterator[Source]:
        """A run, slowed while it is shipped if that was ordered."""
        precopy = Precopy(pause_tokens=self._settings.pause_tokens)
        if opening.source.stop_first:
            precopy = Precopy(max_rounds=0)
        run = self._desk.run_of(entry.run_id)
        if run is not None:
            run.pace(opening.source.pace_s)
        try:
            yield MovingSource(self._desk.engine, entry, kv_tokens, precopy, run)
        finally:
            if run is not None:
                run.pace(0.0)
