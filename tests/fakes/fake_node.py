"""Parts around a NodeHost for tests: places, a signer, guards, orders, and two hosts linked in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mesh.errors import Internal, MeshError, NodeUnreachable, PolicyDenied
from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import SignedRecord
from mesh.node.engine import RunId
from mesh.node.host import NodeHost
from mesh.node.host_frames import HostFrame
from mesh.node.port import (
    KvDirection,
    KvOrder,
    KvSource,
    Peer,
    PortEvent,
    PortTokens,
    RunOrder,
    WorkContext,
)
from mesh.node.sampling import SamplingParams

SALT = bytes(range(32))


def place_of(node_id: str, tier: Tier = Tier.CORE, *, mesh: str = "test") -> Place:
    role = Role.CORE if tier is Tier.CORE else Role.EDGE
    return Place(
        mesh=mesh, role=role, tier=tier, site=f"site-{node_id}", region="eu", jurisdiction="fr", node_id=node_id
    )


CORE = place_of("core-1")
EDGE = place_of("paris-1", Tier.EDGE)


@dataclass(frozen=True, slots=True)
class FakeSigner:
    """Signs with the node's name, which is enough where nobody verifies."""

    place: Place

    def sign(self, body: dict[str, Any]) -> SignedRecord:
        raw = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        return SignedRecord(body=raw, signature=b"signed", certificate=self.place.uri.encode())


@dataclass(slots=True)
class FakeGuard:
    """Allows all but the listed node ids; remembers what it was asked."""

    no_prompt: set[str] = field(default_factory=set)
    no_kv: set[str] = field(default_factory=set)
    no_relay: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)

    def check_prompt(self, context: WorkContext, place: Place) -> None:
        self.asked.append(("prompt", place.node_id))
        if place.node_id in self.no_prompt:
            raise PolicyDenied("no prompt there", rule="test-prompt")

    def check_relay(self, context: WorkContext) -> None:
        self.asked.append(("relay", ""))
        if self.no_relay:
            raise PolicyDenied("no relay", rule="relay")

    def check_kv(self, context: WorkContext, place: Place) -> None:
        self.asked.append(("kv", place.node_id))
        if place.node_id in self.no_kv:
            raise PolicyDenied("no KV there", rule="test-kv")


def context_of(**changes: Any) -> WorkContext:
    values: dict[str, Any] = {
        "request_id": "req-1", "tenant": "acme", "label": "internal", "model": "toy", "salt": SALT,
        "policy_version": 3,
    }  # fmt: skip
    return WorkContext(**{**values, **changes})


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": max_tokens, "seed": 7, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**{**values, **changes})


def prompt(n_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(3 + (i * 37 + seed * 101 + i * i * 7) % 500 for i in range(n_tokens))


def run_order(run_id: str, token_ids: tuple[int, ...], **changes: Any) -> RunOrder:
    values: dict[str, Any] = {
        "context": context_of(), "run_id": RunId(run_id), "token_ids": token_ids, "prompt_tokens": len(token_ids),
        "sampling": greedy(),
    }  # fmt: skip
    return RunOrder(**{**values, **changes})


def kv_order(
    peer: Place,
    *,
    direction: KvDirection,
    token_ids: tuple[int, ...],
    source: KvSource,
    target: str = "target",
    address: str = "memory",
    **changes: Any,
) -> KvOrder:
    values: dict[str, Any] = {
        "context": context_of(), "transfer_id": f"t-{target}", "direction": direction,
        "peer": Peer(address=address, place=peer), "source": source, "target": RunId(target),
        "token_ids": token_ids, "max_tokens": 1000, "codec": "f16",
    }  # fmt: skip
    return KvOrder(**{**values, **changes})


@dataclass(slots=True)
class Outcome:
    """Events of a run as they come."""

    events: list[PortEvent] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for e in self.events if isinstance(e, PortTokens) for i in e.ids)

    @property
    def last(self) -> PortEvent:
        return self.events[-1]


async def collect(host: NodeHost, order: RunOrder, into: Outcome | None = None) -> Outcome:
    outcome = into if into is not None else Outcome()
    async for event in host.run(order):
        outcome.events.append(event)
    return outcome


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the test's own timeout is the limit
        await asyncio.sleep(0)


Tamper = Callable[[HostFrame], list[HostFrame]]


class MemoryStream:
    """One end of a pair. `tamper` turns each frame that this end sends into those that arrive."""

    def __init__(self, peer_place: Place, inbox: asyncio.Queue[Any], outbox: asyncio.Queue[Any]) -> None:
        self.peer_place = peer_place
        self._inbox = inbox
        self._outbox = outbox
        self.tamper: Tamper = lambda frame: [frame]
        self.sent: list[HostFrame] = []
        self.closed = False

    async def send(self, frame: HostFrame) -> None:
        if self.closed:
            raise NodeUnreachable("the stream is closed")
        self.sent.append(frame)
        for arriving in self.tamper(frame):
            await self._outbox.put(arriving)
        await asyncio.sleep(0)

    async def recv(self) -> HostFrame:
        if self.closed:
            raise NodeUnreachable("the stream is closed")
        frame = await self._inbox.get()
        if isinstance(frame, MeshError):
            self.closed = True
            raise frame
        return frame

    def end(self, error: MeshError | None = None) -> None:
        """The peer sees the end, or the error, after what was sent."""
        self.closed = True
        self._outbox.put_nowait(error or NodeUnreachable("the peer ended the stream"))


def memory_pair(a: Place, b: Place) -> tuple[MemoryStream, MemoryStream]:
    """Ends for the node at `a` and the node at `b`."""
    to_a: asyncio.Queue[Any] = asyncio.Queue()
    to_b: asyncio.Queue[Any] = asyncio.Queue()
    return MemoryStream(b, to_a, to_b), MemoryStream(a, to_b, to_a)


class MemoryNetwork:
    """Dials hosts by place. `on_pair` may tamper with both ends (dialling, dialled) of each new stream."""

    def __init__(self) -> None:
        self.hosts: dict[str, NodeHost] = {}
        self.on_pair: Callable[[MemoryStream, MemoryStream], None] = lambda a, b: None
        self.streams: list[tuple[MemoryStream, MemoryStream]] = []
        self.served: list[BaseException | None] = []

    def add(self, host: NodeHost) -> None:
        self.hosts[host.place.node_id] = host

    def dial_from(self, own: Place) -> Callable[[Peer], Any]:
        @asynccontextmanager
        async def dial(peer: Peer) -> AsyncIterator[MemoryStream]:
            host = self.hosts.get(peer.place.node_id)
            if host is None:
                raise NodeUnreachable(f"no node {peer.place.node_id}")
            ours, theirs = memory_pair(own, host.place)
            self.streams.append((ours, theirs))
            self.on_pair(ours, theirs)
            serving = asyncio.create_task(self._serve(host, theirs))
            try:
                yield ours
            finally:
                ours.end()
                await asyncio.wait((serving,))

        return dial

    async def _serve(self, host: NodeHost, stream: MemoryStream) -> None:
        error: MeshError | None = None
        try:
            await host.serve_transfer(await stream.recv(), stream)
            self.served.append(None)
        except Exception as exc:
            error = exc if isinstance(exc, MeshError) else Internal("a bug over there")
            self.served.append(exc)
        finally:
            stream.end(error)
