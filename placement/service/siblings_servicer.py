"""mesh.v1.Sibling: takes what another placement service tells, and notices when it is gone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Protocol

import grpc.aio

from mesh.errors import Expired, Internal, InvalidRequest, MeshError, Overloaded
from mesh.identity.place import Place, Role
from mesh.rpc.peer import require_role
from mesh.telemetry.log import get_logger
from mesh.v1 import sibling_pb2 as pb
from mesh.v1 import sibling_pb2_grpc as pb_grpc
from placement.entry.copies import entries_from_wire, error_of
from placement.entry.in_flight import MOST, InFlight, Sent
from placement.entry.request_log import RequestStream
from placement.service.siblings import Siblings

log = get_logger(__name__)
SILENT_S = 3.0
_MOST_ANSWERS = 4_096
PeerPlace = Callable[[grpc.aio.ServicerContext], Place]


class Door(Protocol):
    """What is used of the front door."""

    def take_copy(self, origin: str, opened: pb.CopiedRequest) -> RequestStream: ...

    def copy_ended(self, request_id: str, error: MeshError | None) -> None: ...

    def origin_lost(self, request_ids: Iterable[str]) -> None: ...


class SiblingServicer(pb_grpc.SiblingServicer):
    """Goes on the node listener. `peer_place` raises Unauthenticated where there is no certificate of this mesh."""

    def __init__(self, door: Door, siblings: Siblings, in_flight: InFlight, peer_place: PeerPlace) -> None:
        self._door = door
        self._siblings = siblings
        self._in_flight = in_flight
        self._peer_place = peer_place
        self._sessions: dict[str, object] = {}  # origin -> its newest session

    async def Share(
        self, request_iterator: AsyncIterator[pb.ShareRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ShareResponse]:
        origin = self._peer_place(context)
        require_role(origin, (Role.PLACEMENT,), "what placement services share")
        name = origin.node_id
        answers: asyncio.Queue[pb.ShareResponse | MeshError | None] = asyncio.Queue(_MOST_ANSWERS)

        def followed(request_id: str, is_followed: bool) -> None:
            with suppress(asyncio.QueueFull):  # then the other ends a request that nobody reads there, after a while
                answers.put_nowait(pb.ShareResponse(request_id=request_id, followed=is_followed))

        session = object()
        self._sessions[name] = session
        self._siblings.answers_to(name, followed)
        log.info("sibling_tells_us", node_id=name)
        streams: dict[str, RequestStream] = {}
        reader = asyncio.create_task(self._read(name, aiter(request_iterator), answers, streams))
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, MeshError):
                    raise answer
                yield answer
        finally:
            reader.cancel()
            self._siblings.no_answers_to(name, followed)
            if self._sessions.get(name) is session:  # else it came back before this end was noticed
                del self._sessions[name]
                self._in_flight.lost(name)
                log.warning("sibling_gone", node_id=name)
            self._door.origin_lost(tuple(streams))

    async def _read(
        self,
        origin: str,
        requests: AsyncIterator[pb.ShareRequest],
        answers: asyncio.Queue[pb.ShareResponse | MeshError | None],
        streams: dict[str, RequestStream],
    ) -> None:
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    message = await anext(requests)
                self._take(origin, message, streams)
                await answers.put(pb.ShareResponse(sequence=message.sequence))
        except StopAsyncIteration:
            await answers.put(None)
        except TimeoutError:
            await answers.put(Expired(f"{origin} was silent for {SILENT_S:g} s", node=origin))
        except grpc.aio.BaseError:
            await answers.put(None)
        except MeshError as error:
            await answers.put(error)
        except Exception as error:  # else the stream would hang, and its copies with it
            log.exception("sibling_not_understood", node_id=origin)
            await answers.put(Internal(f"what {origin} told could not be taken: {type(error).__name__}"))

    def _take(self, origin: str, message: pb.ShareRequest, streams: dict[str, RequestStream]) -> None:
        match message.WhichOneof("message"):
            case "in_flight":
                self._in_flight.told(origin, _sent(message.in_flight))
            case "opened":
                opened = message.opened
                if not opened.request_id.startswith(f"{origin}:") or not opened.request.idempotency_key:
                    raise InvalidRequest(f"{origin} shares a request that is not its own, or has no key")
                with suppress(Overloaded):  # its client will not find it here
                    streams[opened.request_id] = self._door.take_copy(origin, opened)
            case "entries":
                stream = streams.get(message.entries.request_id)
                if stream is not None:
                    stream.append(*entries_from_wire(message.entries))
            case "end":
                if streams.pop(message.end.request_id, None) is not None:
                    self._door.copy_ended(message.end.request_id, error_of(message.end))


def _sent(in_flight: pb.InFlight) -> list[Sent]:
    """On this process' clock. What makes no sense is left out."""
    now_s = time.monotonic()
    return [
        Sent(
            request_id=each.request_id,
            node_id=each.node_id,
            prefill_tokens=each.prefill_tokens,
            at_s=now_s - each.age_s,
        )
        for each in in_flight.decided[-MOST:]
        if math.isfinite(each.age_s) and each.age_s >= 0
    ]
