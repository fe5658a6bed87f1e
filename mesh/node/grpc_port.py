"""GrpcPort: a node behind its node listener, as an entry sees it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from mesh.errors import MeshError, NodeUnreachable
from mesh.identity.place import Place
from mesh.node.engine import RunId
from mesh.node.port import KvOrder, KvReport, Peer, PortEvent, PortFinished, PortHeld, RunOrder
from mesh.node.wire import event_from_wire, order_to_wire
from mesh.node.wire_kv import kv_order_to_wire, report_from_wire
from mesh.rpc.errors import translate_rpc_errors
from mesh.telemetry.log import get_logger
from mesh.v1 import node_pb2, node_pb2_grpc

log = get_logger(__name__)
_RELEASE_TIMEOUT_S = 5.0


class GrpcPort:
    """A NodePort over a channel that stays its caller's. The channel proves that the peer is at `peer.place`."""

    can_dial = True

    def __init__(self, channel: grpc.aio.Channel, peer: Peer) -> None:
        self._stub = node_pb2_grpc.NodeStub(channel)
        self._peer = peer
        self._heard_s: dict[Any, float] = {}  # open runs: when each last said something, monotonic

    @property
    def place(self) -> Place:
        return self._peer.place

    @property
    def address(self) -> str:
        return self._peer.address

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """See NodePort.run."""
        node = self._peer.place.node_id
        call = self._stub.Run(node_pb2.RunRequest(order=order_to_wire(order)))
        self._heard_s[call] = time.monotonic()
        try:
            with translate_rpc_errors(node):
                async for response in call:
                    self._heard_s[call] = time.monotonic()
                    event = event_from_wire(response.event)
                    yield event
                    if isinstance(event, PortFinished | PortHeld):
                        return
            raise NodeUnreachable(f"node {node} ended a run without its outcome", node=node)
        finally:
            del self._heard_s[call]
            call.cancel()

    def break_silent(self, since_s: float) -> int:
        """The node does not answer: end the runs that have said nothing since then (monotonic), as a closed link would.
        Returns how many."""
        silent = [call for call, heard_s in self._heard_s.items() if heard_s < since_s]
        for call in silent:
            call.cancel()
        return len(silent)

    async def move_kv(self, order: KvOrder) -> KvReport:
        """See NodePort.move_kv: the node is ordered to dial the peer. Cancelling the call cancels the move there."""
        opening, address, place = kv_order_to_wire(order)
        request = node_pb2.MoveKvRequest(open=opening, peer_address=address, peer_place=place)
        with translate_rpc_errors(self._peer.place.node_id):
            response = await self._stub.MoveKv(request)
        return report_from_wire(response.report)

    async def release(self, run_id: RunId) -> None:
        """See NodePort.release. A node that does not answer frees what is left there by itself, later."""
        try:
            with translate_rpc_errors(self._peer.place.node_id):
                await self._stub.Release(node_pb2.ReleaseRequest(run_id=run_id), timeout=_RELEASE_TIMEOUT_S)
        except MeshError as exc:
            log.info("release_failed", node_id=self._peer.place.node_id, run_id=run_id, reason=exc.reason)
