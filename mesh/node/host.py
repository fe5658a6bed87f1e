"""NodeHost: one node's engine behind its borders.

Everything that reaches an engine passes here, whether it came over gRPC, an uplink, or from the entry in the same
process: the policy's word on this place, the model, lengths and ids, whose KV it is, deadlines, signed reports.
It owns the engine's runs, holds and transfers, and knows nothing of the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from mesh.errors import InvalidRequest, MeshError
from mesh.identity.place import Place
from mesh.kv.transfer_window import WINDOW_BYTES
from mesh.node.engine import Engine, EngineInfo, EngineLoad, Finished, Held, Prefilled, RunEvent, RunId, Tokens
from mesh.node.host_counters import HostStatistics
from mesh.node.host_desk import Desk
from mesh.node.host_frames import Dial, FrameStream, HostFrame
from mesh.node.host_ledger import Phase
from mesh.node.host_moves import Moves, MoveSettings
from mesh.node.host_runs import HostRun
from mesh.node.legs import Clock, LegKeeper, Signer
from mesh.node.port import (
    BorderGuard,
    KvOrder,
    KvReport,
    PortEvent,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    RunOrder,
)
from mesh.node.run_trace import RunTrace
from mesh.node.serving_role import ServingRole
from mesh.telemetry.log import get_logger
from mesh.telemetry.traces import span

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """`hold_timeout_s`: a hold that nobody continues, ships or releases is freed after this. `idle_timeout_s`: a
    peer of a transfer that does not go on for this long is given up (a receiver waits so long for a prefill that
    is queued at the source). `kv_lifetime_s`: what manifests say.
    `resume_timeout_s`: both ends of a transfer whose connection broke keep it so long for another one (0: it fails
    at once). `window_bytes`: most of a transfer that may be under way, which bounds the memory of both ends beside
    one chunk. `pause_tokens`: a run that
    moves is paused when its rest can be shipped in the time of so many tokens. `room_timeout_s`: an import whose KV
    has still to be computed waits so long for KV blocks (at most half of `idle_timeout_s`), `most_waiting_imports` at
    a time. `prefill_backlog_ratio`: prefills for transfers, waiting ones included, take at most so many times the
    KV pool."""

    hold_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0
    kv_lifetime_s: float = 600.0
    resume_timeout_s: float = 3.0
    window_bytes: int = WINDOW_BYTES
    pause_tokens: float = 2.0
    room_timeout_s: float = 30.0
    most_waiting_imports: int = 64
    prefill_backlog_ratio: float = 2.0


class NodeHost:
    """See the module's docstring. On the event loop only; `close` in the end (the engine is the caller's)."""

    def __init__(
        self,
        engine: Engine,
        identity: Signer,
        guard: BorderGuard,
        place: Place,
        clock: Clock | None = None,
        settings: HostSettings | None = None,
        legs: LegKeeper | None = None,
    ) -> None:
        """`legs`: this node's own log of what it does; None: it keeps none."""
        if identity.place != place:
            raise InvalidRequest(f"the identity is of {identity.place.uri}, not of {place.uri}", field="place")
        settings = settings or HostSettings()
        self._engine = engine
        self._place = place
        self._desk = Desk(engine, identity, guard, clock or Clock(), hold_timeout_s=settings.hold_timeout_s, legs=legs)
        self._moves = Moves(
            self._desk,
            MoveSettings(
                idle_timeout_s=settings.idle_timeout_s,
                kv_lifetime_s=settings.kv_lifetime_s,
                resume_timeout_s=settings.resume_timeout_s,
                window_bytes=settings.window_bytes,
                pause_tokens=settings.pause_tokens,
                room_timeout_s=settings.room_timeout_s,
                most_waiting_imports=settings.most_waiting_imports,
                prefill_backlog_ratio=settings.prefill_backlog_ratio,
            ),
        )

    @property
    def place(self) -> Place:
        """Of this node, as its certificate says."""
        return self._place

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def clock(self) -> Clock:
        return self._desk.clock

    @property
    def draining(self) -> bool:
        return self._desk.draining

    @property
    def role(self) -> ServingRole:
        """Which half of requests it takes."""
        return self._desk.role

    def set_role(self, role: ServingRole) -> ServingRole:
        """Take other work from now on; what runs, is held or is being moved goes on. Returns the role before."""
        before, self._desk.role = self._desk.role, role
        if role is not before:
            log.info("serving_role_changed", role=role.value, before=before.value)
            self._desk.change()
        return before

    async def load(self) -> EngineLoad:
        """The engine's load now; imports that wait for room wait too."""
        load = await self._engine.load()
        return replace(load, waiting=load.waiting + self._moves.waiting_imports)

    def statistics(self) -> HostStatistics:
        """Counters since start, and what is there now."""
        return self._desk.counters.freeze(
            running=self._desk.ledger.count(Phase.RUNNING),
            holds=self._desk.ledger.count(Phase.HELD),
            transfers=len(self._moves),
        )

    async def wait_change(self) -> None:
        """Until a run, hold or transfer began or ended, or draining did."""
        await self._desk.wait_change()

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """Run a leg. Ends with PortFinished or PortHeld, or raises; closing the generator cancels the run.

        Raises PolicyDenied, Draining, UnknownModel, InvalidRequest, AlreadyExists, NotFound and StalePlan (of the
        hold), KvIncompatible (the hold's KV is of other tokens), Expired, Cancelled, and what the engine raises."""
        traced = RunTrace(order, self._place.node_id)
        try:
            await self._desk.check_log()
            run = self._desk.start(order)
        except MeshError as exc:
            self._desk.counters.run_failed(exc)
            traced.end(exc)
            raise
        try:
            async with aclosing(run.events()) as events:
                async for event in events:
                    traced.saw(event)
                    yield await self._port_event(run, event)
        except MeshError as exc:
            traced.end(exc)
            raise
        finally:
            traced.end()
            await self._desk.stop(run)

    async def _port_event(self, run: HostRun, event: RunEvent) -> PortEvent:
        match event:
            case Prefilled():
                return PortPrefilled(tokens=event.tokens, cached_tokens=event.cached)
            case Tokens():
                return PortTokens(event.ids, event.logprobs)
            case Finished():
                leg = await self._desk.report(run, event)
                return PortFinished(reason=event.reason, stop_string=event.stop_string, leg=leg)
            case Held():
                return PortHeld(kv_tokens=event.kv_tokens, leg=await self._desk.report(run, event))

    def entry_site_of(self, run_id: RunId) -> str:
        """Site of the entry that ordered a run, import or hold; empty if there is no such thing, or no site."""
        entry = self._desk.ledger.find(run_id)
        return "" if entry is None else entry.owner.entry_site

    async def release(self, run_id: RunId) -> None:
        """Free a hold or cancel a run. Idempotent."""
        await self._desk.release(run_id)

    async def move_kv(self, order: KvOrder, dial: Dial) -> KvReport:
        """Move KV as the dialling side; see NodePort.move_kv."""
        parent, peer = order.context.traceparent, order.peer.place.node_id
        with span(
            "node.kv_move", parent=parent, node=self._place.node_id, target=peer, kind=order.direction.value
        ) as moving:
            report = await self._moves.move_kv(order, dial)
            moving.set(codec=report.codec, kv_tokens=report.tokens, wire_bytes=report.wire_bytes)
        return report

    async def serve_transfer(self, first: HostFrame, stream: FrameStream) -> None:
        """Do a transfer as the dialled side, or go on with one; `first` is the first frame of `stream`. Returns or
        raises when the stream is of no more use; cancelling this means that the stream is gone, and the transfer
        waits for another one for a while."""
        await self._moves.serve_transfer(first, stream)

    async def drain(self) -> None:
        """Take nothing new; return when all runs and transfers have ended. Holds are freed then. Bound it with a
        timeout: runs end by themselves, or move away when told to."""
        self._desk.draining = True
        self._desk.change()
        while self._desk.ledger.count(Phase.RUNNING) or len(self._moves):
            await self._desk.wait_change()
        await self._desk.free_holds()

    async def close(self) -> None:
        """Cancel and free everything. Idempotent."""
        self._desk.draining = True
        await self._moves.close()
        await self._desk.close()
