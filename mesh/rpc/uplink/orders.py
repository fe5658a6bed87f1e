"""The agent's side of orders: each runs as a task of the session, its events go back in order.

An order ends in exactly one of: the run's own last event, a WorkResult, or, when it was cancelled, silence (the
hub has closed it by then). A task is cancelled by the hub's WorkCancel, and with its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable

from mesh.errors import Draining, Internal, InvalidRequest, MeshError, Overloaded
from mesh.node.engine import RunId
from mesh.node.port import PortFinished, PortHeld
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.outbox import Outbox
from mesh.rpc.uplink.types import UplinkHost, UplinkLimits
from mesh.telemetry.log import get_logger
from mesh.v1 import uplink_pb2

OnCommand = Callable[[uplink_pb2.Command], Awaitable[uplink_pb2.CommandResult]]

log = get_logger(__name__)


class Orders:
    """Open orders and commands of one session. `tasks` is the session's group: it owns what runs here."""

    def __init__(
        self,
        *,
        host: UplinkHost,
        on_command: OnCommand,
        outbox: Outbox[uplink_pb2.AttachRequest],
        tasks: asyncio.TaskGroup,
        limits: UplinkLimits,
    ) -> None:
        self._host = host
        self._on_command = on_command
        self._outbox = outbox
        self._tasks = tasks
        self._limits = limits
        self._orders: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()  # commands and releases

    def start(self, work_id: int, body: Callable[[], Awaitable[uplink_pb2.AttachRequest | None]]) -> None:
        """Run an order. Raises InvalidRequest for an id that is zero or open: a fault of the hub."""
        if work_id == 0 or work_id in self._orders:
            raise InvalidRequest(f"order {work_id} is zero or open already", field="work_id")
        if len(self._orders) >= self._limits.max_open:
            full = Overloaded(f"{len(self._orders)} orders are open here; try again later")
            self._side_task(self._send(wire.failed_to_wire(work_id, full), key=work_id))
            return
        task = self._tasks.create_task(self._order(work_id, body), name=f"uplink-order:{work_id}")
        self._orders[work_id] = task
        task.add_done_callback(lambda _: self._orders.pop(work_id))

    def run(self, message: uplink_pb2.WorkRun) -> None:
        """Run a leg."""
        self.start(message.work_id, lambda: self._run(message))

    def move_kv(self, message: uplink_pb2.WorkMoveKv) -> None:
        """Move KV as the dialling side."""
        self.start(message.work_id, lambda: self._move_kv(message))

    def cancel(self, message: uplink_pb2.WorkCancel) -> None:
        """Cancel an order, free a hold, or both. Unknown ones are fine."""
        task = self._orders.get(message.work_id)
        if task is not None:
            self._outbox.discard(message.work_id)
            task.cancel()
        if message.run_id:
            self._side_task(self._release(RunId(message.run_id)))

    def command(self, command: uplink_pb2.Command) -> None:
        """Run a command; its answer or error goes back."""
        self._side_task(self._command(command))

    async def stop(self) -> None:
        """Cancel all orders and tell the hub Draining for each, as the agent is about to leave."""
        stopped = dict(self._orders)
        for task in stopped.values():
            task.cancel()
        await asyncio.gather(*stopped.values(), return_exceptions=True)
        for work_id in stopped:
            await self._send(wire.failed_to_wire(work_id, Draining("the edge agent is stopping")), key=work_id)

    async def _order(self, work_id: int, body: Callable[[], Awaitable[uplink_pb2.AttachRequest | None]]) -> None:
        try:
            result = await body()
        except MeshError as exc:
            result = wire.failed_to_wire(work_id, exc)
        except Exception:
            log.exception("order_failed_by_a_bug", work_id=work_id)
            result = wire.failed_to_wire(work_id, Internal("internal error at the edge node; its log has it"))
        if result is not None:
            await self._send(result, key=work_id)

    async def _run(self, message: uplink_pb2.WorkRun) -> None:
        events = self._host.run(wire.order_from_wire(message.order))
        ended = False
        try:
            async for event in events:
                await self._send(wire.event_to_wire(message.work_id, event), key=message.work_id)
                ended = ended or isinstance(event, PortFinished | PortHeld)
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()
        if not ended:
            raise Internal("the run ended without its last event")

    async def _move_kv(self, message: uplink_pb2.WorkMoveKv) -> uplink_pb2.AttachRequest:
        report = await self._host.move_kv(wire.move_from_wire(message))
        return wire.moved_to_wire(message.work_id, report)

    async def _release(self, run_id: RunId) -> None:
        try:
            await self._host.release(run_id)
        except MeshError as exc:
            log.warning("release_failed", run_id=run_id, reason=exc.reason)

    async def _command(self, command: uplink_pb2.Command) -> None:
        result, error = None, None
        try:
            if len(self._others) > self._limits.max_commands:
                raise Overloaded("too many commands are open here; try again later")
            result = await self._on_command(command)
        except MeshError as exc:
            error = exc
        except Exception:
            log.exception("command_failed_by_a_bug", command_id=command.command_id)
            error = Internal("internal error at the edge node; its log has it")
        await self._send(wire.answer_to_wire(command.command_id, result, error))

    async def _send(self, request: uplink_pb2.AttachRequest, *, key: Hashable = None) -> None:
        await self._outbox.put(request, wire.cost_bytes(request), key=key)

    def _side_task(self, body: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(body)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
