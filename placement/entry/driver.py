"""The asyncio rim of the plan runner: executes effects over node ports, and reports what happens as events.

One driver per request, one task that owns it. Runs and transfers are child tasks; whatever way the driver ends,
they have ended before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace

from mesh.errors import Internal, MeshError, NotImplementedHere, StalePlan
from mesh.identity.place import Tier
from mesh.node.engine import RunId
from mesh.node.port import (
    KvDirection,
    KvOrder,
    KvSource,
    NodePort,
    Peer,
    PortEvent,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    RunOrder,
    WorkContext,
)
from mesh.node.sampling import SamplingParams
from mesh.telemetry.log import get_logger
from placement.entry import runner_types as rt
from placement.entry.runner import PlanRunner
from placement.entry.world import World

log = get_logger(__name__)
_RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every order of one request has in common."""

    context: WorkContext
    prompt_tokens: int
    sampling: SamplingParams
    priority: int


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._work = work
        self._world = world
        self._on_effect = on_effect
        self._clock = clock
        self._started_s = clock()
        self._events: asyncio.Queue[rt.Event] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._move: asyncio.Future[rt.EmitMigration] | None = None
        self._done = False

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
        except asyncio.CancelledError:
            await asyncio.shield(self._abandon())
            raise
        finally:
            if timer is not None:
                timer.cancel()
            await self._settle()

    def cancel(self) -> None:
        """The client went away or aborted."""
        self._events.put_nowait(rt.Cancelled())

    async def move(self, target_node_id: str, cause: rt.MoveCause) -> rt.EmitMigration:
        """Move the running request; returns once it runs there. Raises what kept it from moving."""
        if self._done or self._move is not None:
            raise StalePlan("the request has ended" if self._done else "the request is being moved already")
        self._move = asyncio.get_running_loop().create_future()
        self._events.put_nowait(rt.MoveRequested(target_node_id=target_node_id, cause=cause))
        try:
            return await self._move
        finally:
            self._move = None

    async def _handle(self, event: rt.Event) -> None:
        for effect in self._runner.handle(event, self._clock()):
            await self._execute(effect)

    async def _execute(self, effect: rt.Effect) -> None:
        match effect:
            case rt.StartRun():
                self._on_effect(effect)
                self._spawn(effect.run_id, self._run(effect))
            case rt.MoveKv():
                self._on_effect(effect)
                self._spawn(effect.transfer_id, self._move_kv(effect))
            case rt.CloseRun(run_id=run_id):
                await self._stop(run_id)
            case rt.CancelMove(transfer_id=transfer_id):
                await self._stop(transfer_id)
            case rt.Release(node_id=node_id, run_id=run_id):
                self._release(node_id, run_id)
            case rt.EmitMigration():
                self._on_effect(effect)
                self._answer_move(effect)
            case rt.MoveFailed():
                log.warning("move_failed", target=effect.target_node_id, reason=effect.error.reason)
                self._on_effect(effect)
                self._answer_move(effect)
            case rt.Finish() | rt.Fail():
                self._done = True
                self._on_effect(effect)
            case rt.Emit() | rt.LegDone():
                self._on_effect(effect)

    def _answer_move(self, effect: rt.EmitMigration | rt.MoveFailed) -> None:
        asked = effect.cause in (rt.MoveCause.OPERATOR, rt.MoveCause.DRAIN)
        if not asked or self._move is None or self._move.done():
            return
        if isinstance(effect, rt.EmitMigration):
            self._move.set_result(effect)
        else:
            self._move.set_exception(effect.error)

    def _spawn(self, name: str, coroutine: Coroutine[None, None, None]) -> None:
        self._tasks[name] = asyncio.create_task(coroutine, name=name)

    async def _stop(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

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
        run_id = effect.run_id
        try:
            port = self._world.port(effect.node_id)
            order = self._order(run_id, effect.token_ids, kv_from=effect.kv_from)
            last = None
            async with aclosing(port.run(order)) as events:
                async for event in events:
                    last = _event(run_id, event)
                    self._events.put_nowait(last)
            if not isinstance(last, rt.RunFinished | rt.RunHeld):
                raise Internal(f"node {effect.node_id} ended a run without an outcome", node=effect.node_id)
        except MeshError as error:
            self._events.put_nowait(rt.RunFailed(run_id=run_id, error=error))
        except Exception as error:
            log.exception("run_failed", node=effect.node_id)
            wrapped = Internal(f"running at {effect.node_id} failed: {type(error).__name__}", node=effect.node_id)
            self._events.put_nowait(rt.RunFailed(run_id=run_id, error=wrapped))

    async def _move_kv(self, effect: rt.MoveKv) -> None:
        try:
            source = self._world.port(effect.source_node_id)
            target = self._world.port(effect.target_node_id)
            dialler, peer, direction = choose_dialler(source, target)
            prefill = None
            if effect.source is rt.KvSourceKind.PREFILL:
                prefill = self._order(effect.source_run, effect.token_ids, prefill_only=True)
            report = await dialler.move_kv(
                KvOrder(
                    context=self._context(),
                    transfer_id=effect.transfer_id,
                    direction=direction,
                    peer=Peer(address=peer.address, place=peer.place),
                    source=KvSource(run_id=effect.source_run, prefill=prefill, pause=prefill is None),
                    target=effect.target_run,
                    token_ids=effect.token_ids,
                    max_tokens=effect.max_tokens,
                    codec=effect.codec,
                )
            )
            self._world.saw_transfer(effect.source_node_id, effect.target_node_id, report)
            self._events.put_nowait(rt.KvMoved(transfer_id=effect.transfer_id, report=report))
        except MeshError as error:
            self._events.put_nowait(rt.KvFailed(transfer_id=effect.transfer_id, error=error))
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

    async def _abandon(self) -> None:
        """The driver itself is cancelled: let the runner free everything."""
        if not self._done:
            await self._handle(rt.Cancelled())

    async def _settle(self) -> None:
        """After the outcome: no child task is left, and late events may still ask for a release."""
        for name in list(self._tasks):
            await self._stop(name)
        while not self._events.empty():
            await self._handle(self._events.get_nowait())
        if self._releases:
            await asyncio.gather(*self._releases)
        if self._move is not None and not self._move.done():
            self._move.set_exception(StalePlan("the request ended before it moved"))


def choose_dialler(source: NodePort, target: NodePort) -> tuple[NodePort, NodePort, KvDirection]:
    """(who dials, whom, which way the KV flows from the dialler's view). An edge always dials; between core nodes
    the target pulls. Raises NotImplementedHere for edge to edge."""
    if source.place.tier is Tier.EDGE and target.place.tier is Tier.EDGE:
        raise NotImplementedHere("moving KV between two edge sites is not implemented: move to the core first")
    if source.place.tier is Tier.EDGE:
        return source, target, KvDirection.PUSH
    return target, source, KvDirection.PULL


def _event(run_id: RunId, event: PortEvent) -> rt.Event:
    match event:
        case PortTokens():
            return rt.RunTokens(run_id=run_id, ids=event.ids, logprobs=event.logprobs)
        case PortPrefilled():
            return rt.RunPrefilled(run_id=run_id, tokens=event.tokens, cached_tokens=event.cached_tokens)
        case PortFinished():
            return rt.RunFinished(run_id=run_id, reason=event.reason, stop_string=event.stop_string, leg=event.leg)
        case PortHeld():
            return rt.RunHeld(run_id=run_id, kv_tokens=event.kv_tokens, leg=event.leg)
