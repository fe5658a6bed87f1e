"""The asyncio rim of the plan runner: executes effects over node ports, and reports what happens as events.

One driver per request, one task that owns it. Runs and transfers are child tasks; whatever way the driver ends
(an outcome, a cancellation, a bug), they have ended before it and what they held at the nodes was released.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from mesh.errors import Internal, MeshError, NodeUnreachable, StalePlan
from mesh.node.engine import RunId
from mesh.node.port import (
    KvOrder,
    KvReport,
    KvSource,
    NodePort,
    Peer,
    RunOrder,
    WorkContext,
)
from mesh.telemetry.log import get_logger
from mesh.telemetry.traces import Span, start_span
from placement.decide.moves import MoveWay
from placement.entry import runner_types as rt
from placement.entry.orders import Work, choose_codec, choose_dialler, run_event
from placement.entry.runner import PlanRunner
from placement.entry.world import World

log = get_logger(__name__)
_RELEASE_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 5.0  # for a cancelled child task to end; only an engine that hangs takes as long
_STALE_PATIENCE_S = 3.0  # a node that has not heard of a policy yet, or of its end, hears of it within this
_STALE_PAUSE_S = 0.1
T = TypeVar("T")


class RequestDriver:
    """Runs one request's plan. `on_effect` sees the effects that concern the client or the receipt
    (Emit, EmitMigration, MoveFailed, LegDone, Finish, Fail, StartRun, MoveKv), in order."""

    def __init__(
        self,
        *,
        runner: PlanRunner,
        work: Work,
        world: World,
        on_effect: Callable[[rt.Effect], None],
        on_report: Callable[[KvReport], None] = lambda report: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._work = work
        self._world = world
        self._on_effect = on_effect
        self._on_report = on_report
        self._clock = clock
        self._started_s = clock()
        self._events: asyncio.Queue[rt.Event] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._move: asyncio.Future[rt.EmitMigration] | None = None  # the one that was asked for and not answered
        self._done = False
        self._abandoned = False  # ended without an outcome: nobody is told anything any more

    @property
    def node_id(self) -> str:
        """The node that the request runs on now."""
        return self._runner.node_id

    @property
    def usage(self) -> rt.Usage:
        """Token counts so far."""
        return self._runner.usage

    async def run(self) -> None:
        """Until the one outcome. Cancelling it closes and frees everything first, then raises."""
        deadline_s = self._work.context.deadline_s
        timer = None
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(deadline_s, self._events.put_nowait, rt.DeadlineExpired())
        self._events.put_nowait(rt.Begin())
        try:
            while not self._done:
                await self._handle(await self._events.get())
        finally:
            if timer is not None:
                timer.cancel()
            await _to_the_end(self._close())

    def cancel(self) -> None:
        """The client went away or aborted."""
        self._events.put_nowait(rt.Cancelled())

    @property
    def moving(self) -> bool:
        """A move was asked for and is not done."""
        return self._move is not None

    async def move(self, target_node_id: str, cause: rt.MoveCause, way: MoveWay | None = None) -> rt.EmitMigration:
        """Move the running request; returns once it runs there. Raises what kept it from moving. A caller that is
        cancelled does not undo the move."""
        if self._done:
            raise StalePlan("the request has ended")
        if self._move is not None:
            raise StalePlan("the request is being moved already")
        self._move = asyncio.get_running_loop().create_future()
        self._events.put_nowait(rt.MoveRequested(target_node_id=target_node_id, cause=cause, way=way))
        return await asyncio.shield(self._move)

    async def _handle(self, event: rt.Event) -> None:
        for effect in self._runner.handle(event, self._clock()):
            await self._execute(effect)

    async def _execute(self, effect: rt.Effect) -> None:
        match effect:
            case rt.StartRun():
                self._tell(effect)
                self._spawn(effect.run_id, self._run(effect))
            case rt.MoveKv():
                self._tell(effect)
                self._spawn(effect.transfer_id, self._move_kv(effect))
            case rt.CloseRun(run_id=run_id):
                await self._stop(run_id)
            case rt.CancelMove(transfer_id=transfer_id):
                await self._stop(transfer_id)
            case rt.Release(node_id=node_id, run_id=run_id):
                self._release(node_id, run_id)
            case rt.EmitMigration():
                self._tell(effect)
                self._answer_move(effect)
            case rt.MoveFailed():
                log.warning("move_failed", target=effect.target_node_id, reason=effect.error.reason)
                self._tell(effect)
                self._answer_move(effect)
            case rt.Finish() | rt.Fail():
                self._done = True
                self._tell(effect)
            case rt.Emit() | rt.LegDone():
                self._tell(effect)

    def _tell(self, effect: rt.Effect) -> None:
        if not self._abandoned:
            self._on_effect(effect)

    def _answer_move(self, effect: rt.EmitMigration | rt.MoveFailed) -> None:
        if effect.cause in (rt.MoveCause.PLAN, rt.MoveCause.FALLBACK) or self._move is None:
            return
        move, self._move = self._move, None
        if isinstance(effect, rt.EmitMigration):
            move.set_result(effect)
        else:
            move.set_exception(effect.error)
            move.exception()  # whoever asked may not wait for the answer any more

    def _spawn(self, name: str, coroutine: Coroutine[None, None, None]) -> None:
        self._tasks[name] = asyncio.create_task(coroutine, name=name)

    async def _stop(self, name: str) -> None:
        """End a child task and wait for it. One that does not end is left to whatever it hangs on: the request's
        outcome must not wait for an engine that does nothing any more."""
        task = self._tasks.pop(name, None)
        if task is None:
            return
        task.cancel()
        _, late = await asyncio.wait((task,), timeout=_STOP_TIMEOUT_S)
        if late:
            log.error("request_task_does_not_end", name=name)

    def _context(self) -> WorkContext:
        context = self._work.context
        if context.deadline_s is None:
            return context
        return replace(context, deadline_s=max(0.001, context.deadline_s - (self._clock() - self._started_s)))

    def _order(
        self, run_id: RunId, token_ids: tuple[int, ...], *, kv_from: RunId | None = None, prefill_only: bool = False
    ) -> RunOrder:
        return RunOrder(
            context=self._context(),
            run_id=run_id,
            token_ids=token_ids,
            prompt_tokens=min(self._work.prompt_tokens, len(token_ids)),
            sampling=self._work.sampling,
            priority=self._work.priority,
            kv_from=kv_from,
            prefill_only=prefill_only,
        )

    async def _run(self, effect: rt.StartRun) -> None:
        leg = start_span(
            "leg",
            parent=self._work.context.traceparent,
            node=effect.node_id,
            kind="prefill" if effect.prefill_only else "run",
            kv_tokens=0 if effect.kv_from is None else len(effect.token_ids) - 1,
        )
        try:
            await self._run_traced(effect, leg.traceparent)
        finally:
            leg.end()

    async def _run_traced(self, effect: rt.StartRun, traceparent: str) -> None:
        run_id = effect.run_id
        try:
            port = self._world.port(effect.node_id)
            last = await self._while_stale(lambda: self._follow(port, effect, traceparent))
            if not isinstance(last, rt.RunFinished | rt.RunHeld):
                raise Internal(f"node {effect.node_id} ended a run without an outcome", node=effect.node_id)
        except MeshError as error:
            self._events.put_nowait(rt.RunFailed(run_id=run_id, error=error))
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            closed = NodeUnreachable(f"the link to node {effect.node_id} was closed", node=effect.node_id)
            self._events.put_nowait(rt.RunFailed(run_id=run_id, error=closed))
        except Exception as error:
            log.exception("run_failed", node=effect.node_id)
            wrapped = Internal(f"running at {effect.node_id} failed: {type(error).__name__}", node=effect.node_id)
            self._events.put_nowait(rt.RunFailed(run_id=run_id, error=wrapped))

    async def _follow(self, port: NodePort, effect: rt.StartRun, traceparent: str) -> rt.Event | None:
        """One try of a run; its last event. Raises StalePlan only if nothing came before."""
        last: rt.Event | None = None
        try:
            order = self._order(
                effect.run_id, effect.token_ids, kv_from=effect.kv_from, prefill_only=effect.prefill_only
            )
            order = replace(order, context=replace(order.context, traceparent=traceparent))
            async with aclosing(port.run(order)) as run:
                async for event in run:
                    last = run_event(effect.run_id, event)
                    self._events.put_nowait(last)
        except StalePlan as error:
            if last is not None:
                raise NodeUnreachable(f"node {effect.node_id} gave a run up: {error.message}") from error
            raise
        return last

    async def _while_stale(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again for a while where a node refuses by other news than this entry has: right after a policy was
        applied, not every node has heard of it."""
        now_s = asyncio.get_running_loop().time
        give_up_s = now_s() + _STALE_PATIENCE_S
        while True:
            try:
                return await attempt()
            except StalePlan:
                if now_s() >= give_up_s:
                    raise
            await asyncio.sleep(_STALE_PAUSE_S)

    async def _move_kv(self, effect: rt.MoveKv) -> None:
        moving = start_span(
            "kv_transfer",
            parent=self._work.context.traceparent,
            source=effect.source_node_id,
            target=effect.target_node_id,
            kind=effect.source.value,
        )
        try:
            await self._move_traced(effect, moving)
        finally:
            moving.end()

    async def _move_traced(self, effect: rt.MoveKv, moving: Span) -> None:
        try:
            source = self._world.port(effect.source_node_id)
            target = self._world.port(effect.target_node_id)
            dialler, peer, direction = choose_dialler(source, target)
            prefill = None
            if effect.source is rt.KvSourceKind.PREFILL:
                prefill = self._order(effect.source_run, effect.token_ids, prefill_only=True)
            order = KvOrder(
                context=replace(self._context(), traceparent=moving.traceparent),
                transfer_id=effect.transfer_id,
                direction=direction,
                peer=Peer(address=peer.address, place=peer.place),
                source=KvSource(
                    run_id=effect.source_run,
                    prefill=prefill,
                    pause=prefill is None,
                    stop_first=effect.stop_first,
                    pace_s=effect.pace_s,
                ),
                target=effect.target_run,
                token_ids=effect.token_ids,
                max_tokens=effect.max_tokens,
                codec=choose_codec(effect.codec, source, target),
                own_tokens=effect.own_tokens,
            )
            report = await self._while_stale(lambda: dialler.move_kv(order))
            self._world.saw_transfer(effect.source_node_id, effect.target_node_id, report)
            self._on_report(report)
            moving.set(codec=report.codec, kv_tokens=report.tokens, wire_bytes=report.wire_bytes)
            self._events.put_nowait(rt.KvMoved(transfer_id=effect.transfer_id, report=report))
        except MeshError as error:
            self._events.put_nowait(rt.KvFailed(transfer_id=effect.transfer_id, error=error))
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            closed = NodeUnreachable(f"the link between {effect.source_node_id} and {effect.target_node_id} was closed")
            self._events.put_nowait(rt.KvFailed(transfer_id=effect.transfer_id, error=closed))
        except Exception as error:
            log.exception("move_kv_failed", source=effect.source_node_id, target=effect.target_node_id)
            wrapped = Internal(f"moving KV failed: {type(error).__name__}")
            self._events.put_nowait(rt.KvFailed(transfer_id=effect.transfer_id, error=wrapped))

    def _release(self, node_id: str, run_id: RunId) -> None:
        async def release() -> None:
            # Best effort: a node that does not answer frees holds by itself after its own time-out.
            with contextlib.suppress(MeshError, TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await self._world.port(node_id).release(run_id)

        task = asyncio.create_task(release(), name=f"release:{run_id}")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _close(self) -> None:
        """After the outcome, or instead of one: no child task is left, late events may still ask for a release."""
        if not self._done:
            self._done = self._abandoned = True
            await self._handle_last(rt.Cancelled())
        for name in list(self._tasks):
            await self._stop(name)
        while not self._events.empty():
            await self._handle_last(self._events.get_nowait())
        if self._releases:
            await asyncio.gather(*self._releases)
        if self._move is not None:
            error = StalePlan("the request ended before it moved")
            self._answer_move(rt.MoveFailed(target_node_id="", cause=rt.MoveCause.OPERATOR, error=error))

    async def _handle_last(self, event: rt.Event) -> None:
        """The outcome is given: a bug in the runner must not keep the rest from being freed."""
        try:
            await self._handle(event)
        except Exception:
            log.exception("late_event_failed")


def _being_cancelled() -> bool:
    """Whether a CancelledError is meant for the current task. grpc.aio raises the same class in a call whose channel
    was closed, and a run that ended so without a word would never end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Run it to its end even if the caller is cancelled meanwhile, which is then raised."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
