"""One end of a relayed connection: the stream to the relay, the handshake, and then messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from mesh.errors import Internal, InvalidRequest, MeshError, NodeUnreachable, PayloadCorrupt, by_reason, told_details
from mesh.identity.place import Place
from mesh.identity.receipt import record_from_wire, record_to_wire
from mesh.node.host_frames import HostFrame
from mesh.node.wire_kv import frame_from_wire, frame_to_wire
from mesh.rpc.errors import translate_rpc_errors
from mesh.rpc.relay.sealed import Handshake, RecordSigner, SealedPair
from mesh.v1 import common_pb2, relay_pb2, relay_pb2_grpc

DialRelay = Callable[[], grpc.aio.Channel]
"""A new connection to the relay."""
_HANDSHAKE_TIMEOUT_S = 15.0
_GOODBYE_S = 5.0  # for the other end to hear our last words
_SHORT_GOODBYE_S = 1.0  # the same after a failure


class SealedChannel:
    """A connection whose other end is `peer`, proved by its certificate. `relay` names who carries it."""

    def __init__(self, call: Any, pair: SealedPair, relay: str) -> None:
        self.peer = pair.peer
        self.relay = relay
        self._call = call
        self._pair = pair
        self._gone: asyncio.Task[relay_pb2.SealedFrame] | None = None

    def gone(self) -> asyncio.Task[relay_pb2.SealedFrame]:
        """Done when the other end says anything more, or is gone: for an end that is to say nothing more. Not to be
        cancelled, which would end the connection for what is still to be sent; leaving the channel does that."""
        if self._gone is None:
            self._gone = asyncio.create_task(self.recv())
        return self._gone

    async def close(self) -> None:
        """End what waits for the other end."""
        if self._gone is not None:
            self._gone.cancel()
            await asyncio.gather(self._gone, return_exceptions=True)

    async def send(self, frame: relay_pb2.SealedFrame) -> None:
        """Raises NodeUnreachable if the connection broke."""
        sealed = self._pair.seal(frame.SerializeToString())
        with _broken(self.relay, self.peer.node_id):
            await self._call.write(relay_pb2.RelayRequest(sealed=sealed))

    async def recv(self) -> relay_pb2.SealedFrame:
        """The next message. Raises the other end's error, NodeUnreachable or PayloadCorrupt."""
        plain = self._pair.open(await _next_sealed(self._call, self.relay, self.peer.node_id))
        try:
            frame = relay_pb2.SealedFrame.FromString(plain)
        except DecodeError as error:
            raise PayloadCorrupt(f"a message from {self.peer.node_id} cannot be read") from error
        if frame.HasField("error"):
            raise by_reason(frame.error.reason)(frame.error.message[:1024], **told_details(frame.error.details))
        return frame

    async def fail(self, error: BaseException) -> None:
        """Tell the other end why it ends; best effort."""
        if not isinstance(error, MeshError):
            error = Internal("internal error at the other node; its log has it")
        told = relay_pb2.SealedError(
            reason=error.reason, message=error.message[:1024], details=told_details(error.details)
        )
        with contextlib.suppress(MeshError):
            await self.send(relay_pb2.SealedFrame(error=told))


class SealedKvStream:
    """A sealed channel as the FrameStream of a KV transfer. `first` was read already."""

    def __init__(self, channel: SealedChannel, first: HostFrame | None = None) -> None:
        self._channel = channel
        self._first = first

    @property
    def peer_place(self) -> Place:
        return self._channel.peer

    async def send(self, frame: HostFrame) -> None:
        await self._channel.send(relay_pb2.SealedFrame(kv=frame_to_wire(frame)))

    async def recv(self) -> HostFrame:
        first, self._first = self._first, None
        if first is not None:
            return first
        frame = await self._channel.recv()
        if frame.HasField("done"):
            raise NodeUnreachable(f"node {self._channel.peer.node_id} ended the KV transfer's stream")
        if not frame.HasField("kv"):
            raise InvalidRequest("only KV frames follow on a KV stream", field="message")
        return frame_from_wire(frame.kv)


@asynccontextmanager
async def open_channel(
    dial: DialRelay,
    first: relay_pb2.RelayRequest,
    signer: RecordSigner,
    ca_pem: bytes,
    *,
    relay: str,
    expect: Place | None = None,
) -> AsyncIterator[SealedChannel]:
    """A connection through the relay. `first`: a call or an answer. `expect`: who must be at the other end (for a
    call). Raises Unauthenticated if it is another, NodeUnreachable if it did not come."""
    async with dial() as connection:
        call = relay_pb2_grpc.RelayStub(connection).Open()
        try:
            try:
                async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                    pair = await _shake_hands(call, first, signer, ca_pem, relay=relay, expect=expect)
            except TimeoutError:
                raise NodeUnreachable(f"no handshake over the relay {relay} in {_HANDSHAKE_TIMEOUT_S:g} s") from None
            channel = SealedChannel(call, pair, relay)
            try:
                yield channel
            except BaseException:
                await _hang_up(call, _SHORT_GOODBYE_S)
                raise
            else:
                await _hang_up(call, _GOODBYE_S)
            finally:
                await channel.close()
        finally:
            call.cancel()


async def _hang_up(call: Any, patience_s: float) -> None:
    """Let what was written go out; how the call ends changes nothing any more."""
    with contextlib.suppress(grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(patience_s):
            await call.done_writing()
            await call.code()


async def _shake_hands(
    call: Any,
    first: relay_pb2.RelayRequest,
    signer: RecordSigner,
    ca_pem: bytes,
    *,
    relay: str,
    expect: Place | None,
) -> SealedPair:
    node = expect.node_id if expect is not None else "at the other end"
    calling = first.HasField("call")
    with _broken(relay, node):
        await call.write(first)
        ready = await call.read()
    if ready is grpc.aio.EOF or not ready.HasField("ready"):
        raise NodeUnreachable(f"the relay {relay} closed the connection", node=relay)
    shake = Handshake(signer, ca_pem, session=ready.ready.session, calling=calling, expect=expect)

    async def send(sealed: bytes) -> None:
        with _broken(relay, node):
            await call.write(relay_pb2.RelayRequest(sealed=sealed))

    await send(shake.hello)
    shake.meet(await _next_sealed(call, relay, node))
    if calling:
        await send(record_to_wire(shake.proof()).SerializeToString())
    theirs = await _next_sealed(call, relay, node)
    try:
        record = record_from_wire(common_pb2.SignedRecord.FromString(theirs))
    except DecodeError as error:
        raise PayloadCorrupt("the other end's proof cannot be read") from error
    shake.check(record)
    if not calling:
        await send(record_to_wire(shake.proof()).SerializeToString())
    return shake.pair()


async def _next_sealed(call: Any, relay: str, node: str) -> bytes:
    with _broken(relay, node):
        response = await call.read()
    if response is grpc.aio.EOF:
        raise NodeUnreachable(f"node {node} ended the connection over {relay}", node=node)
    return bytes(response.sealed)


@contextlib.contextmanager
def _broken(relay: str, node: str) -> Any:
    try:
        with translate_rpc_errors(relay):
            yield
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise NodeUnreachable(f"the connection to {node} over {relay} broke", node=node) from error
