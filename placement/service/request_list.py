"""All requests of the mesh that can be known now: those that entered here, and those of the attached sites."""

from __future__ import annotations

import asyncio

from mesh.errors import MeshError
from mesh.rpc.uplink.hub import UplinkHub
from mesh.telemetry.log import get_logger
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import uplink_pb2

log = get_logger(__name__)
_TIMEOUT_S = 2.0
_MOST_AT_ONCE = 64


async def requests_of_sites(hub: UplinkHub) -> admin.ListRequestsResponse:
    """Ask every attached agent. One that is of an older version, or slow, is named as silent."""
    few = asyncio.Semaphore(_MOST_AT_ONCE)

    async def ask(node_id: str) -> list[admin.RunningRequest] | None:
        command = uplink_pb2.Command(list_requests=admin.ListRequestsRequest())
        try:
            async with few:
                answer = await hub.command(node_id, command, timeout_s=_TIMEOUT_S)
        except MeshError as error:
            log.info("site_tells_no_requests", node=node_id, reason=error.reason)
            return None
        # An agent speaks for itself only.
        return [request for request in answer.requests.requests if request.entry_node_id == node_id]

    nodes = [edge.place.node_id for edge in hub.attached()]
    answers = await asyncio.gather(*map(ask, nodes))
    return admin.ListRequestsResponse(
        requests=[request for answer in answers for request in answer or ()],
        silent_entry_node_ids=[node for node, answer in zip(nodes, answers, strict=True) if answer is None],
    )
