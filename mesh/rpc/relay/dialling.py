"""The end of a relayed connection that wants something: KV streams, and a node as an entry sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from mesh.errors import MeshError, NodeUnreachable, NotImplementedHere
from mesh.identity.place import Place
from mesh.node.engine import RunId
from mesh.node.host_frames import FrameStream
from mesh.node.port import KvOrder, KvReport, Peer, PortEvent, PortFinished, PortHeld, RunOrder
from mesh.node.transport import Transport
from mesh.node.wire import event_from_wire, order_to_wire
from mesh.rpc.relay.channel import DialRelay, SealedChannel, SealedKvStream, open_channel
from mesh.rpc.relay.sealed import RecordSigner
from mesh.telemetry.log import get_logger
from mesh.v1 import relay_pb2

log = get_logger(__name__)


class RelayDialler:
    """Opens sealed channels to nodes by the relay of node id `relay`."""

    def __init__(self, dial: DialRelay, signer: RecordSigner, ca_pem: bytes, *, relay: str) -> None:
        self._dial = dial
        self._signer = signer
        self._ca_pem = ca_pem
        self.relay = relay

    def open(self, peer: Place) -> AbstractAsyncContextManager[SealedChannel]:
        """A channel to the very node at `peer`."""
        call = relay_pb2.RelayRequest(call=relay_pb2.RelayCall(node_id=peer.node_id))
        return open_channel(self._dial, call, self._signer, self._ca_pem, relay=self.relay, expect=peer)


class RelayTransport:
    """See mesh.node.transport.Transport: directly where the peer has an address, else over the relay."""

    def __init__(self, direct: Transport, relay: RelayDialler) -> None:
        self._direct = direct
        self._relay = relay

    def dial(self, peer: Peer) -> AbstractAsyncContextManager[FrameStream]:
        """See Transport.dial."""
        return self._direct.dial(peer) if peer.address else self._relayed(peer)

    @asynccontextmanager
    async def _relayed(self, peer: Peer) -> AsyncIterator[FrameStream]:
        async with self._relay.open(peer.place) as channel:
            yield SealedKvStream(channel)


class RelayPort:
    """A NodePort of a node at another site. The relay sees who talks to whom, and no token."""

    can_dial = False

    def __init__(self, peer: Place, relay: RelayDialler) -> None:
        self._place = peer
        self._relay = relay

    @property
    def place(self) -> Place:
        return self._place

    @property
    def address(self) -> str:
        return ""

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """See NodePort.run. Leaving the generator ends the connection, which cancels the run there."""
        async with self._relay.open(self._place) as channel:
            await channel.send(relay_pb2.SealedFrame(run=order_to_wire(order)))
            while True:
                frame = await channel.recv()
                if not frame.HasField("event"):
                    node = self._place.node_id
                    raise NodeUnreachable(f"node {node} ended a run without its outcome", node=node)
                event = event_from_wire(frame.event)
                yield event
                if isinstance(event, PortFinished | PortHeld):
                    return

    async def move_kv(self, order: KvOrder) -> KvReport:
        """The entry's own node dials instead."""
        raise NotImplementedHere(f"node {self._place.node_id} is not told to dial; the entry's own node does")

    async def release(self, run_id: RunId) -> None:
        """See NodePort.release."""
        try:
            async with self._relay.open(self._place) as channel:
                await channel.send(relay_pb2.SealedFrame(release=run_id))
                await channel.recv()
        except MeshError as error:
            log.info("release_failed", node_id=self._place.node_id, run_id=run_id, reason=error.reason)
