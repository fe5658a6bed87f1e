"""mesh.v1.Audit: a node that can be dialled keeps heads of placement's audit log and tells its own."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from mesh.audit.witness import WitnessDesk
from mesh.identity.place import Place, Role
from mesh.rpc.peer import require_role
from mesh.v1 import audit_pb2_grpc, uplink_pb2

PeerPlace = Callable[[grpc.aio.ServicerContext], Place]


class AuditServicer(audit_pb2_grpc.AuditServicer):
    """Goes on a node listener. `peer_place` raises Unauthenticated where there is no certificate of this mesh."""

    def __init__(self, desk: WitnessDesk, peer_place: PeerPlace) -> None:
        self._desk = desk
        self._peer_place = peer_place

    async def Witness(
        self, request: uplink_pb2.WitnessRequest, context: grpc.aio.ServicerContext
    ) -> uplink_pb2.WitnessResponse:
        caller = self._peer_place(context)
        require_role(caller, (Role.PLACEMENT,), "the audit's heads")
        return await self._desk.answer(request, of=caller.uri)
