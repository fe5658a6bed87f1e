"""One session as the agent sees it, from the lease to the end.

The mirror of session.py. It ends once, for one reason; then its tasks, orders included, are cancelled and
awaited before `run` leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from mesh.errors import LeaseLost, MeshError, NodeUnreachable, RevisionMismatch
from mesh.rpc.errors import from_rpc_error
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.clock import Clock, time_limit
from mesh.rpc.uplink.lease import HeartbeatBook, Lease
from mesh.rpc.uplink.orders import OnCommand, Orders
from mesh.rpc.uplink.outbox import Outbox
from mesh.rpc.uplink.snapshot_delta import HeardSnapshot
from mesh.rpc.uplink.types import UplinkHost, UplinkLimits
from mesh.telemetry.log import get_logger
from mesh.v1 import admin_pb2, node_pb2, uplink_pb2

OnConfig = Callable[[uplink_pb2.SiteConfig], Awaitable[None]]
OnSnapshot = Callable[[admin_pb2.Snapshot], Awaitable[None]]

log = get_logger(__name__)


def being_cancelled() -> bool:
    """Whether a CancelledError is meant for the current task. grpc.aio raises the same class for a call whose other
    side cancelled it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Ended(Exception):
    """Leaves the task group so that it cancels what still runs."""


class AgentSession:
    """`call` is the Attach call, whose first response was `lease`. `attached_s`: when the hello was sent, from
    which the lease counts."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        lease: uplink_pb2.SessionLease,
        *,
        host: UplinkHost,
        on_config: OnConfig,
        on_snapshot: OnSnapshot,
        on_command: OnCommand,
        clock: Clock,
        limits: UplinkLimits,
        attached_s: float,
    ) -> None:
        self.session_id = lease.session_id
        self.lease_s = lease.lease_s
        self.rtt_s: float | None = None
        self._call = call
        self._heartbeat_s = lease.heartbeat_s
        self._host = host
        self._on_config, self._on_snapshot, self._on_command = on_config, on_snapshot, on_command
        self._clock = clock
        self._limits = limits
        self._lease = Lease(lease_s=lease.lease_s, now_s=attached_s)
        self._book = HeartbeatBook()
        self._outbox: Outbox[uplink_pb2.AttachRequest] = Outbox(max_bytes=limits.outbox_bytes)
        self._pushes: Outbox[uplink_pb2.AttachResponse] = Outbox(max_bytes=0)  # only its slots are used
        self._heard = HeardSnapshot()
        self._leaving = False
        self._load_failed = False
        self._untold_models: tuple[admin_pb2.NodeModel, ...] = ()
        self._told_since = 0  # sequence of the first heartbeat that had them; 0: none yet
        self._ended: asyncio.Future[MeshError | None] = asyncio.get_running_loop().create_future()

    @property
    def heard_s(self) -> float:
        """When the newest message that the hub is known to have got had been sent, monotonic."""
        return self._lease.renewed_s

    def tell_models(self, models: tuple[admin_pb2.NodeModel, ...]) -> None:
        """Send these with heartbeats until one of them was heard."""
        self._untold_models, self._told_since = models, 0

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the session ends: raises why. Returns if it ended because `stopping` was set."""
        try:
            async with asyncio.TaskGroup() as tasks:
                orders = Orders(
                    host=self._host,
                    on_command=self._on_command,
                    outbox=self._outbox,
                    tasks=tasks,
                    limits=self._limits,
                )
                tasks.create_task(self._read(orders))
                tasks.create_task(self._write())
                tasks.create_task(self._send_heartbeats())
                tasks.create_task(self._watch_lease())
                tasks.create_task(self._deliver_pushes())
                tasks.create_task(self._leave(stopping, orders))
                try:
                    error = await asyncio.shield(self._ended)
                finally:
                    self._outbox.finish()  # grpc can lose a cancellation; the writer then ends by itself
                raise _Ended
        except* _Ended:
            pass
        if error is not None:
            raise error

    def _end(self, error: MeshError | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None if self._leaving else error)

    async def _leave(self, stopping: asyncio.Event, orders: Orders) -> None:
        await stopping.wait()
        self._leaving = True
        await orders.stop()
        self._outbox.finish()  # the writer half-closes after what is queued; the hub answers by closing

    async def _read(self, orders: Orders) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._receive(message, orders)
            self._end(NodeUnreachable("the placement service closed the session"))
        except grpc.aio.AioRpcError as exc:
            self._end(from_rpc_error(exc))
        except MeshError as exc:
            self._end(exc)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            self._end(NodeUnreachable("the placement service cancelled the session"))

    def _receive(self, message: uplink_pb2.AttachResponse, orders: Orders) -> None:
        match message.WhichOneof("message"):
            case "renewal":
                sent_s = self._book.renewed(message.renewal.sequence)
                if 0 < self._told_since <= message.renewal.sequence:
                    self._untold_models, self._told_since = (), 0
                if sent_s is not None:
                    self._lease.renew(sent_s)
                    self.rtt_s = self._clock.monotonic() - sent_s
            case "run":
                orders.run(message.run)
            case "move_kv":
                orders.move_kv(message.move_kv)
            case "cancel":
                orders.cancel(message.cancel)
            case "command":
                orders.command(message.command)
            case "config":
                self._pushes.put_latest("config", message)
            case "snapshot":  # put together here: a delta must not be skipped, whole snapshots may
                whole = self._heard.take(message.snapshot, self._clock.monotonic())
                self._pushes.put_latest("snapshot", uplink_pb2.AttachResponse(snapshot=whole))
            case kind:
                raise RevisionMismatch(f"the hub sent a message that this build cannot take here: {kind}")

    async def _write(self) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over; the reader learns why

    async def _send_heartbeats(self) -> None:
        while True:
            load = await self._load()
            sequence = self._book.send(self._clock.monotonic())
            if self._untold_models:
                self._told_since = self._told_since or sequence
            heartbeat = uplink_pb2.Heartbeat(
                sequence=sequence, load=load, rtt_s=self.rtt_s or 0.0, models=self._untold_models
            )
            self._outbox.put_latest("heartbeat", uplink_pb2.AttachRequest(heartbeat=heartbeat))
            await self._clock.sleep(self._heartbeat_s)

    async def _load(self) -> node_pb2.NodeLoad | None:
        """The load; None if the engine does not tell in time: the heartbeat then goes without, and the hub sees
        the last figures grow old."""
        try:
            async with time_limit(self._clock, self._heartbeat_s / 2):
                load = wire.load_to_wire(await self._host.load(), draining=self._host.draining)
        except (TimeoutError, MeshError) as exc:
            if not self._load_failed:
                reason = exc.reason if isinstance(exc, MeshError) else "no answer in time"
                log.warning("load_not_told", reason=reason)
            self._load_failed = True
            return None
        self._load_failed = False
        return load

    async def _watch_lease(self) -> None:
        while (left_s := self._lease.remaining_s(self._clock.monotonic())) > 0:
            await self._clock.sleep(left_s)
        self._end(LeaseLost(f"no renewal from the placement service for {self.lease_s:g} s"))

    async def _deliver_pushes(self) -> None:
        """One at a time, apart from the reader: a slow disk under `on_config` must not cost the lease."""
        try:
            while (message := await self._pushes.get()) is not None:
                if message.HasField("config"):
                    await self._on_config(message.config)
                else:
                    await self._on_snapshot(message.snapshot)
        except MeshError as exc:
            self._end(exc)
