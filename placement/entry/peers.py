"""Channels from an entry to the nodes it can dial, kept open and measured.

One PeerLink per node: a channel, a probe loop (round trip every few seconds, goodput now and then) and, where
asked for, the node's load stream. A link that fails its probe is unreachable at once and tried again with
backoff; nothing is deleted for being silent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio

from mesh.errors import MeshError, NodeUnreachable
from mesh.node.engine import EngineLoad
from mesh.node.grpc_port import GrpcPort
from mesh.node.port import KvOrder, KvReport, Peer, PortEvent, RunOrder
from mesh.node.serving_role import ServingRole, serving_role
from mesh.node.wire import load_from_wire
from mesh.process import background
from mesh.rpc.errors import translate_rpc_errors
from mesh.telemetry.log import get_logger
from mesh.v1 import node_pb2, node_pb2_grpc
from placement.entry.link_model import LinkModel

_PROBE_EVERY_S = 2.0
_PROBE_TIMEOUT_S = 3.0
_GIVEN_UP_AFTER = 2  # probes in a row
_GOODPUT_TIMEOUT_S = 30.0
_BACKOFF_CAP_S = 5.0
_RETIRED_GRACE_S = 120.0  # for what still runs over a link whose node the mesh does not list any more

_REDIAL_S = 10.0

Dial = Callable[[Peer], grpc.aio.Channel]
log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """What is known of one link now. None: not measured. `load_age_s` None: no load was ever heard."""

    reachable: bool
    rtt_s: float | None
    rtt_age_s: float | None
    goodput_bytes_per_s: float | None
    goodput_age_s: float | None
    load: EngineLoad | None
    draining: bool
    load_age_s: float | None
    role: ServingRole | None  # None: not heard


class _CountedPort(GrpcPort):
    """Knows whether runs or moves are open over it."""

    def __init__(self, channel: grpc.aio.Channel, peer: Peer) -> None:
        super().__init__(channel, peer)
        self._open = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """See NodePort.run."""
        with self._counted():
            async with aclosing(super().run(order)) as events:
                async for event in events:
                    yield event

    async def move_kv(self, order: KvOrder) -> KvReport:
        """See NodePort.move_kv."""
        with self._counted():
            return await super().move_kv(order)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()


class PeerLink:
    """One dialled node. Owned by Peers."""

    def __init__(
        self, peer: Peer, dial: Dial, *, watch_load: bool, on_change: Callable[[], None], on_news: Callable[[str], None]
    ) -> None:
        self.peer = peer
        self.channel = dial(peer)
        self.port = _CountedPort(self.channel, peer)
        self._stub = node_pb2_grpc.NodeStub(self.channel)
        self._on_change = on_change
        self._on_news = partial(on_news, peer.place.node_id)
        self._reachable = False
        self._watch_load = watch_load
        self._answered, self._told = asyncio.Event(), asyncio.Event()
        self._model = LinkModel()
        self._load: EngineLoad | None = None
        self._draining = False
        self._load_at_s: float | None = None
        self._role: ServingRole | None = None
        self._tasks = [background(self._probe_forever(), f"probe:{peer.place.node_id}")]
        if watch_load:
            self._tasks.append(background(self._watch_load_forever(), f"load:{peer.place.node_id}"))

    @property
    def facts(self) -> LinkFacts:
        now_s = time.monotonic()
        age = None if self._load_at_s is None else now_s - self._load_at_s
        link = self._model.estimate(now_s=now_s)
        return LinkFacts(
            reachable=self._reachable,
            rtt_s=link.rtt_s,
            rtt_age_s=link.rtt_age_s,
            goodput_bytes_per_s=link.goodput_bytes_per_s,
            goodput_age_s=link.goodput_age_s,
            load=self._load,
            draining=self._draining,
            load_age_s=age,
            role=self._role,
        )

    def saw_transfer(self, wire_bytes: int, duration_s: float) -> None:
        """Learn from a real transfer over this link."""
        self._model.saw_transfer(wire_bytes, duration_s, now_s=time.monotonic())
        self._on_news()

    async def set_role(self, role: ServingRole) -> ServingRole:
        """Give the node a role; returns the one before. Raises what the node says, or NodeUnreachable."""
        request = node_pb2.SetRoleRequest(role=role.value)
        with translate_rpc_errors(self.peer.place.node_id):
            response = await self._stub.SetRole(request, timeout=_PROBE_TIMEOUT_S)
        return serving_role(response.previous_role)

    async def close(self) -> None:
        """At once; what runs over it fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close()

    def take_over(self, old: PeerLink) -> None:
        """Know what another link to the same node measured."""
        self._model = old._model

    async def heard(self) -> None:
        """Until the node answered over it (and told its load, where that is watched)."""
        await self._answered.wait()
        if self._watch_load:
            await self._told.wait()

    async def retire(self, grace_s: float | None = _RETIRED_GRACE_S) -> None:
        """Close it when nothing runs over it any more, or after a while; None: however long that takes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.port.idle.wait()
        await self.close()

    def _set_reachable(self, reachable: bool) -> None:
        if reachable:
            self._answered.set()
        if reachable != self._reachable:
            self._reachable = reachable
            self._on_news()
            log.info("peer_reachable" if reachable else "peer_unreachable", node_id=self.peer.place.node_id)
            self._on_change()

    async def _probe_forever(self) -> None:
        failures = 0
        asked_s: deque[float] = deque(maxlen=_GIVEN_UP_AFTER)  # when the last probes were sent
        while True:
            asked_s.append(time.monotonic())
            try:
                await self._probe(with_goodput=self._model.wants_probe(now_s=time.monotonic()))
            except Exception as error:
                failures += 1
                self._failed(error)
                self._break_silent(failures, asked_s[0])
                await asyncio.sleep(_backoff_s(failures))
                continue
            failures = 0
            self._set_reachable(True)
            await asyncio.sleep(_PROBE_EVERY_S)

    def _failed(self, error: Exception) -> None:
        """A link must not stay as it is because something nobody thought of was raised."""
        if not isinstance(error, grpc.aio.AioRpcError | MeshError):
            log.error("peer_link_failed_by_bug", node_id=self.peer.place.node_id, exc_info=error)
        self._set_reachable(False)

    def _break_silent(self, failures: int, since_s: float) -> None:
        """A link that swallows everything shows no error for as long as TCP hopes. One probe may be late on a busy
        machine; after a second one, runs that were silent all the while (since the first of the last two was sent) are
        given up, so that their clients hear of it or the requests go on elsewhere."""
        if failures >= _GIVEN_UP_AFTER and (broken := self.port.break_silent(since_s)):
            log.warning("silent_runs_given_up", node_id=self.peer.place.node_id, count=broken)

    async def _probe(self, *, with_goodput: bool) -> None:
        started_s = time.monotonic()
        await self._stub.Probe(node_pb2.ProbeRequest(), timeout=_PROBE_TIMEOUT_S)
        now_s = time.monotonic()
        self._model.saw_round_trip(now_s - started_s, now_s=now_s)
        self._on_news()
        if with_goodput and not (self._load and self._load.running):
            size = self._model.probe_bytes
            started_s = time.monotonic()
            await self._stub.Probe(node_pb2.ProbeRequest(reply_bytes=size), timeout=_GOODPUT_TIMEOUT_S)
            now_s = time.monotonic()
            self._model.saw_probe(size, now_s - started_s, now_s=now_s)
            self._on_news()

    async def _watch_load_forever(self) -> None:
        failures = 0
        while True:
            try:
                async for response in self._stub.WatchLoad(node_pb2.WatchLoadRequest()):
                    failures = 0
                    self._load = load_from_wire(response.load)
                    self._draining = response.load.draining
                    role = serving_role(response.load.role)
                    first = self._load_at_s is None or role is not self._role
                    self._role = role
                    self._load_at_s = time.monotonic()
                    self._told.set()
                    self._on_news()
                    if first or self._draining:
                        self._on_change()
            except Exception as error:
                self._failed(error)
            failures += 1
            await asyncio.sleep(_backoff_s(failures))


def _backoff_s(failures: int) -> float:
    return random.uniform(0.1, min(_BACKOFF_CAP_S, 0.25 * 2.0 ** min(failures, 10)))


class Peers:
    """All nodes that this entry dials, by node id. `on_change`: one became reachable or stopped being so, or is
    new; `on_news(node_id)`: any figure of one changed."""

    def __init__(
        self,
        dial: Dial,
        *,
        watch_load: bool,
        on_change: Callable[[], None],
        on_news: Callable[[str], None] = lambda node_id: None,
    ) -> None:
        self._dial = dial
        self._watch_load = watch_load
        self._on_change = on_change
        self._on_news = on_news
        self._links: dict[str, PeerLink] = {}
        self._retiring: dict[asyncio.Task[None], PeerLink] = {}

    def link(self, node_id: str) -> PeerLink | None:
        return self._links.get(node_id)

    def reachable(self) -> tuple[PeerLink, ...]:
        """Links that answered last."""
        return tuple(link for link in self._links.values() if link.facts.reachable)

    def port(self, node_id: str) -> GrpcPort:
        """Raises NodeUnreachable if the node is not known here; one that does not answer says so when it is used."""
        link = self._links.get(node_id)
        if link is None:
            raise NodeUnreachable(f"node {node_id} is not known here", node=node_id)
        return link.port

    def update(self, wanted: Iterable[Peer]) -> None:
        """Open links to new nodes and to nodes that moved; close the others, once what runs over them has ended: a
        registry that lost its data is no reason to break a stream."""
        by_id = {peer.place.node_id: peer for peer in wanted}
        for node_id in [n for n, link in self._links.items() if by_id.get(n) != link.peer]:
            self._close_later(self._links.pop(node_id))
        for node_id, peer in by_id.items():
            if node_id not in self._links:
                self._links[node_id] = PeerLink(
                    peer,
                    self._dial,
                    watch_load=self._watch_load,
                    on_change=self._on_change,
                    on_news=self._on_news,
                )

    async def redial(self) -> None:
        """New connections to all nodes, as the own certificate was renewed: each is used once the node answers over it
        (or did not over the old one either); what runs over an old one ends there."""
        await asyncio.gather(*(self._redial(node_id) for node_id in tuple(self._links)))

    async def _redial(self, node_id: str) -> None:
        old = self._links.get(node_id)
        if old is None:
            return  # it left before its turn came
        new = PeerLink(
            old.peer, self._dial, watch_load=self._watch_load, on_change=self._on_change, on_news=self._on_news
        )
        new.take_over(old)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REDIAL_S):
                    await new.heard()
        except BaseException:
            await new.close()
            raise
        if self._links.get(node_id) is not old:  # the node left or moved meanwhile
            await new.close()
            return
        self._links[node_id] = new
        self._close_later(old, grace_s=None)
        self._on_news(node_id)

    def _close_later(self, link: PeerLink, *, grace_s: float | None = _RETIRED_GRACE_S) -> None:
        task = background(link.retire(grace_s), f"retire:{link.peer.place.node_id}")
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)

    async def close(self) -> None:
        links = [*self._links.values(), *self._retiring.values()]
        retiring = tuple(self._retiring)
        self._links = {}
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)
