"""How the relay asks a node to come: by a command over its uplink."""

from __future__ import annotations

from mesh.rpc.relay.servicer import Ring
from mesh.rpc.uplink.hub import UplinkHub
from mesh.v1 import uplink_pb2

_TIMEOUT_S = 5.0


def ring_over(hub: UplinkHub) -> Ring:
    """Raises what UplinkHub.command raises: NodeUnreachable if the node is not attached here."""

    async def ring(node_id: str, ticket: bytes) -> None:
        command = uplink_pb2.Command(attend=uplink_pb2.RelayAttend(ticket=ticket))
        await hub.command(node_id, command, timeout_s=_TIMEOUT_S)

    return ring
