"""The end of a relayed connection that was asked for: comes with its ticket, learns who calls, and serves it.

Whatever it is asked, it is checked like at the node listener: who calls is in the caller's certificate, the work's
tenant must let its data pass a relay at all, and the host's own borders come after that.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from mesh.errors import InvalidRequest, MeshError, Overloaded
from mesh.node import wire_bounds as bounds
from mesh.node.engine import RunId
from mesh.node.host import NodeHost
from mesh.node.host_frames import KvOpen
from mesh.node.port import BorderGuard, RunOrder
from mesh.node.servicer import check_site
from mesh.node.wire import event_to_wire, order_from_wire
from mesh.node.wire_kv import frame_from_wire
from mesh.rpc.relay.channel import DialRelay, SealedChannel, SealedKvStream, open_channel
from mesh.rpc.relay.sealed import RecordSigner
from mesh.telemetry.log import get_logger
from mesh.v1 import node_pb2, relay_pb2

log = get_logger(__name__)
MOST_OPEN = 64


class RelayAttendant:
    """Owned by the agent; `close` in the end."""

    def __init__(
        self,
        host: NodeHost,
        guard: BorderGuard,
        signer: RecordSigner,
        ca_pem: bytes,
        dial: DialRelay,
        *,
        relay: str,
    ) -> None:
        self._host = host
        self._guard = guard
        self._signer = signer
        self._ca_pem = ca_pem
        self._dial = dial
        self._relay = relay
        self._tasks: set[asyncio.Task[None]] = set()

    def attend(self, ticket: bytes) -> None:
        """Go to the relay; returns at once. Raises Overloaded if it does so for too many already."""
        if len(self._tasks) >= MOST_OPEN:
            raise Overloaded(f"{len(self._tasks)} relayed connections are open here")
        task = asyncio.create_task(self._attend(ticket), name="relay-attendant")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attend(self, ticket: bytes) -> None:
        answer = relay_pb2.RelayRequest(answer=relay_pb2.RelayAnswer(ticket=ticket))
        try:
            async with open_channel(self._dial, answer, self._signer, self._ca_pem, relay=self._relay) as channel:
                await self._serve(channel)
        except MeshError as error:
            log.info("relayed_connection_failed", reason=error.reason, error=error.message)

    async def _serve(self, channel: SealedChannel) -> None:
        try:
            first = await channel.recv()
            match first.WhichOneof("message"):
                case "kv":
                    await self._transfer(channel, first.kv)
                case "run":
                    await self._run(channel, first.run)
                case "release":
                    run_id = RunId(bounds.name("run_id", first.release))
                    check_site(channel.peer, self._host.entry_site_of(run_id), "end work")
                    await self._host.release(run_id)
                case _:
                    raise InvalidRequest("a relayed connection starts with KV, a run or a release", field="message")
            await channel.send(relay_pb2.SealedFrame(done=True))
        except MeshError as error:
            log.info("relayed_work_failed", peer=channel.peer.node_id, reason=error.reason, error=error.message)
            await channel.fail(error)
        except Exception as error:
            log.exception("relayed_work_failed_by_a_bug", peer=channel.peer.node_id)
            await channel.fail(error)

    async def _transfer(self, channel: SealedChannel, wire: node_pb2.KvFrame) -> None:
        first = frame_from_wire(wire)
        if isinstance(first, KvOpen):
            self._guard.check_relay(first.context)
        await self._host.serve_transfer(first, SealedKvStream(channel))

    async def _run(self, channel: SealedChannel, wire: node_pb2.RunOrder) -> None:
        order = order_from_wire(wire)
        check_site(channel.peer, order.context.entry_site, "order work")
        self._guard.check_relay(order.context)
        # Whoever ordered says nothing more; that it is gone shows as the end of its stream.
        gone = channel.gone()
        running = asyncio.create_task(self._follow(channel, order))
        try:
            await asyncio.wait((gone, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _follow(self, channel: SealedChannel, order: RunOrder) -> None:
        async with aclosing(self._host.run(order)) as events:
            async for event in events:
                await channel.send(relay_pb2.SealedFrame(event=event_to_wire(event)))
