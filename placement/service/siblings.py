"""The other placement services of the mesh: each tells each what its nodes do not show yet, and copies its requests.

One stream to every other one, dialled by the one that tells. A request's events are shown to its client when those who
keep copies have them, or when they take longer than LAG_S: then the client does not wait for them, and a copy may end
up some tokens short, which whoever goes on from it computes again. A sibling that ends the stream, or says nothing for
SILENT_S, is gone; the servicer (siblings_servicer) tells the front door.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial

import grpc.aio

from mesh.errors import Draining, MeshError, told_details
from mesh.identity.place import Place
from mesh.node.port import Peer
from mesh.process import background
from mesh.telemetry.log import get_logger
from mesh.v1 import sibling_pb2 as pb
from mesh.v1 import sibling_pb2_grpc as pb_grpc
from placement.entry.copies import ENTRY_STOPS, entries_to_wire
from placement.entry.in_flight import InFlight
from placement.entry.peers import Dial
from placement.entry.request_log import LogEntry, RequestStream
from placement.service.witnesses import Dialled

log = get_logger(__name__)
LAG_S = 0.25
TELL_EVERY_S = 0.25
_RETRY_S = 0.5
_MOST_UNTOLD = 4_096  # messages; a sibling that takes fewer is tried anew

OnFollowed = Callable[[str, bool], None]


class StreamCopies:
    """The copies of one stream (placement.entry.request_log.StreamCopies): shows its events when all keepers have
    them."""

    def __init__(self, stream: RequestStream, links: Iterable[SiblingLink]) -> None:
        self._stream = stream
        self._links = list(links)
        self._kept = dict.fromkeys(self._links, 0)  # link -> events that it has
        self._timer: asyncio.TimerHandle | None = None

    def appended(self, entries: Sequence[LogEntry]) -> None:
        """Events were appended to the stream."""
        count = self._stream.count
        message = entries_to_wire(self._stream.request_id, entries)
        for link in tuple(self._links):  # _drop takes out one that is gone
            link.tell(pb.ShareRequest(entries=message), partial(self._has, link, count), self._drop)
        self._show()

    def ended(self, error: MeshError | None) -> None:
        """The stream ended. An entry that stops (its error says so) says nothing: others may go on with its
        requests."""
        if self._timer is not None:
            self._timer.cancel()
        if not (isinstance(error, Draining) and ENTRY_STOPS in error.details):
            end = pb.CopiedEnd(request_id=self._stream.request_id)
            if error is not None:
                end.error_reason, end.error_message = error.reason, error.message
                end.error_details.update(told_details(error.details))
            for link in self._links:
                link.tell(pb.ShareRequest(end=end), lambda: None, lambda link: None)
        self._kept.clear()
        self._stream.show(self._stream.count)

    def _has(self, link: SiblingLink, count: int) -> None:
        if link in self._kept:
            self._kept[link] = count
            self._show()

    def _drop(self, link: SiblingLink) -> None:
        """It is gone, or too slow to be waited for."""
        self._kept.pop(link, None)
        if link in self._links:
            self._links.remove(link)
        self._show()

    def _show(self) -> None:
        count = self._stream.count
        shown = min(self._kept.values(), default=count)
        self._stream.show(shown)
        if shown >= count and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif shown < count and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LAG_S, self._lags, count)

    def _lags(self, count: int) -> None:
        """Those that do not have what they had LAG_S to take are not waited for any more; they are still told."""
        self._timer = None
        for link in [link for link, kept in self._kept.items() if kept < count]:
            log.warning("sibling_lags", node_id=link.place.node_id, request_id=self._stream.request_id)
            del self._kept[link]
        self._show()


class SiblingLink:
    """What is told to one other placement service. Owned by Siblings."""

    def __init__(self, peer: Peer, dial: Dial, in_flight: InFlight, on_followed: OnFollowed) -> None:
        self.place = peer.place
        self.channel = dial(peer)
        self._in_flight = in_flight
        self._on_followed = on_followed
        self._untold: deque[pb.ShareRequest] = deque()
        self._news = asyncio.Event()
        self._sequence = 0
        self._behind = False  # the other took too little: the session ends, so that it knows its copies to be short
        self._followed: deque[str] = deque(maxlen=_MOST_UNTOLD)  # our requests that were read there of late
        self._waiting: deque[tuple[int, Callable[[], None], Callable[[SiblingLink], None]]] = deque()
        self.up = False
        self._task = background(self._keep_telling(), f"sibling:{peer.place.node_id}")

    def tell(
        self, message: pb.ShareRequest, on_taken: Callable[[], None], on_lost: Callable[[SiblingLink], None]
    ) -> None:
        """Send it; `on_taken` when the other has it, `on_lost` if the stream ends before."""
        if not self.up or self._behind or len(self._untold) >= _MOST_UNTOLD:
            self._behind = self.up
            self._news.set()
            on_lost(self)
            return
        self._sequence += 1
        message.sequence = self._sequence
        self._untold.append(message)
        self._waiting.append((self._sequence, on_taken, on_lost))
        self._news.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close()

    async def _keep_telling(self) -> None:
        while True:
            try:
                await self._session()
            except (grpc.aio.AioRpcError, MeshError) as error:
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error.reason
                if self.up:
                    log.warning("sibling_lost", node_id=self.place.node_id, reason=reason)
            finally:
                self._lost()
            await asyncio.sleep(_RETRY_S)

    async def _session(self) -> None:
        self._sequence, self._behind = 0, False
        call = pb_grpc.SiblingStub(self.channel).Share(self._messages())
        try:
            async for answer in call:
                if not self.up:
                    self.up = True
                    log.info("sibling_hears_us", node_id=self.place.node_id)
                if answer.request_id:
                    if answer.followed:
                        self._followed.append(answer.request_id)
                    self._on_followed(answer.request_id, answer.followed)
                while self._waiting and self._waiting[0][0] <= answer.sequence:
                    self._waiting.popleft()[1]()
        finally:
            call.cancel()

    async def _messages(self) -> AsyncIterator[pb.ShareRequest]:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            while self._untold and not self._behind:
                yield self._untold.popleft()
            if self._behind:
                log.warning("sibling_takes_too_little", node_id=self.place.node_id)
                return
            if loop.time() >= due_s:
                due_s = loop.time() + TELL_EVERY_S
                yield self._in_flight_message()
            self._news.clear()
            if not self._untold:
                try:
                    async with asyncio.timeout(max(0.0, due_s - loop.time())):
                        await self._news.wait()
                except TimeoutError:
                    pass

    def _in_flight_message(self) -> pb.ShareRequest:
        now_s = time.monotonic()
        decided = [
            pb.Decided(
                node_id=each.node_id,
                prefill_tokens=each.prefill_tokens,
                age_s=now_s - each.at_s,
                request_id=each.request_id,
            )
            for each in self._in_flight.own(now_s)
        ]
        return pb.ShareRequest(in_flight=pb.InFlight(decided=decided))

    def _lost(self) -> None:
        self.up = False
        while self._followed:  # whoever read there does so no longer
            self._on_followed(self._followed.popleft(), False)
        self._untold.clear()
        waiting, self._waiting = self._waiting, deque()
        for _, _, on_lost in waiting:
            on_lost(self)


class Siblings:
    """All other placement services. Is the front door's Copier; `update` follows the registry."""

    def __init__(self, dial: Dial, in_flight: InFlight) -> None:
        self._dial = dial
        self._in_flight = in_flight
        self._links: dict[str, SiblingLink] = {}
        self._answers: dict[str, Callable[[str, bool], None]] = {}  # origin -> tells it who reads its requests here
        self._closing: set[asyncio.Task[None]] = set()
        self.on_followed: OnFollowed = lambda request_id, followed: None

    def update(self, peers: Iterable[Peer]) -> None:
        """Placement services that are registered now, without this one. One that is silent stays: it is tried."""
        wanted = {peer.place.node_id: peer for peer in peers}
        for node_id in [n for n, link in self._links.items() if n not in wanted or link.place != wanted[n].place]:
            task = asyncio.create_task(self._links.pop(node_id).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for node_id, peer in wanted.items():
            if node_id not in self._links:
                self._links[node_id] = SiblingLink(peer, self._dial, self._in_flight, self._followed_there)

    def _followed_there(self, request_id: str, followed: bool) -> None:
        self.on_followed(request_id, followed)

    def places(self) -> tuple[Place, ...]:
        """All that are registered."""
        return tuple(link.place for link in self._links.values())

    def up(self) -> tuple[Dialled, ...]:
        """Those that hear us."""
        return tuple(Dialled(link.place, link.channel) for link in self._links.values() if link.up)

    def copy(
        self, opened: pb.CopiedRequest, stream: RequestStream, may_be_at: Callable[[Place], bool]
    ) -> tuple[Place, ...]:
        """See placement.entry.copies.Copier."""
        links = [link for link in self._links.values() if link.up and may_be_at(link.place)]
        if links:
            stream.copies = StreamCopies(stream, links)
            for link in links:
                link.tell(pb.ShareRequest(opened=opened), lambda: None, lambda link: None)
        return tuple(link.place for link in links)

    def followed(self, origin: str, request_id: str, followed: bool) -> None:
        """See placement.entry.copies.Copier."""
        answer = self._answers.get(origin)
        if answer is not None:
            answer(request_id, followed)

    def answers_to(self, origin: str, answer: Callable[[str, bool], None]) -> None:
        """How to tell a sibling that listens for answers on its own stream."""
        self._answers[origin] = answer

    def no_answers_to(self, origin: str, answer: Callable[[str, bool], None]) -> None:
        if self._answers.get(origin) is answer:
            del self._answers[origin]

    async def close(self) -> None:
        links, self._links = tuple(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing, return_exceptions=True)
