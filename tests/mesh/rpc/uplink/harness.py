"""A hub behind a real gRPC server on loopback, agents that dial it, and a scripted host behind each.

Plain text: the place that a certificate would give is looked up by the name that the client puts in its
user-agent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from mesh.errors import MeshError, NotFound
from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import SignedRecord
from mesh.node.engine import EngineLoad, FinishReason, RunId
from mesh.node.port import (
    KvDirection,
    KvOrder,
    KvReport,
    KvSource,
    Peer,
    PortEvent,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    RunOrder,
    WorkContext,
)
from mesh.node.sampling import SamplingParams
from mesh.rpc.errors import ErrorInterceptor
from mesh.rpc.uplink.agent import UplinkAgent
from mesh.rpc.uplink.backoff import FullJitter
from mesh.rpc.uplink.clock import Clock, SystemClock
from mesh.rpc.uplink.hub import UplinkHub
from mesh.rpc.uplink.types import AgentFacts, UplinkLimits
from mesh.v1 import admin_pb2, uplink_pb2, uplink_pb2_grpc

LEG = SignedRecord(body=b"{}", signature=b"signature", certificate=b"certificate")
MODEL = admin_pb2.NodeModel(
    id="smol", max_context_tokens=8192, layout_hash="ab", weights_lineage="smol", kv_bytes_per_token=23040
)


def place(node_id: str, role: Role = Role.EDGE, site: str = "paris") -> Place:
    tier = Tier.EDGE if role is Role.EDGE else Tier.CORE
    return Place(mesh="test", role=role, tier=tier, site=site, region="eu-west", jurisdiction="FR", node_id=node_id)


def load(running: int = 0) -> EngineLoad:
    return EngineLoad(
        running=running,
        waiting=0,
        waiting_prefill_tokens=0,
        kv_used_tokens=0,
        kv_capacity_tokens=4096,
        prefill_tokens_per_s=100.0,
        decode_tokens_per_s=10.0,
    )


CONTEXT = WorkContext(
    request_id="request", tenant="dev", label="internal", model="smol", salt=bytes(32), policy_version=1
)


def run_order(run_id: str = "run", max_tokens: int = 4, prompt: int = 3) -> RunOrder:
    return RunOrder(
        context=CONTEXT,
        run_id=RunId(run_id),
        token_ids=tuple(range(prompt)),
        prompt_tokens=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=7),
    )


def kv_order(transfer_id: str = "transfer") -> KvOrder:
    return KvOrder(
        context=CONTEXT,
        transfer_id=transfer_id,
        direction=KvDirection.PULL,
        peer=Peer(address="127.0.0.1:7001", place=place("core-1", Role.CORE, "dc")),
        source=KvSource(run_id=RunId("source"), prefill=run_order("source"), pause=False),
        target=RunId("target"),
        token_ids=(1, 2, 3),
        max_tokens=64,
        codec="f16",
    )


REPORT = KvReport(
    transfer_id="transfer",
    tokens=3,
    skipped_tokens=1,
    wire_bytes=4096,
    codec="f16",
    duration_s=0.5,
    first_chunk_s=0.25,
    leg=LEG,
)


class FakeHost:
    """Runs yield Prefilled, tokens 0, 1, 2 ..., then Finished (Held for a prefill). `gate` holds tokens back while
    it is cleared; `fail` is raised by the next run or move after its first event."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail: Exception | None = None
        self.running = 0
        self.started: list[str] = []
        self.orders: list[RunOrder] = []
        self.moves: list[KvOrder] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.ids_per_event = 1
        self.events_made = 0
        self.draining = False
        self.changed = asyncio.Event()

    async def run(self, order: RunOrder) -> AsyncIterator[PortEvent]:
        self.running += 1
        self.orders.append(order)
        self._note(self.started, order.run_id)
        try:
            yield PortPrefilled(tokens=len(order.token_ids), cached_tokens=1)
            if self.fail is not None:
                raise self.fail
            if order.prefill_only:
                yield PortHeld(kv_tokens=len(order.token_ids), leg=LEG)
                return
            for token_id in range(order.sampling.max_tokens):
                await self.gate.wait()
                self.events_made += 1
                yield PortTokens((token_id,) * self.ids_per_event)
            yield PortFinished(reason=FinishReason.LENGTH, stop_string=None, leg=LEG)
        except (asyncio.CancelledError, GeneratorExit):
            self._note(self.cancelled, order.run_id)
            raise
        finally:
            self.running -= 1

    async def move_kv(self, order: KvOrder) -> KvReport:
        self.moves.append(order)
        self._note(self.started, order.transfer_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self._note(self.cancelled, order.transfer_id)
            raise
        if self.fail is not None:
            raise self.fail
        return REPORT

    async def release(self, run_id: RunId) -> None:
        self._note(self.released, run_id)

    async def load(self) -> EngineLoad:
        return load(self.running)

    def _note(self, where: list[str], what: str) -> None:
        where.append(what)
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that this host notes."""
        while not condition():
            await self.changed.wait()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks bring about; the test's own timeout ends a wait in vain."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.005)


@dataclass
class Site:
    """One agent with what it was sent."""

    agent: UplinkAgent
    host: FakeHost
    configs: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    commands: list[uplink_pb2.Command] = field(default_factory=list)
    on_config: Callable[[uplink_pb2.SiteConfig], Awaitable[None]] | None = None
    on_command: Callable[[uplink_pb2.Command], Awaitable[uplink_pb2.CommandResult]] | None = None


class Mesh:
    """A hub that can be killed and started again at the same port, and its agents."""

    def __init__(self, clock: Clock, limits: UplinkLimits, lease_s: float, heartbeat_s: float) -> None:
        self.clock, self.limits, self.lease_s, self.heartbeat_s = clock, limits, lease_s, heartbeat_s
        self.places: dict[str, Place] = {}
        self.port = 0
        self.hub: UplinkHub
        self._server: grpc.aio.Server | None = None
        self.sites: list[Site] = []

    async def start_hub(self) -> None:
        self.hub = UplinkHub(
            self._peer_place, self.clock, lease_s=self.lease_s, heartbeat_s=self.heartbeat_s, limits=self.limits
        )
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
        uplink_pb2_grpc.add_UplinkServicer_to_server(self.hub, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill_hub(self) -> None:
        """Without a word to the agents."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    def _peer_place(self, context: grpc.aio.ServicerContext) -> Place:
        agent = dict(context.invocation_metadata())["user-agent"].split()[0]
        if agent not in self.places:
            raise NotFound(agent)
        return self.places[agent]

    def channel(self, node_id: str, port: int | None = None) -> grpc.aio.Channel:
        options = [("grpc.primary_user_agent", node_id), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{port or self.port}", options=options)

    def site(
        self, node_id: str, *, role: Role = Role.EDGE, port: int | None = None, clock: Clock | None = None
    ) -> Site:
        """An agent that was not started."""
        self.places[node_id] = place(node_id, role)

        async def on_config(config: uplink_pb2.SiteConfig) -> None:
            site.configs.append(config.version)
            if site.on_config is not None:
                await site.on_config(config)

        async def on_snapshot(snapshot: admin_pb2.Snapshot) -> None:
            site.snapshots.append(snapshot.version)

        async def on_command(command: uplink_pb2.Command) -> uplink_pb2.CommandResult:
            site.commands.append(command)
            if site.on_command is not None:
                return await site.on_command(command)
            return uplink_pb2.CommandResult(migrate=admin_pb2.MigrateResponse(to_node_id="core-1"))

        host = FakeHost()
        agent = UplinkAgent(
            dial=lambda: self.channel(node_id, port),
            host=host,
            facts=AgentFacts(build="test", models=(MODEL,)),
            on_config=on_config,
            on_snapshot=on_snapshot,
            on_command=on_command,
            clock=clock or self.clock,
            backoff=FullJitter(random.Random(1), base_s=0.02, cap_s=0.1),
            limits=self.limits,
        )
        site = Site(agent, host)
        self.sites.append(site)
        return site

    async def attach(self, node_id: str) -> Site:
        """An agent that is attached, and known so at the hub."""
        site = self.site(node_id)
        await site.agent.start()
        await site.agent.wait_connected()
        await eventually(lambda: any(edge.place.node_id == node_id for edge in self.hub.attached()))
        return site


@asynccontextmanager
async def mesh(
    *, clock: Clock | None = None, limits: UplinkLimits | None = None, lease_s: float = 6.0, heartbeat_s: float = 2.0
) -> AsyncIterator[Mesh]:
    made = Mesh(clock or SystemClock(), limits or UplinkLimits(), lease_s, heartbeat_s)
    await made.start_hub()
    try:
        yield made
    finally:
        await asyncio.gather(*(site.agent.stop() for site in made.sites))
        made.hub.close()
        await made.kill_hub()


async def collect(events: AsyncIterator[PortEvent]) -> list[PortEvent]:
    return [event async for event in events]


async def error_of(awaitable: Awaitable[object]) -> MeshError:
    """The MeshError it ends with."""
    try:
        await awaitable
    except MeshError as error:
        return error
    raise AssertionError("it went well")


class RawAgent:
    """A client that speaks the session's messages by hand, for what a well-behaved agent never does."""

    def __init__(self, mesh: Mesh, node_id: str, role: Role = Role.EDGE) -> None:
        mesh.places[node_id] = place(node_id, role)
        self._channel = mesh.channel(node_id)
        self.call = uplink_pb2_grpc.UplinkStub(self._channel).Attach()

    async def hello(self, protocol: int = 1) -> uplink_pb2.AttachResponse:
        await self.send(hello=uplink_pb2.AgentHello(protocol=protocol, build="raw", clock_unix_s=1.0, models=[MODEL]))
        return await self.read()

    async def send(self, **message: object) -> None:
        await self.call.write(uplink_pb2.AttachRequest(**message))  # type: ignore[arg-type]

    async def read(self) -> uplink_pb2.AttachResponse:
        return await self.call.read()

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()
