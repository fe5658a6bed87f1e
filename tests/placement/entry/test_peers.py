"""Links to other nodes over real gRPC on loopback: measured, lost, found again, and closed without breaking streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest

from mesh.bench.link import LinkProxy
from mesh.errors import NodeUnreachable
from mesh.node.host import NodeHost
from mesh.node.port import Peer, PortEvent, PortTokens
from mesh.node.servicer import NodeServicer
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import node_pb2, node_pb2_grpc
from placement.entry import peers as peers_module
from placement.entry.peers import Peers
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import FakeGuard, FakeSigner, greedy, prompt, run_order
from tests.fakes.mesh import place_of, until

CORE = place_of("core-1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(peers_module, "_BACKOFF_CAP_S", 0.1)


@dataclass
class Served:
    """A node that listens. `servicer` may be exchanged before `start`."""

    host: NodeHost
    engine: FakeEngine
    servicer: node_pb2_grpc.NodeServicer
    address: str = ""
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
        node_pb2_grpc.add_NodeServicer_to_server(self.servicer, self.server)
        port = self.server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    engine = FakeEngine(step_delay_s=0.001)
    host = NodeHost(engine, FakeSigner(CORE), FakeGuard(), CORE)
    node = Served(host, engine, NodeServicer(host, lambda context: CORE))
    await node.start()
    yield node
    await node.stop()
    await host.close()


@asynccontextmanager
async def peers_of(*, watch_load: bool, on_change: Callable[[], None] = lambda: None) -> AsyncIterator[Peers]:
    peers = Peers(
        lambda peer: grpc.aio.insecure_channel(
            peer.address, options=[("grpc.min_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        ),
        watch_load=watch_load,
        on_change=on_change,
    )
    try:
        yield peers
    finally:
        await peers.close()


async def test_a_link_is_measured(served: Served) -> None:
    changes: list[int] = []
    async with peers_of(watch_load=True, on_change=lambda: changes.append(1)) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        link = peers.link("core-1")
        assert link is not None
        assert not link.facts.reachable
        assert link.facts.load_age_s is None
        await until(lambda: link.facts.reachable and link.facts.load is not None and link.facts.goodput_bytes_per_s)
        assert link.facts.rtt_s is not None
        assert link.facts.rtt_s > 0
        assert not link.facts.draining
        assert changes
        goodput = link.facts.goodput_bytes_per_s
        link.saw_transfer(100, 0.001)  # too small to say anything
        assert link.facts.goodput_bytes_per_s == goodput
        served.host._desk.draining = True
        served.host._desk.change()
        await until(lambda: link.facts.draining)


async def test_a_node_that_goes_and_comes_back(served: Served) -> None:
    async with peers_of(watch_load=True) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        link = peers.link("core-1")
        assert link is not None
        await until(lambda: link.facts.reachable)
        await served.stop()
        await until(lambda: not link.facts.reachable)
        await served.start()
        await until(lambda: link.facts.reachable)
        assert peers.link("core-1") is link


async def test_unknown_nodes_have_no_port(served: Served) -> None:
    async with peers_of(watch_load=False) as peers:
        with pytest.raises(NodeUnreachable) as caught:
            peers.port("core-1")
        assert caught.value.details["node"] == "core-1"
        peers.update([Peer(address=served.address, place=CORE)])
        assert peers.port("core-1").place == CORE
        peers.update([])
        with pytest.raises(NodeUnreachable):
            peers.port("core-1")


async def test_a_node_that_moved_gets_a_new_link(served: Served) -> None:
    async with peers_of(watch_load=False) as peers:
        peers.update([Peer(address="127.0.0.1:1", place=CORE)])
        old = peers.link("core-1")
        peers.update([Peer(address=served.address, place=CORE)])
        new = peers.link("core-1")
        assert new is not None
        assert new is not old
        await until(lambda: new.facts.reachable)
        peers.update([Peer(address=served.address, place=CORE)])
        assert peers.link("core-1") is new


async def test_a_link_that_is_not_wanted_any_more_lets_its_runs_end(served: Served) -> None:
    async with peers_of(watch_load=False) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        port = peers.port("core-1")
        events: list[PortEvent] = []
        async with aclosing(port.run(run_order("r1", prompt(10), sampling=greedy(40)))) as run:
            async for event in run:
                events.append(event)
                if len(events) == 3:
                    peers.update([])
        assert sum(len(e.ids) for e in events if isinstance(e, PortTokens)) == 40
        await until(lambda: not peers._retiring)


async def test_closing_ends_retired_links_too(served: Served) -> None:
    served.engine.gate = asyncio.Event()  # nothing goes on
    async with peers_of(watch_load=False) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        run = peers.port("core-1").run(run_order("r1", prompt(100), sampling=greedy(40)))
        first = asyncio.ensure_future(anext(run))
        await until(lambda: served.host.statistics().running == 1)
        peers.update([])
    with pytest.raises(asyncio.CancelledError):  # as grpc.aio tells it; see RequestDriver
        await first
    await run.aclose()
    await until(lambda: served.host.statistics().running == 0)


class _OddNode(node_pb2_grpc.NodeServicer):
    """Tells a load that cannot be."""

    def __init__(self) -> None:
        self.asked = 0

    async def Probe(self, request: node_pb2.ProbeRequest, context: object) -> node_pb2.ProbeResponse:
        return node_pb2.ProbeResponse(payload=bytes(request.reply_bytes))

    async def WatchLoad(
        self, request: node_pb2.WatchLoadRequest, context: object
    ) -> AsyncIterator[node_pb2.WatchLoadResponse]:
        self.asked += 1
        yield node_pb2.WatchLoadResponse(load=node_pb2.NodeLoad(decode_tokens_per_s=float("nan")))


async def test_a_load_that_cannot_be_does_not_stop_the_watch(served: Served) -> None:
    odd = _OddNode()
    await served.stop()
    served.servicer = odd
    await served.start()
    async with peers_of(watch_load=True) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        await until(lambda: odd.asked >= 3)
        link = peers.link("core-1")
        assert link is not None
        assert link.facts.load is None


async def test_a_bug_in_a_probe_does_not_leave_a_link_reachable(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peers_of(watch_load=False) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        link = peers.link("core-1")
        assert link is not None
        await until(lambda: link.facts.reachable)
        probe = link._probe

        async def broken(*, with_goodput: bool) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(link, "_probe", broken)
        await until(lambda: not link.facts.reachable)
        monkeypatch.setattr(link, "_probe", probe)
        await until(lambda: link.facts.reachable)


async def test_a_run_that_was_heard_during_the_first_silent_probe_is_given_up_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.engine.gate = asyncio.Event()  # nothing comes
    async with peers_of(watch_load=False) as peers:
        peers.update([Peer(address=served.address, place=CORE)])
        link = peers.link("core-1")
        assert link is not None
        await until(lambda: link.facts.reachable)
        heard = list[float]()

        async def silent(*, with_goodput: bool) -> None:
            await asyncio.sleep(0.01)
            if not heard:  # it had been under way
                heard.append(time.monotonic())
                for call in link.port._heard_s:
                    link.port._heard_s[call] = heard[0]
            raise NodeUnreachable("no answer", node="core-1")

        async with aclosing(peers.port("core-1").run(run_order("r", prompt(20), sampling=greedy(9)))) as run:
            first = asyncio.ensure_future(anext(run))
            await until(lambda: served.host.statistics().running == 1)
            monkeypatch.setattr(link, "_probe", silent)
            await until(first.done)
            assert heard
            assert first.cancelled()  # as grpc.aio tells it; see RequestDriver


async def test_a_link_that_swallows_everything_ends_its_silent_runs(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_PROBE_TIMEOUT_S", 0.2)
    host, _, port = served.address.rpartition(":")
    async with LinkProxy(host, int(port)) as link, peers_of(watch_load=False) as peers:
        peers.update([Peer(address=link.address, place=CORE)])
        opened = peers.link("core-1")
        assert opened is not None
        await until(lambda: opened.facts.reachable)
        order = run_order("r", prompt(20), sampling=greedy(max_tokens=900))
        async with aclosing(peers.port("core-1").run(order)) as run:
            await anext(run)
            link.stall()
            with pytest.raises((NodeUnreachable, asyncio.CancelledError)):
                async for _ in run:
                    pass
        assert not opened.facts.reachable
        link.resume()
        await until(lambda: opened.facts.reachable)
