"""Puts what boxes and operators need for enrolment on the placement service's listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import grpc.aio

from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog
from mesh.identity.place import Place
from mesh.rpc.uplink.hub import UplinkHub
from mesh.v1 import enrolment_pb2_grpc as pb_grpc
from placement.service.enrolment import CertificatesServicer, EnrolmentServicer, Issuer, Reach, SitesServicer
from placement.service.sites import SiteStore
from placement.service.witnesses import admin_recorder


def add_enrolment(
    public: grpc.aio.Server,
    node: grpc.aio.Server,
    *,
    store: SiteStore,
    issuer: Issuer | None,
    ca_pem: bytes,
    reach: Reach,
    audit: AuditLog,
    hub: UplinkHub,
    nodes: Callable[[], Iterable[Place]],
    admit: Callable[[grpc.aio.ServicerContext], Place],
) -> None:
    """See the servicers for what each argument is for."""

    async def record_join(facts: dict[str, str]) -> None:
        actor = {"token_id": facts["token_id"]}
        await audit.append(EntryKind.ADMIN, {"actor": actor, "action": "site.join", **facts})

    async def cut_off() -> Sequence[str]:
        return hub.cut_off(store.refusal)

    sites = SitesServicer(
        store,
        ca_pem,
        admin_recorder(audit),
        can_issue=issuer is not None,
        attached=lambda: frozenset(edge.place.node_id for edge in hub.attached()),
        nodes=nodes,
        cut_off=cut_off,
    )
    pb_grpc.add_EnrolmentServicer_to_server(EnrolmentServicer(store, issuer, ca_pem, reach, record_join), public)
    pb_grpc.add_SitesServicer_to_server(sites, public)
    pb_grpc.add_CertificatesServicer_to_server(CertificatesServicer(store, issuer, admit), node)
