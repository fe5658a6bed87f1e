"""A core node as a process: the torch engine behind the node listener, registered with the mesh.

Start: reach the registry, load, measure, listen, register, say ready. SIGTERM: take nothing new, let running
requests end (their entries move them if they can), leave the registry, stop.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict

from grpc_health.v1 import health_pb2

from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from core_node.kvtc.twin import torch_maps
from core_node.load_view import LoadView
from mesh.audit.log import AUDIT_FOLDER, AuditLog
from mesh.audit.servicer import AuditServicer
from mesh.audit.witness import WitnessDesk
from mesh.http.status_app import status_app
from mesh.identity.keyring import Keyring
from mesh.identity.place import Role
from mesh.identity.signing import NodeIdentity
from mesh.kv.profiling import codecs_beside
from mesh.model.description import model_digest
from mesh.node.grpc_port_transfer import GrpcTransport
from mesh.node.host import NodeHost
from mesh.node.load_watch import LoadWatch
from mesh.node.servicer import NodeServicer
from mesh.node.serving_role import ServingRole
from mesh.process import (
    OneAtATime,
    announce_ready,
    check_certificate,
    prepare_state_folder,
    raise_descriptor_limit,
    stop_signal,
)
from mesh.registry.open import RemoteSettings
from mesh.registry.remote import RemoteRegistry
from mesh.registry.types import Registration
from mesh.rpc.blobs.servicer import BlobsServicer
from mesh.rpc.blobs.shelf import model_shelf
from mesh.rpc.channel import node_channel
from mesh.rpc.enrol import renew
from mesh.rpc.renewal import CertificateRenewal
from mesh.rpc.server import health_server, node_server
from mesh.settings import CoreSettings
from mesh.systemd import told_ready
from mesh.telemetry.log import configure_log
from mesh.telemetry.metrics import Metrics
from mesh.telemetry.traces import configure_traces
from mesh.v1 import audit_pb2_grpc, blobs_pb2_grpc, node_pb2_grpc
from placement.entry.mesh_view import ModelFacts
from placement.entry.public import http_listener
from placement.policy.book import BookGuard
from placement.service.membership import Membership
from placement.service.registrations import to_registration
from placement.service.registry_choice import choose_registry
from placement.service.sites import RevokedSites
from placement.service.stores import PolicyReader

_GRPC_GRACE_S = 1.0


async def serve(settings: CoreSettings) -> None:
    """Run until SIGTERM. Raises MeshError if it cannot start."""
    keyring = Keyring.load(settings.identity.folder)
    place = keyring.now.place
    configure_log(settings.log, node_id=place.node_id)
    tracer = configure_traces(settings.traces, node_id=place.node_id, role=Role.CORE.value)
    raise_descriptor_limit()
    check_certificate(keyring.now)
    await asyncio.to_thread(prepare_state_folder, settings.state_folder)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        node = node_server(str(settings.listeners.node), keyring)
        health, health_state = health_server(str(settings.listeners.health))
        peer = settings.placement  # before the model is loaded: without a registry there is no use for it
        registry = choose_registry(
            settings.registry,
            RemoteSettings(address=str(peer.address), credentials=keyring, placement=peer.node_id),
        )
        await registry.start()
        stack.push_async_callback(registry.close)
        policies = PolicyReader(registry, on_change=lambda: None)
        revoked = RevokedSites(registry)
        for store in (policies, revoked):
            await store.start()
            stack.push_async_callback(store.close)

        with LoadView(settings.model.id) as view:
            engine = CoreEngine(_engine_settings(settings), view.show)
            stack.push_async_callback(engine.close)
            await engine.start()
        speeds = await engine.self_test()

        guard = BookGuard(lambda: policies.book)
        identity = NodeIdentity(place, keyring.now)
        audit = await asyncio.to_thread(AuditLog, settings.state_folder / AUDIT_FOLDER, identity)
        stack.push_async_callback(audit.close)
        host = NodeHost(engine, identity, guard, place, legs=audit)
        host.set_role(settings.role)
        stack.push_async_callback(host.close)
        digest = await asyncio.to_thread(model_digest, settings.model.path)
        info = engine.info
        codecs = await asyncio.to_thread(
            codecs_beside, settings.model.path, info.geometry, info.weights_lineage, torch_maps
        )
        address = str(settings.listeners.advertise or node.address)

        def registration(role: ServingRole) -> Registration:
            return to_registration(
                place,
                address,
                (ModelFacts.of(info, digest, codecs),),
                ttl_s=settings.registry.ttl_s,
                health_address=health.address,
                role=role,
            )

        membership = Membership(registry, registration(host.role))
        servicer = NodeServicer(
            host,
            lambda context: revoked.admit(context, place.mesh),
            GrpcTransport(lambda peer: node_channel(peer.address, keyring.now, peer.place)),
            on_role=lambda role: membership.change(registration(role)),
        )
        node_pb2_grpc.add_NodeServicer_to_server(servicer, node.server)
        desk = WitnessDesk(audit, keyring.now.ca_pem)
        audit_pb2_grpc.add_AuditServicer_to_server(
            AuditServicer(desk, lambda context: revoked.admit(context, place.mesh)), node.server
        )
        blobs_pb2_grpc.add_BlobsServicer_to_server(
            BlobsServicer(model_shelf((settings.model,)), lambda context: revoked.admit(context, place.mesh)),
            node.server,
        )
        for listener in (node, health):
            await listener.server.start()
            stack.push_async_callback(listener.server.stop, _GRPC_GRACE_S)

        load = LoadWatch(host, settings.load_period_s)
        await load.start()
        stack.push_async_callback(load.close)
        metrics = Metrics(node_id=place.node_id, role=Role.CORE.value)
        metrics.watch_host(host.statistics)
        metrics.watch_load(lambda: load.latest)
        app = status_app(metrics, lambda: not host.draining)
        http = http_listener(app, settings.listeners.http, settings.identity.folder)
        await http.start()
        stack.push_async_callback(http.close)

        renewal = CertificateRenewal(keyring, lambda: renew(str(peer.address), keyring, peer.node_id))
        keyring.listen(identity.renew)
        keyring.listen(lambda _: http.renew_certificate())
        if isinstance(registry, RemoteRegistry):
            redials = OneAtATime(registry.redial)
            keyring.listen(lambda _: redials.start())
            stack.push_async_callback(redials.close)
        renewal.start()
        stack.push_async_callback(renewal.close)

        await membership.join()
        stack.push_async_callback(membership.leave)
        announce_ready(settings.state_folder, node_id=place.node_id, node=address, http=http.url, **asdict(speeds))
        stack.enter_context(told_ready(settings.systemd))

        await stop_signal()
        membership.set_ready(False)
        await health_state.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_s):
                await host.drain()


def _engine_settings(settings: CoreSettings) -> CoreEngineSettings:
    return CoreEngineSettings(
        model_path=settings.model.path, model_id=settings.model.id, **settings.engine.model_dump()
    )
