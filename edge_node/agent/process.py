"""An edge agent as a process: the llama.cpp engine, the entry of its own site, an uplink to each
placement service of the mesh.

It opens no port to the outside: its listeners are for clients of its own site. Cut off, it goes on serving them
under the policies that it has; without any it refuses (fail closed). SIGTERM: take nothing new, let running
requests end, leave.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial

import grpc.aio
from grpc_health.v1 import health_pb2

from edge_node.agent.kvtc_artifacts import FOLDER, ArtifactKeeper
from edge_node.agent.model_store import MODELS_FOLDER, ModelStore
from edge_node.agent.site_config import SiteConfig
from edge_node.agent.telemetry import TelemetrySampler
from edge_node.agent.verified import VERIFIED_FILE, LastWord
from edge_node.agent.world import EdgeWorld
from edge_node.engine.engine import EdgeEngine
from edge_node.engine.settings import EdgeEngineSettings
from mesh import __version__
from mesh.audit.log import AUDIT_FOLDER, AuditLog, LogLimits
from mesh.audit.witness import WitnessDesk
from mesh.errors import MeshError, NotImplementedHere, PayloadCorrupt, PolicyDenied, Unauthenticated
from mesh.http.app import create_app
from mesh.identity.keyring import Keyring
from mesh.identity.place import Role
from mesh.identity.principal import AccessRole, Principal
from mesh.identity.sealing import StateKey
from mesh.identity.signing import NodeIdentity
from mesh.kv.profiling import codecs_beside
from mesh.machine import usable_threads
from mesh.model.description import model_digest
from mesh.node.engine import EngineLoad
from mesh.node.host import NodeHost
from mesh.node.load_watch import LoadWatch
from mesh.node.local_port import LocalPort
from mesh.process import (
    OneAtATime,
    announce_ready,
    background_loop,
    check_certificate,
    prepare_state_folder,
    raise_descriptor_limit,
    stop_signal,
)
from mesh.rpc.channel import node_channel
from mesh.rpc.enrol import renew
from mesh.rpc.relay.attendant import RelayAttendant
from mesh.rpc.relay.dialling import RelayDialler, RelayTransport
from mesh.rpc.renewal import CertificateRenewal
from mesh.rpc.server import health_server
from mesh.rpc.uplink.agent import UplinkAgent
from mesh.rpc.uplink.backoff import FullJitter
from mesh.rpc.uplink.types import AgentFacts
from mesh.settings import EdgeSettings, ModelFile, PlacementPeer
from mesh.systemd import told_ready
from mesh.telemetry.history import FOLDER as TELEMETRY_FOLDER
from mesh.telemetry.log import configure_log, get_logger
from mesh.telemetry.mesh_metrics import UplinkCollector
from mesh.telemetry.metrics import Metrics
from mesh.telemetry.spool import TelemetrySpool
from mesh.telemetry.traces import configure_traces
from mesh.v1 import admin_pb2, uplink_pb2
from placement.entry.decisions import FrontDoorDeps
from placement.entry.front_door import FrontDoor
from placement.entry.gateway import EntryGateway
from placement.entry.intake import served_model
from placement.entry.mesh_view import ModelFacts, models_to_wire
from placement.entry.plugins import decide_settings
from placement.entry.public import http_listener, public_listener
from placement.entry.relocator import Relocator
from placement.entry.request_view import running_requests
from placement.policy.book import BookGuard

log = get_logger(__name__)
_GRPC_GRACE_S = 1.0
_SEGMENT_BYTES = 4 << 20  # of the audit log: what was merged goes file by file
_SITE_CONFIG_FILE = "site_config.bin"


async def serve(settings: EdgeSettings) -> None:
    """Run until SIGTERM. Raises MeshError if it cannot start."""
    keyring = Keyring.load(settings.identity.folder)
    credentials = keyring.now
    place = credentials.place
    identity = NodeIdentity(place, credentials)
    configure_log(settings.log, node_id=place.node_id)
    tracer = configure_traces(settings.traces, node_id=place.node_id, role=Role.EDGE.value)
    raise_descriptor_limit()
    try:
        check_certificate(credentials)
    except Unauthenticated as error:  # the mesh will not have it, its own site's clients need it all the same
        log.error("certificate_not_valid", reason=error.reason, error=error.message)
    await asyncio.to_thread(prepare_state_folder, settings.state_folder)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        key = await asyncio.to_thread(_state_key, settings)
        site = SiteConfig(settings.state_folder / _SITE_CONFIG_FILE, None if key is None else key.sealer("site-config"))
        word = await asyncio.to_thread(LastWord, settings.state_folder / VERIFIED_FILE)
        _load(site)
        store = ModelStore(settings.state_folder / MODELS_FOLDER)
        settings = await asyncio.to_thread(_with_installed_model, settings, store)
        model = await asyncio.to_thread(served_model, settings.model.id, settings.model.path)
        engine = EdgeEngine(_engine_settings(settings))
        stack.push_async_callback(engine.close)
        await engine.start()
        speeds = await engine.self_test()
        await asyncio.to_thread(store.started)
        digest = await asyncio.to_thread(model_digest, settings.model.path)
        info = engine.info
        beside = await asyncio.to_thread(codecs_beside, settings.model.path, info.geometry, info.weights_lineage)
        artifacts = ArtifactKeeper(
            settings.state_folder / FOLDER, info.geometry, info.weights_lineage,
            dial=lambda peer: node_channel(peer.address, keyring.now, peer.place),
            on_codecs=lambda more: tell_models((ModelFacts.of(info, digest, (*world.models[0].codecs, *more)),)),
        )  # fmt: skip
        models = (ModelFacts.of(info, digest, (*beside, *await asyncio.to_thread(artifacts.load))),)

        guard = BookGuard(lambda: site.book)
        audit = await asyncio.to_thread(_audit_log, settings, identity, key)
        stack.push_async_callback(audit.close)
        host = NodeHost(engine, identity, guard, place, legs=audit)
        stack.push_async_callback(host.close)
        placement = settings.placement

        def dial_placement() -> grpc.aio.Channel:
            return node_channel(str(placement.address), keyring.now, placement.node_id)

        relay = RelayDialler(dial_placement, identity, credentials.ca_pem, relay=placement.node_id)
        own = LocalPort(
            host,
            lambda peer: node_channel(peer.address, keyring.now, peer.place),
            relay=lambda direct: RelayTransport(direct, relay),
        )
        world = EdgeWorld(
            own=own,
            models=models,
            load=await host.load(),
            dial=lambda peer: node_channel(peer.address, keyring.now, peer.place),
            relay=relay,
        )
        stack.push_async_callback(world.close)

        def take_load(load: EngineLoad) -> None:
            world.set_load(load, draining=host.draining)

        load = LoadWatch(host, settings.load_period_s, take_load)
        await load.start()
        stack.push_async_callback(load.close)
        metrics = Metrics(node_id=place.node_id, role=Role.EDGE.value)
        metrics.watch_host(host.statistics)
        metrics.watch_load(lambda: load.latest)
        door = FrontDoor(
            FrontDoorDeps(
                signer=identity,
                world=world,
                models={model.model_id: model},
                policies=lambda: site.book,
                salt=site.salt,
                metrics=metrics,
                receipts=audit,
                settings=decide_settings(settings.decision, stale_load_s=settings.stale_load_s),
                policy_age_s=lambda: word.age_s,
            )
        )

        requests = _OwnRequests(door, world, place.node_id)
        relocator = Relocator(door, world)
        relocator.start()
        stack.push_async_callback(relocator.close)
        public, public_health = public_listener(
            settings.listeners.public, keyring, door=door, source=world, mover=requests,
            directory=lambda: site.directory,
        )  # fmt: skip
        health, health_state = health_server(str(settings.listeners.health))
        gateway = EntryGateway(door, lambda: site.directory, metrics)
        http = http_listener(create_app(gateway), settings.listeners.http, settings.identity.folder)
        for listener in (public, health):
            await listener.server.start()
            stack.push_async_callback(listener.server.stop, _GRPC_GRACE_S)
        await http.start()
        stack.push_async_callback(http.close)

        spool = await asyncio.to_thread(TelemetrySpool, settings.state_folder / TELEMETRY_FOLDER)
        uplinks: list[UplinkAgent] = []
        sampler = TelemetrySampler(
            spool,
            load=lambda: load.latest,
            totals=lambda: metrics.totals,
            connected=lambda: any(uplink.state.connected for uplink in uplinks),
        )
        site_host, desk = _SiteHost(host, own, door), WitnessDesk(audit, credentials.ca_pem)
        for peer in (placement, *settings.more_placements):
            dial = partial(_dial, keyring, peer)
            attendant = RelayAttendant(host, guard, identity, credentials.ca_pem, dial, relay=peer.node_id)
            stack.push_async_callback(attendant.close)
            pushes = _Pushes(site, world, door, desk, attendant, requests, sampler, _is_second(tuple(uplinks)))
            uplinks.append(_uplink(settings, dial, site_host, models, pushes))
        metrics.watch(UplinkCollector(lambda: uplinks[0].state, time.monotonic))
        for uplink in uplinks:
            await uplink.start()
            stack.push_async_callback(uplink.stop)
        sampler.start()
        stack.push_async_callback(sampler.close)

        def tell_models(changed: tuple[ModelFacts, ...]) -> None:
            world.set_models(changed)
            for uplink in uplinks:
                uplink.set_facts(_facts(changed))

        following = background_loop(lambda: artifacts.follow(world.nodes, lambda: world.models[0]), "kvtc_artifacts")
        stack.push_async_callback(_end, following)
        word.start(lambda: [uplink.state for uplink in uplinks])
        stack.push_async_callback(word.close)

        keyring.listen(identity.renew)
        keyring.listen(lambda _: http.renew_certificate())
        redials = OneAtATime(world.redial)
        keyring.listen(lambda _: redials.start())
        stack.push_async_callback(redials.close)
        renewal = CertificateRenewal(keyring, lambda: renew(str(placement.address), keyring, placement.node_id))
        renewal.start()
        stack.push_async_callback(renewal.close)
        announce_ready(
            settings.state_folder,
            node_id=place.node_id,
            site=place.site,
            grpc=public.address,
            http=http.url,
            **asdict(speeds),
        )
        stack.enter_context(told_ready(settings.systemd))

        await stop_signal()
        for state in (health_state, public_health):
            await state.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await door.drain(settings.drain_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_s):
                await host.drain()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _with_installed_model(settings: EdgeSettings, store: ModelStore) -> EdgeSettings:
    """The model that was installed last and works; the one that the settings name, if none was."""
    try:
        installed = store.start()
    except MeshError as error:
        log.error("installed_model_not_used", reason=error.reason, error=error.message)
        return settings
    if installed is None:
        return settings
    return settings.model_copy(update={"model": ModelFile(id=installed.record.model_id, path=installed.path)})


def _state_key(settings: EdgeSettings) -> StateKey | None:
    if settings.state_key is None:
        log.warning("state_not_sealed", error="no state_key is set: who has the disk can read what the box keeps on it")
        return None
    return StateKey.load(settings.state_key)


def _audit_log(settings: EdgeSettings, identity: NodeIdentity, key: StateKey | None) -> AuditLog:
    receipts = settings.receipts
    return AuditLog(
        settings.state_folder / AUDIT_FOLDER,
        identity,
        limits=LogLimits(
            segment_bytes=_SEGMENT_BYTES,
            most_unmerged_bytes=receipts.most_unmerged_bytes,
            keep_merged_bytes=receipts.keep_merged_bytes,
            keep_free_bytes=receipts.keep_free_bytes,
        ),
        sealer=None if key is None else key.sealer("audit"),
    )


def _load(site: SiteConfig) -> None:
    """A damaged file must not keep a box down that nobody can reach by hand: it starts as if it had none."""
    try:
        site.load()
    except PayloadCorrupt as error:
        log.error("site_config_damaged", reason=error.reason, error=error.message)


class _OwnRequests:
    """An edge moves and lists the requests that it is the entry of, and no others."""

    def __init__(self, door: FrontDoor, world: EdgeWorld, node_id: str) -> None:
        self._door = door
        self._world = world
        self._node_id = node_id

    async def migrate(self, principal: Principal, request: admin_pb2.MigrateRequest) -> admin_pb2.MigrateResponse:
        return await self._door.migrate(principal, request)

    async def list_requests(self) -> admin_pb2.ListRequestsResponse:
        return admin_pb2.ListRequestsResponse(requests=running_requests(self._door, self._node_id, self._world.nodes()))


class _SiteHost:
    """The node behind the uplink: the host, with KV moved over connections that this box dials. It says that it
    drains as soon as its entry does, so that placement sends nothing new; what is on its way is still taken."""

    def __init__(self, host: NodeHost, own: LocalPort, door: FrontDoor) -> None:
        self._host = host
        self._door = door
        self.run = own.run
        self.move_kv = own.move_kv
        self.release = own.release
        self.load = host.load

    @property
    def draining(self) -> bool:
        return self._host.draining or self._door.draining


class _Pushes:
    """What a placement service sends over its uplink. `is_second`: another one's view of the mesh is in use now."""

    def __init__(
        self,
        site: SiteConfig,
        world: EdgeWorld,
        door: FrontDoor,
        desk: WitnessDesk,
        attendant: RelayAttendant,
        requests: _OwnRequests,
        sampler: TelemetrySampler,
        is_second: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_second = is_second
        self._sampler = sampler
        self._requests = requests
        self._site = site
        self._world = world
        self._door = door
        self._desk = desk
        self._attendant = attendant

    async def config(self, message: uplink_pb2.SiteConfig) -> None:
        await asyncio.to_thread(self._site.take, message)

    def refused(self, error: MeshError) -> None:
        """This site's session ended, or was refused."""
        if isinstance(error, PolicyDenied) and error.details.get("rule") == "site_revoked" and self._site.version:
            log.error("site_revoked", error=error.message)
            self._site.forget()

    async def snapshot(self, message: admin_pb2.Snapshot) -> None:
        if self._is_second():
            return
        self._world.set_snapshot(message)

    async def command(self, command: uplink_pb2.Command) -> uplink_pb2.CommandResult:
        kind = command.WhichOneof("command")
        if kind == "witness":
            answer = await self._desk.answer(command.witness)
            return uplink_pb2.CommandResult(command_id=command.command_id, witness=answer)
        if kind == "audit":
            entries = await self._desk.entries(command.audit)
            return uplink_pb2.CommandResult(command_id=command.command_id, audit=entries)
        if kind == "attend":
            self._attendant.attend(command.attend.ticket)
            return uplink_pb2.CommandResult(command_id=command.command_id)
        if kind == "telemetry":
            samples = await self._sampler.answer(command.telemetry)
            return uplink_pb2.CommandResult(command_id=command.command_id, telemetry=samples)
        if kind == "list_requests":
            running = await self._requests.list_requests()
            return uplink_pb2.CommandResult(command_id=command.command_id, requests=running)
        if kind != "migrate":
            raise NotImplementedHere("this agent does not know the command: it is of an older version")
        if command.HasField("target"):
            self._world.meet(command.target)
        asker = Principal(tenant=command.tenant, role=AccessRole.TENANT, key_id="") if command.tenant else None
        moved = await self._door.migrate(asker, command.migrate)
        return uplink_pb2.CommandResult(command_id=command.command_id, migrate=moved)


def _dial(keyring: Keyring, peer: PlacementPeer) -> grpc.aio.Channel:
    """With the certificate of the moment."""
    return node_channel(str(peer.address), keyring.now, peer.node_id)


def _facts(models: tuple[ModelFacts, ...]) -> AgentFacts:
    return AgentFacts(build=f"kvmesh {__version__}", models=tuple(models_to_wire(models)))


def _is_second(before: tuple[UplinkAgent, ...]) -> Callable[[], bool]:
    """Whether one of the uplinks before this one is there: two views must not take turns."""
    return lambda: any(uplink.state.connected for uplink in before)


def _uplink(
    settings: EdgeSettings,
    dial: Callable[[], grpc.aio.Channel],
    site_host: _SiteHost,
    models: tuple[ModelFacts, ...],
    pushes: _Pushes,
) -> UplinkAgent:
    return UplinkAgent(
        dial=dial,
        host=site_host,
        facts=_facts(models),
        on_config=pushes.config,
        on_snapshot=pushes.snapshot,
        on_command=pushes.command,
        on_refusal=pushes.refused,
        backoff=FullJitter(random.Random(), cap_s=settings.uplink.reconnect_max_s),
    )


def _engine_settings(settings: EdgeSettings) -> EdgeEngineSettings:
    engine = settings.engine
    return EdgeEngineSettings(
        model_path=settings.model.path,
        model_id=settings.model.id,
        n_threads=engine.n_threads or usable_threads(),
        n_ctx_tokens=engine.n_ctx_tokens,
        max_context_tokens=engine.max_context_tokens or None,
        max_step_tokens=engine.max_step_tokens,
        max_running=engine.max_running,
        max_sequences=engine.max_sequences,
        max_waiting=engine.max_waiting,
    )
