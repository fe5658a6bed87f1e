"""The hub's side of one agent's session: lease, open orders, what waits to be written.

A session ends once, for one reason (`end`): then every open order fails at once, every writer that waits is
released, and the stream closes. Its loops only ever tell it to end; nobody waits for a peer that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import grpc.aio

from mesh.errors import InvalidRequest, LeaseLost, MeshError, NodeUnreachable, Overloaded, RevisionMismatch
from mesh.identity.place import Place
from mesh.node.engine import EngineLoad
from mesh.node.port import KvReport
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.clock import Clock, time_limit
from mesh.rpc.uplink.lease import HeartbeatOrder, Lease
from mesh.rpc.uplink.outbox import Outbox
from mesh.rpc.uplink.snapshot_delta import ToldSnapshot
from mesh.rpc.uplink.types import AgentFacts, AttachedEdge, UplinkLimits
from mesh.rpc.uplink.worktable import Delivery, Work, WorkTable
from mesh.v1 import node_pb2, uplink_pb2

Write = Callable[[uplink_pb2.AttachResponse], Awaitable[None]]
RemoteWork = Work[node_pb2.RunEvent, KvReport]


@dataclass(slots=True, eq=False)
class OpenWork:
    """An order with the means to wait for news of it."""

    work: RemoteWork
    news: asyncio.Event

    async def next_event(self) -> node_pb2.RunEvent | None:
        """The next event; None when the order has settled and all events were taken."""
        while True:
            event = self.work.take()
            if event is not None or self.work.settled:
                return event
            self.news.clear()
            await self.news.wait()


class Session:
    """One attached agent. `on_change` is called when load changed or the session ended."""

    def __init__(
        self,
        *,
        session_id: str,
        place: Place,
        facts: AgentFacts,
        load: EngineLoad,
        draining: bool,
        lease_s: float,
        limits: UplinkLimits,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.session_id = session_id
        self.place = place
        self.facts = facts
        self.why: MeshError | None = None  # it ended
        self._load, self._draining = load, draining
        self._clock = clock
        self._limits = limits
        self._on_change = on_change
        now_s = clock.monotonic()
        self._load_heard_s = now_s
        self._rtt_s: float | None = None
        self._lease = Lease(lease_s=lease_s, now_s=now_s)
        self._heartbeats = HeartbeatOrder()
        self._outbox: Outbox[uplink_pb2.AttachResponse] = Outbox(max_bytes=limits.outbox_bytes)
        self._works: WorkTable[node_pb2.RunEvent, KvReport] = WorkTable(
            place.node_id, max_open=limits.max_open, max_unread_bytes=limits.unread_bytes
        )
        self._told = ToldSnapshot()
        self._sent: set[int] = set()  # open orders that were handed to the stream
        self._commands: dict[int, asyncio.Future[uplink_pb2.CommandResult]] = {}
        self._next_command_id = 1
        self._ended: asyncio.Future[MeshError | None] = asyncio.get_running_loop().create_future()

    # What the mesh may know of it

    @property
    def alive(self) -> bool:
        """The session has not ended."""
        return not self._ended.done()

    @property
    def queued_bytes(self) -> int:
        """Bytes of orders and commands that wait to be written."""
        return self._outbox.queued_bytes

    @property
    def waiting_orders(self) -> int:
        """Orders that wait for room to be queued."""
        return self._outbox.waiting

    @property
    def open_orders(self) -> int:
        """Orders that have not been closed."""
        return len(self._works)

    def view(self) -> AttachedEdge:
        """The node as placement sees it now."""
        return AttachedEdge(
            place=self.place,
            build=self.facts.build,
            models=self.facts.models,
            load=self._load,
            draining=self._draining,
            age_s=self._clock.monotonic() - self._load_heard_s,
            rtt_s=self._rtt_s,
            session_id=self.session_id,
        )

    # Life

    async def serve(self, requests: AsyncIterator[uplink_pb2.AttachRequest], write: Write) -> None:
        """Run the session until it ends. Raises what the agent is to be told; returns if the agent left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(self._read(requests)),
                    tasks.create_task(self._write(write)),
                    tasks.create_task(self._watch_lease()),
                ]
                try:
                    told = await asyncio.shield(self._ended)
                finally:
                    self.end(self._unreachable("its uplink broke"), told=None)
                for loop in loops:
                    loop.cancel()
        finally:
            self.end(self._unreachable("its uplink failed by a bug"), told=None)
        if told is not None:
            raise told

    def end(self, why: MeshError, *, told: MeshError | None) -> None:
        """End it: open orders and commands fail with `why`, the agent is told `told` (None: a plain end).
        Idempotent; the first reason stands."""
        if self._ended.done():
            return
        self.why = why
        self._ended.set_result(told)
        self._works.fail_all(why)
        self._outbox.close(why)
        for answer in self._commands.values():
            if not answer.done():
                answer.set_exception(why)
        self._on_change()

    async def _read(self, requests: AsyncIterator[uplink_pb2.AttachRequest]) -> None:
        try:
            async for request in requests:
                self._receive(request)
        except MeshError as exc:
            self.end(self._unreachable(f"it broke the uplink protocol: {exc.message}"), told=exc)
        else:
            self.end(self._unreachable("it left"), told=None)

    async def _write(self, write: Write) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                if message.HasField("run") or message.HasField("move_kv"):
                    self._sent.add(message.run.work_id or message.move_kv.work_id)
                if message.HasField("snapshot") and self.facts.snapshot_deltas:
                    told = self._told.next(message.snapshot, self._clock.monotonic())
                    message = uplink_pb2.AttachResponse(snapshot=told)
                await write(message)
        except MeshError:
            return  # closed: the session has ended
        except grpc.aio.BaseError as exc:
            self.end(self._unreachable(f"its uplink broke: {exc}"), told=None)

    async def _watch_lease(self) -> None:
        while (left_s := self._lease.remaining_s(self._clock.monotonic())) > 0:
            await self._clock.sleep(left_s)
        silent = f"silent for {self._lease.lease_s:g} s"
        self.end(self._unreachable(silent), told=LeaseLost(f"{silent}; attach again", node=self.place.node_id))

    def _unreachable(self, why: str) -> NodeUnreachable:
        return NodeUnreachable(f"node {self.place.node_id} is not attached: {why}", node=self.place.node_id)

    # What comes in

    def _receive(self, request: uplink_pb2.AttachRequest) -> None:
        match request.WhichOneof("message"):
            case "heartbeat":
                self._heartbeat(request.heartbeat)
            case "work_event":
                self._work_event(request.work_event)
            case "work_result":
                result = request.work_result
                try:
                    report = wire.result_from_wire(result, self.place.node_id)
                except MeshError as exc:
                    self._works.settle(result.work_id, error=exc)
                else:
                    self._works.settle(result.work_id, result=report)
            case "command_result":
                answer = self._commands.get(request.command_result.command_id)
                if answer is not None and not answer.done():
                    answer.set_result(request.command_result)
            case "hello":
                raise InvalidRequest("a session has one hello", field="hello")
            case _:
                raise RevisionMismatch("the agent sent a message of a kind that this build does not know")

    def _heartbeat(self, heartbeat: uplink_pb2.Heartbeat) -> None:
        self._heartbeats.accept(heartbeat.sequence)
        now_s = self._clock.monotonic()
        self._lease.renew(now_s)
        renewal = uplink_pb2.LeaseRenewal(sequence=heartbeat.sequence)
        self._outbox.put_latest("renewal", uplink_pb2.AttachResponse(renewal=renewal))
        self._rtt_s = wire.rtt_from_wire(heartbeat.rtt_s)
        if heartbeat.HasField("load"):
            self._load, self._draining = wire.load_from_wire(heartbeat.load)
            self._load_heard_s = now_s
        if heartbeat.models:
            self.facts = replace(self.facts, models=wire.models_from_wire(heartbeat.models))
        self._on_change()

    def _work_event(self, message: uplink_pb2.WorkEvent) -> None:
        event = message.event
        delivery = self._works.event(message.work_id, event, wire.cost_bytes(event))
        if delivery is Delivery.OVERFLOW:
            self._send_cancel(message.work_id)
        elif event.WhichOneof("event") in ("finished", "held"):
            self._works.settle(message.work_id)

    # Orders

    async def order(self, make: Callable[[int], uplink_pb2.AttachResponse]) -> OpenWork:
        """Open an order and send it; `make` builds its message from the work id. Waits for room (back-pressure).

        The caller must `close` what this returns. Raises Overloaded (too many open), InvalidRequest (too
        large), or why the session ended."""
        news = asyncio.Event()
        opened = OpenWork(self._works.open(news.set), news)
        work_id = opened.work.work_id
        try:
            message = make(work_id)
            await self._outbox.put(message, self._checked_cost(message), key=work_id)
        except BaseException:
            self.close(opened)
            raise
        return opened

    def close(self, opened: OpenWork) -> None:
        """The reader is done with it: it is taken back if it was not sent yet, or cancelled at the agent if it has
        not ended there. Never waits."""
        work = opened.work
        self._works.close(work.work_id)
        if work.work_id not in self._sent:
            self._outbox.discard(work.work_id)
            return
        self._sent.remove(work.work_id)
        if not work.settled:
            self._send_cancel(work.work_id)

    async def release(self, run_id: str) -> None:
        """Have the agent free a hold or cancel a run, in turn with the orders. Raises why the session ended."""
        message = uplink_pb2.AttachResponse(cancel=uplink_pb2.WorkCancel(run_id=run_id))
        await self._outbox.put(message, wire.cost_bytes(message))

    def push(self, slot: str, message: uplink_pb2.AttachResponse) -> None:
        """Send the latest of its slot ("config", "snapshot"); replaces one that was not sent yet."""
        self._outbox.put_latest(slot, message)

    async def command(self, command: uplink_pb2.Command, timeout_s: float) -> uplink_pb2.CommandResult:
        """Send a command (its id is set here) and wait for the answer. Raises TimeoutError, Overloaded, or why
        the session ended."""
        if len(self._commands) >= self._limits.max_commands:
            raise Overloaded(f"node {self.place.node_id} has {len(self._commands)} open commands; try again later")
        command_id, self._next_command_id = self._next_command_id, self._next_command_id + 1
        sent = uplink_pb2.Command()
        sent.CopyFrom(command)
        sent.command_id = command_id
        message = uplink_pb2.AttachResponse(command=sent)
        cost_bytes = self._checked_cost(message)
        answer: asyncio.Future[uplink_pb2.CommandResult] = asyncio.get_running_loop().create_future()
        self._commands[command_id] = answer
        try:
            async with time_limit(self._clock, timeout_s):
                await self._outbox.put(message, cost_bytes, key=("command", command_id))
                return await answer
        finally:
            del self._commands[command_id]
            self._outbox.discard(("command", command_id))
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # seen: an error of the session may have reached the writer above instead

    def _send_cancel(self, work_id: int) -> None:
        self._outbox.put_urgent(uplink_pb2.AttachResponse(cancel=uplink_pb2.WorkCancel(work_id=work_id)))

    def _checked_cost(self, message: uplink_pb2.AttachResponse) -> int:
        size_bytes = message.ByteSize()
        if size_bytes > self._limits.message_bytes:
            raise InvalidRequest(
                f"an order of {size_bytes} bytes is over the uplink's limit of {self._limits.message_bytes}",
                node=self.place.node_id,
            )
        return wire.cost_bytes(message)
