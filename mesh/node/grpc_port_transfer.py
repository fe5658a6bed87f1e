"""The dialling side of a KV transfer: a TransferKv stream over a connection of its own, as a FrameStream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from mesh.errors import Internal, NodeUnreachable
from mesh.identity.place import Place
from mesh.node.host_frames import FrameStream, HostFrame
from mesh.node.port import Peer
from mesh.node.wire_kv import frame_from_wire, frame_to_wire
from mesh.rpc.errors import DETAILS_KEY, translate_rpc_errors
from mesh.v1 import node_pb2, node_pb2_grpc

DialChannel = Callable[[Peer], grpc.aio.Channel]
"""A new connection to a peer. It must fail on its first call unless the peer's certificate says `peer.place`
(mesh.rpc.channel.node_channel does that), for a client of grpc.aio cannot look at the certificate itself."""

_GOODBYE_S = 5.0  # for the peer to end the call after our last frame
_SHORT_GOODBYE_S = 1.0  # the same after a failure: for our Abort to arrive


class GrpcTransport:
    """See mesh.node.transport.Transport. Bulk KV has connections of its own, so that it does not sit in front of
    tokens."""

    def __init__(self, channel: DialChannel) -> None:
        self._channel = channel

    @asynccontextmanager
    async def dial(self, peer: Peer) -> AsyncIterator[FrameStream]:
        """See Transport.dial."""
        async with self._channel(peer) as connection:
            call = node_pb2_grpc.NodeStub(connection).TransferKv()
            try:
                yield _DialledStream(peer.place, call)
            except BaseException:
                await _hang_up(call, _SHORT_GOODBYE_S)
                raise
            else:
                await _hang_up(call, _GOODBYE_S)
            finally:
                call.cancel()


async def _hang_up(call: Any, patience_s: float) -> None:
    """Let what was written go out: end our side, and wait a moment for the peer to end the call. How it ends
    changes nothing any more."""
    with contextlib.suppress(grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(patience_s):
            await call.done_writing()
            await call.code()


class _DialledStream:
    """The dialling side's end."""

    def __init__(self, peer_place: Place, call: Any) -> None:
        self.peer_place = peer_place
        self._call = call

    async def send(self, frame: HostFrame) -> None:
        with self._errors():
            await self._call.write(node_pb2.TransferKvRequest(frame=frame_to_wire(frame)))

    async def recv(self) -> HostFrame:
        with self._errors():
            response = await self._call.read()
        if response is grpc.aio.EOF:
            raise self._gone()
        return frame_from_wire(response.frame)

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            with translate_rpc_errors(self.peer_place.node_id):
                yield
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as exc:
            raise self._gone() from exc  # the call has ended; reading tells why
        except Internal as exc:
            if _is_grpcs_own(exc.__cause__):
                raise self._gone() from exc
            raise

    def _gone(self) -> NodeUnreachable:
        node = self.peer_place.node_id
        return NodeUnreachable(f"node {node} ended the KV transfer's stream", node=node)


def _is_grpcs_own(error: BaseException | None) -> bool:
    """Whether an INTERNAL was not said by the peer's handler, which gives details: grpc ends a call so by itself when
    the connection breaks at the very moment of a write."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    return all(key != DETAILS_KEY for key, _ in error.trailing_metadata() or ())
