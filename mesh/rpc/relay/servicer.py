"""The relay: pairs two streams of nodes and copies sealed bytes between them.

It knows who is at both ends (from their certificates) and how much passes, and cannot read any of it. Bounded: so many
connections, so long a wait for the called end, a few messages under way in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc.aio

from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, NotFound, Overloaded, PolicyDenied
from mesh.identity.place import Place, Role
from mesh.rpc.peer import require_role
from mesh.telemetry.log import get_logger
from mesh.v1 import relay_pb2, relay_pb2_grpc

log = get_logger(__name__)
TICKET_BYTES = 32
MAX_SEALED_BYTES = 1 << 20
_UNDER_WAY = 4  # messages in each direction

Ring = Callable[[str, bytes], Awaitable[None]]
"""Tell the node of this id to come with this ticket. Raises NodeUnreachable if it is not attached."""
_End = asyncio.Queue[bytes | None]


@dataclass(slots=True, eq=False)
class _Meeting:
    """A caller that waits for `wanted`. `here` is set when that came."""

    caller: Place
    wanted: str
    session: bytes
    to_caller: _End = field(default_factory=lambda: asyncio.Queue(_UNDER_WAY))
    to_called: _End = field(default_factory=lambda: asyncio.Queue(_UNDER_WAY))
    here: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)  # one end is gone
    relayed_bytes: int = 0


class RelayServicer(relay_pb2_grpc.RelayServicer):
    """See the module's docstring. `peer_place` raises Unauthenticated where there is no certificate of a node."""

    def __init__(
        self,
        peer_place: Callable[[grpc.aio.ServicerContext], Place],
        ring: Ring,
        *,
        answer_timeout_s: float = 10.0,
        most_open: int = 64,
    ) -> None:
        self._peer_place = peer_place
        self._ring = ring
        self._answer_timeout_s = answer_timeout_s
        self._most_open = most_open
        self._waiting: dict[bytes, _Meeting] = {}
        self._open = 0
        self.relayed_bytes_total = 0

    async def Open(
        self, request_iterator: AsyncIterator[relay_pb2.RelayRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """One end, from its first message to the end of the connection."""
        place = self._peer_place(context)
        requests = aiter(request_iterator)
        first = await anext(requests)
        match first.WhichOneof("message"):
            case "call":
                await self._call(place, first.call.node_id, requests, context)
            case "answer":
                await self._answer(place, first.answer.ticket, requests, context)
            case _:
                raise InvalidRequest("a relayed connection starts with a call or an answer", field="message")

    async def _call(
        self,
        place: Place,
        wanted: str,
        requests: AsyncIterator[relay_pb2.RelayRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        require_role(place, (Role.EDGE,), "the relay")  # others can be dialled, and can dial
        if self._open >= self._most_open:
            raise Overloaded(f"{self._open} connections are relayed here, the most is {self._most_open}")
        meeting = _Meeting(caller=place, wanted=wanted, session=secrets.token_bytes(TICKET_BYTES))
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._open += 1
        self._waiting[ticket] = meeting
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await self._ring(wanted, ticket)
                await meeting.here.wait()
            log.info("relay_opened", caller=place.node_id, called=wanted)
            await self._carry(meeting, requests, context, out=meeting.to_caller, into=meeting.to_called)
        except TimeoutError:
            raise NodeUnreachable(f"node {wanted} did not come to the relay", node=wanted) from None
        finally:
            self._waiting.pop(ticket, None)
            self._open -= 1
            meeting.over.set()
            self.relayed_bytes_total += meeting.relayed_bytes
            log.info("relay_closed", caller=place.node_id, called=wanted, relayed_bytes=meeting.relayed_bytes)

    async def _answer(
        self,
        place: Place,
        ticket: bytes,
        requests: AsyncIterator[relay_pb2.RelayRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        meeting = self._waiting.get(ticket)
        if meeting is None:
            raise NotFound("nobody waits at the relay with this ticket", field="ticket")
        if meeting.wanted != place.node_id:
            raise PolicyDenied(f"the ticket is for {meeting.wanted}", rule="relay-ticket", node=place.node_id)
        del self._waiting[ticket]  # good once
        meeting.here.set()
        try:
            await self._carry(meeting, requests, context, out=meeting.to_called, into=meeting.to_caller)
        finally:
            meeting.over.set()

    async def _carry(
        self,
        meeting: _Meeting,
        requests: AsyncIterator[relay_pb2.RelayRequest],
        context: grpc.aio.ServicerContext,
        *,
        out: _End,
        into: _End,
    ) -> None:
        """Both ways until this end ends its stream, or the other one is gone and what it had sent is out."""
        await context.write(relay_pb2.RelayResponse(ready=relay_pb2.RelayReady(session=meeting.session)))
        reading = asyncio.create_task(self._read(meeting, requests, into))
        writing = asyncio.create_task(self._write(context, out))
        over = asyncio.create_task(meeting.over.wait())
        tasks = (reading, writing, over)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done() and over.done():
                with contextlib.suppress(asyncio.QueueFull):
                    out.put_nowait(None)  # else the other end is cut in mid-flight, and this one is late anyway
                await asyncio.wait((writing,), timeout=1.0)
            if reading.done() and not reading.cancelled() and isinstance(reading.exception(), MeshError):
                reading.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()

    async def _read(self, meeting: _Meeting, requests: AsyncIterator[relay_pb2.RelayRequest], into: _End) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "sealed" or len(request.sealed) > MAX_SEALED_BYTES:
                raise InvalidRequest(f"only sealed messages of at most {MAX_SEALED_BYTES} bytes follow", field="sealed")
            meeting.relayed_bytes += len(request.sealed)
            await into.put(request.sealed)
        await into.put(None)

    async def _write(self, context: grpc.aio.ServicerContext, out: _End) -> None:
        while (sealed := await out.get()) is not None:
            await context.write(relay_pb2.RelayResponse(sealed=sealed))
