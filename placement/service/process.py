"""The placement service as a process: entry for the core side, policy admin, mesh view, host of the embedded
registry, and the one that edge agents dial.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2

from mesh.audit.log import AUDIT_FOLDER, AuditLog
from mesh.audit.replica import SITE_LOGS_FOLDER
from mesh.audit.servicer import AuditServicer
from mesh.audit.witness import WitnessDesk
from mesh.errors import NodeUnreachable
from mesh.http.app import create_app
from mesh.identity.files import write_private
from mesh.identity.keyring import Keyring
from mesh.identity.place import Place, Role, Tier
from mesh.identity.principal import AccessRole, Principal
from mesh.identity.signing import NodeIdentity
from mesh.identity.tenants import EVERY_SITE, issue_key, new_tenant
from mesh.node.port import Peer
from mesh.process import (
    OneAtATime,
    announce_ready,
    check_certificate,
    prepare_state_folder,
    raise_descriptor_limit,
    stop_signal,
)
from mesh.registry.open import EmbeddedSettings
from mesh.registry.servicer import RegistryServicer
from mesh.rpc.blobs.servicer import BlobsServicer
from mesh.rpc.blobs.shelf import model_shelf
from mesh.rpc.channel import node_channel
from mesh.rpc.relay.ring import ring_over
from mesh.rpc.relay.servicer import RelayServicer
from mesh.rpc.renewal import CertificateRenewal
from mesh.rpc.server import health_server, node_server
from mesh.rpc.uplink.hub import UplinkHub
from mesh.settings import Bootstrap, PlacementSettings, RegistryKind
from mesh.systemd import told_ready
from mesh.telemetry.history import FOLDER as TELEMETRY_FOLDER
from mesh.telemetry.history import TelemetryHistory
from mesh.telemetry.log import configure_log, get_logger
from mesh.telemetry.mesh_metrics import MeshCollector
from mesh.telemetry.metrics import Metrics
from mesh.telemetry.traces import configure_traces
from mesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    audit_pb2_grpc,
    blobs_pb2_grpc,
    registry_pb2_grpc,
    relay_pb2_grpc,
    sibling_pb2_grpc,
    uplink_pb2,
    uplink_pb2_grpc,
)
from placement.entry.decisions import FrontDoorDeps
from placement.entry.front_door import FrontDoor
from placement.entry.gateway import EntryGateway
from placement.entry.in_flight import InFlight
from placement.entry.intake import ServedModel, served_model
from placement.entry.mesh_view import NodeFacts
from placement.entry.plugins import decide_settings
from placement.entry.public import http_listener, public_listener
from placement.entry.relocator import Relocator
from placement.entry.request_view import running_requests
from placement.entry.salts import derive_salt
from placement.service.admin import PoliciesServicer, TenantsServicer
from placement.service.authority import open_authority, own_renewal
from placement.service.enrolment import Reach
from placement.service.enrolment_services import add_enrolment
from placement.service.membership import Membership
from placement.service.mesh_state import MeshState
from placement.service.registrations import to_registration
from placement.service.registry_choice import choose_registry
from placement.service.request_list import requests_of_sites
from placement.service.siblings import Siblings
from placement.service.siblings_servicer import SiblingServicer
from placement.service.site_config import SiteConfigSource
from placement.service.site_logs import SiteLogs
from placement.service.sites import SiteStore
from placement.service.stores import PolicyStore, TenantStore
from placement.service.telemetry import TelemetryCollector
from placement.service.witnesses import Circle, Witnesses, admin_recorder

log = get_logger(__name__)
_GRPC_GRACE_S = 1.0
_REGISTRY_FILE = "registry.json"
_COMMAND_TIMEOUT_S = 60.0


async def serve(settings: PlacementSettings) -> None:
    """Run until SIGTERM. Raises MeshError if it cannot start."""
    keyring = Keyring.load(settings.identity.folder)
    credentials = keyring.now
    place = credentials.place
    identity = NodeIdentity(place, credentials)
    configure_log(settings.log, node_id=place.node_id)
    tracer = configure_traces(settings.traces, node_id=place.node_id, role=Role.PLACEMENT.value)
    raise_descriptor_limit()
    check_certificate(credentials)
    await asyncio.to_thread(prepare_state_folder, settings.state_folder)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        issuer = await asyncio.to_thread(open_authority, settings.authority, keyring)
        node = node_server(str(settings.listeners.node), keyring)
        models = await asyncio.to_thread(_models, settings)
        file = settings.state_folder / _REGISTRY_FILE
        registry = choose_registry(settings.registry, EmbeddedSettings(path=file))
        await registry.start()
        stack.push_async_callback(registry.close)

        sites = SiteConfigSource()
        policies = PolicyStore(registry, sites.changed)
        tenants = TenantStore(registry, sites.changed)
        known_sites = SiteStore(registry)
        for store in (policies, tenants, known_sites):
            await store.start()
            stack.push_async_callback(store.close)
        if settings.bootstrap is not None:
            await _bootstrap(settings.bootstrap, tenants)

        def admit(context: grpc.aio.ServicerContext) -> Place:
            return known_sites.admit(context, place.mesh)

        hub = UplinkHub(
            admit,
            lease_s=settings.uplink.lease_s,
            heartbeat_s=settings.uplink.heartbeat_s,
        )
        known_sites.on_change(lambda: _log_cut_off(hub.cut_off(known_sites.refusal)))
        sites.attach(hub, policies, tenants)

        def dial(peer: Peer) -> grpc.aio.Channel:
            return node_channel(peer.address, keyring.now, peer.place)

        in_flight = InFlight()
        siblings = Siblings(dial, in_flight)
        stack.push_async_callback(siblings.close)
        state = MeshState(
            place=place,
            registry=registry,
            hub=hub,
            dial=dial,
            on_siblings=siblings.update,
        )
        in_flight.notes = state.notes
        await state.start()
        stack.push_async_callback(state.close)

        audit = await asyncio.to_thread(AuditLog, settings.state_folder / AUDIT_FOLDER, identity)
        stack.push_async_callback(audit.close)
        metrics = Metrics(node_id=place.node_id, role=Role.PLACEMENT.value)
        metrics.watch(MeshCollector(state.wire_snapshot))
        door = FrontDoor(
            FrontDoorDeps(
                signer=identity,
                world=state,
                models=models,
                policies=lambda: policies.book,
                salt=lambda tenant, label, model: derive_salt(tenants.directory, tenant, label, model),
                metrics=metrics,
                receipts=audit,
                settings=decide_settings(settings.decision, stale_load_s=settings.stale_load_s),
                copier=siblings,
                in_flight=in_flight,
            )
        )
        siblings.on_followed = door.followed_elsewhere
        relocator = Relocator(door, state)
        relocator.start()
        stack.push_async_callback(relocator.close)
        public, public_health = public_listener(
            settings.listeners.public,
            keyring,
            door=door,
            source=state,
            mover=_Mover(door, hub, state.view_of, place, state.nodes),
            directory=lambda: tenants.directory,
            more_services=("mesh.v1.Policies", "mesh.v1.Tenants", "mesh.v1.Sites", "mesh.v1.Enrolment"),
            roles=state,
        )
        record = admin_recorder(audit)

        def places() -> tuple[Place, ...]:
            return state.snapshot().places

        admin_pb2_grpc.add_PoliciesServicer_to_server(
            PoliciesServicer(policies, tenants, record, places), public.server
        )
        admin_pb2_grpc.add_TenantsServicer_to_server(TenantsServicer(tenants, record), public.server)
        uplink_pb2_grpc.add_UplinkServicer_to_server(hub, node.server)
        sibling_pb2_grpc.add_SiblingServicer_to_server(SiblingServicer(door, siblings, in_flight, admit), node.server)
        audit_pb2_grpc.add_AuditServicer_to_server(
            AuditServicer(WitnessDesk(audit, credentials.ca_pem), admit), node.server
        )
        add_enrolment(
            public.server,
            node.server,
            store=known_sites,
            issuer=issuer,
            ca_pem=credentials.ca_pem,
            reach=Reach(
                node_address=str(settings.listeners.advertise or node.address),
                node_id=place.node_id,
                model_ids=tuple(models),
            ),
            audit=audit,
            hub=hub,
            nodes=lambda: (place, *(n.place for n in state.nodes()), *siblings.places()),
            admit=admit,
        )
        relay = RelayServicer(admit, ring_over(hub))
        relay_pb2_grpc.add_RelayServicer_to_server(relay, node.server)
        blobs = BlobsServicer(model_shelf(settings.models), admit)
        blobs_pb2_grpc.add_BlobsServicer_to_server(blobs, node.server)
        if settings.registry.kind is RegistryKind.EMBEDDED:
            registry_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(registry, place.mesh), node.server)
        health, health_state = health_server(str(settings.listeners.health))
        for listener in (node, public, health):
            await listener.server.start()
            stack.push_async_callback(listener.server.stop, _GRPC_GRACE_S)
        witnesses = Witnesses(audit, Circle(hub, lambda: (*state.dialled(), *siblings.up())), credentials.ca_pem)
        site_logs = SiteLogs(settings.state_folder / SITE_LOGS_FOLDER, hub)
        witnesses.start()
        stack.push_async_callback(witnesses.close)
        history = await asyncio.to_thread(TelemetryHistory, settings.state_folder / TELEMETRY_FOLDER)
        telemetry = TelemetryCollector(hub, history)
        telemetry.start()
        stack.push_async_callback(telemetry.close)
        site_logs.start()
        stack.push_async_callback(site_logs.close)
        stack.callback(hub.close)  # before the servers stop: agents are told, instead of cut off
        gateway = EntryGateway(door, lambda: tenants.directory, metrics)
        http = http_listener(create_app(gateway), settings.listeners.http, settings.identity.folder)
        await http.start()
        stack.push_async_callback(http.close)

        keyring.listen(identity.renew)
        keyring.listen(lambda _: http.renew_certificate())
        redials = OneAtATime(state.redial)
        keyring.listen(lambda _: redials.start())
        stack.push_async_callback(redials.close)
        if issuer is not None:
            renewal = CertificateRenewal(keyring, own_renewal(issuer, keyring))
            renewal.start()
            stack.push_async_callback(renewal.close)

        address = str(settings.listeners.advertise or node.address)
        registration = to_registration(place, address, (), ttl_s=settings.registry.ttl_s, health_address=health.address)
        membership = Membership(registry, registration)
        await membership.join()
        stack.push_async_callback(membership.leave)
        announce_ready(settings.state_folder, node_id=place.node_id, grpc=public.address, http=http.url, node=address)
        stack.enter_context(told_ready(settings.systemd))

        await stop_signal()
        membership.set_ready(False)
        for state_of_health in (health_state, public_health):
            await state_of_health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await door.drain(settings.drain_s)


def _log_cut_off(node_ids: tuple[str, ...]) -> None:
    for node_id in node_ids:
        log.warning("node_cut_off", node=node_id)


class _Mover:
    """Moves a request that entered here, or tells the edge where it entered to. A request's id starts with its
    entry's node id."""

    def __init__(
        self,
        door: FrontDoor,
        hub: UplinkHub,
        view_of: Callable[[str], admin_pb2.NodeView | None],
        place: Place,
        nodes: Callable[[], tuple[NodeFacts, ...]] = tuple,
    ) -> None:
        self._door = door
        self._hub = hub
        self._view_of = view_of
        self._place = place
        self._nodes = nodes

    async def migrate(self, principal: Principal, request: admin_pb2.MigrateRequest) -> admin_pb2.MigrateResponse:
        entry, _, _ = request.request_id.partition(":")
        if entry == self._place.node_id or (not self._is_attached(entry) and self._view_of(entry) is None):
            return await self._door.migrate(principal, request)
        if not self._is_attached(entry):
            raise NodeUnreachable(
                f"the request entered at {entry}, which is not attached now: ask there, or again later", node=entry
            )
        scope = "" if principal.role >= AccessRole.OPERATOR else principal.tenant
        command = uplink_pb2.Command(migrate=request, tenant=scope, target=self._guest(entry, request.node_id))
        result = await self._hub.command(entry, command, timeout_s=_COMMAND_TIMEOUT_S)
        return result.migrate

    async def list_requests(self) -> admin_pb2.ListRequestsResponse:
        own = running_requests(self._door, self._place.node_id, self._nodes())
        response = await requests_of_sites(self._hub)
        return admin_pb2.ListRequestsResponse(
            requests=[*own, *response.requests], silent_entry_node_ids=response.silent_entry_node_ids
        )

    def _is_attached(self, entry: str) -> bool:
        return any(edge.place.node_id == entry for edge in self._hub.attached())

    def _guest(self, entry: str, target: str) -> admin_pb2.NodeView | None:
        """What the entry has to know of a target at another site: a site is told of no other one but for this."""
        view = self._view_of(target) if target not in ("", entry) else None
        return view if view is not None and view.tier == Tier.EDGE.value else None


def _models(settings: PlacementSettings) -> dict[str, ServedModel]:
    return {file.id: served_model(file.id, file.path) for file in settings.models}


async def _bootstrap(bootstrap: Bootstrap, tenants: TenantStore) -> None:
    """The first tenant and its keys, once: nothing happens if the tenant is there."""
    if any(t.tenant == bootstrap.tenant for t in tenants.directory.tenants):
        return
    record, now = new_tenant(bootstrap.tenant, EVERY_SITE), int(time.time())
    api_key, tenant_record = issue_key(bootstrap.tenant, AccessRole.TENANT, created_unix_s=now)
    admin_key, admin_record = issue_key(bootstrap.tenant, AccessRole.ADMIN, created_unix_s=now)
    _write_keys(bootstrap.keys_file, api_key, admin_key)
    await tenants.change(lambda d: d.with_tenant(record).with_key(tenant_record).with_key(admin_record))
    log.info("bootstrapped", tenant=bootstrap.tenant)


def _write_keys(file: Path, api_key: str, admin_key: str) -> None:
    # Before the directory is stored: keys that nobody could ever read would be worse than a file of no use.
    write_private(file, json.dumps({"api_key": api_key, "admin_key": admin_key}).encode())
