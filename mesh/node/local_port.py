"""LocalPort: the node in this very process, as its own entry sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from mesh.identity.place import Place
from mesh.node.engine import RunId
from mesh.node.grpc_port_transfer import DialChannel, GrpcTransport
from mesh.node.host import NodeHost
from mesh.node.port import KvOrder, KvReport, PortEvent, RunOrder
from mesh.node.transport import Transport

RelayOver = Callable[[Transport], Transport]
"""A transport that also reaches nodes without an address, over a relay."""


class LocalPort:
    """A NodePort over a NodeHost. `channel` opens connections for KV moves; `address` is where others can dial
    this node, empty if they cannot."""

    can_dial = True

    def __init__(
        self, host: NodeHost, channel: DialChannel, *, address: str = "", relay: RelayOver | None = None
    ) -> None:
        self._host = host
        direct = GrpcTransport(channel)
        self._transport: Transport = direct if relay is None else relay(direct)
        self._address = address

    @property
    def place(self) -> Place:
        return self._host.place

    @property
    def address(self) -> str:
        return self._address

    def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """See NodePort.run."""
        return self._host.run(order)

    async def move_kv(self, order: KvOrder) -> KvReport:
        """See NodePort.move_kv; this node dials the peer."""
        return await self._host.move_kv(order, self._transport.dial)

    async def release(self, run_id: RunId) -> None:
        """See NodePort.release."""
        await self._host.release(run_id)
