"""The desk of a node: starts, stops and frees what its engine holds, and keeps the ledger in step with it.

Every way to an engine leads over `Desk.start` (runs) or a transfer, and both end here when something is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from mesh.errors import Draining, MeshError
from mesh.identity.signing import SignedRecord
from mesh.node.engine import Engine, Finished, Held, RunId
from mesh.node.host_checks import check_run
from mesh.node.host_counters import Counters
from mesh.node.host_ledger import Ledger, Phase
from mesh.node.host_runs import HostRun, let_go
from mesh.node.legs import Clock, LegKeeper, Signer, sign_leg
from mesh.node.port import BorderGuard, RunOrder
from mesh.node.serving_role import ServingRole, check_run_role
from mesh.telemetry.log import get_logger

log = get_logger(__name__)


class Desk:
    """Owned by the NodeHost; on the event loop only."""

    def __init__(
        self,
        engine: Engine,
        identity: Signer,
        guard: BorderGuard,
        clock: Clock,
        *,
        hold_timeout_s: float,
        legs: LegKeeper | None = None,
    ) -> None:
        self._legs = legs
        self.engine = engine
        self.identity = identity
        self.guard = guard
        self.clock = clock
        self.ledger = Ledger(
            layout_hash=engine.info.geometry.layout_hash, hold_timeout_s=hold_timeout_s, expire=self._expire
        )
        self.counters = Counters()
        self.draining = False
        self.role = ServingRole.BOTH
        self._runs: dict[RunId, HostRun] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def check(self, order: RunOrder) -> None:
        """Raise unless policy lets this place see the prompt, the engine could run it, and it is this node's part."""
        self.guard.check_prompt(order.context, self.identity.place)
        check_run(order, self.engine.info)
        held = self.ledger.find(order.kv_from) if order.kv_from is not None else None
        if held is None or not self.role.prefills:  # KV that is here was taken before a change of role
            check_run_role(
                self.role,
                self.identity.place.node_id,
                to_prefill_tokens=len(order.token_ids) - (held.kv_tokens if held is not None else 0),
                prefill_only=order.prefill_only,
            )

    def start(self, order: RunOrder) -> HostRun:
        """Check an order and start it; whoever calls must `stop` it. For errors see NodeHost.run."""
        self.check(order)
        if order.run_id != order.kv_from:
            self.ledger.check_free(order.run_id)
        if order.kv_from is None:
            self.refuse_if_draining()
            claimed = None
        else:  # what goes on from a hold was taken before draining began
            claimed = self.ledger.claim(order.kv_from, order.context, order.token_ids)
        entry = self.ledger.open(order.run_id, order.context, Phase.RUNNING, order.token_ids)
        run = HostRun(self.engine, self.ledger, self.counters, self.clock, order, entry, claimed)
        self._runs[order.run_id] = run
        self.counters.runs_started += 1
        self.change()
        return run

    async def check_log(self) -> None:
        """Raise while this node could not keep the leg of a run."""
        if self._legs is not None:
            await self._legs.check()

    async def report(self, run: HostRun, end: Finished | Held | None) -> SignedRecord:
        """The run's signed leg, which is in this node's log then, if it has one. Raises what keeping it raises."""
        record = sign_leg(run.leg(end), self.identity)
        if self._legs is not None:
            await self._legs.append_leg(record)
        run.reported = True
        return record

    async def _report_rest(self, run: HostRun) -> None:
        """A run that ended without a word saw its prompt all the same."""
        try:
            held = run.entry.phase is Phase.HELD
            await self.report(run, Held(run.entry.kv_tokens) if held else None)
        except MeshError as error:
            log.error("leg_not_kept", run_id=run.order.run_id, reason=error.reason, error=error.message)

    def run_of(self, run_id: RunId) -> HostRun | None:
        """The run of this name, if it is one and not a hold."""
        run = self._runs.get(run_id)
        return run if run is not None and run.entry.phase is Phase.RUNNING else None

    async def stop(self, run: HostRun) -> None:
        """Cancel it if it goes on. A hold that it became stays."""
        await run.cancel()
        if self._runs.get(run.order.run_id) is run:
            del self._runs[run.order.run_id]
        if self._legs is not None and not run.reported:
            run.reported = True
            self._chore(self._report_rest(run))
        self.change()

    async def release(self, run_id: RunId) -> None:
        """Free a hold or cancel a run. Idempotent."""
        run = self._runs.get(run_id)
        if run is not None:
            await run.cancel()
        await self.free(run_id)

    async def free(self, run_id: RunId) -> None:
        """Out of ledger and engine, to the end even if the caller is cancelled meanwhile. Raises no MeshError."""
        entry = self.ledger.find(run_id)
        if entry is not None:
            self.ledger.close(entry)
        self.change()
        await asyncio.shield(self._chore(let_go(self.engine, run_id)))

    async def free_holds(self) -> None:
        for entry in self.ledger.of_phase(Phase.HELD):
            await self.free(entry.run_id)

    def refuse_if_draining(self) -> None:
        """Raise Draining while the node takes nothing new."""
        if self.draining:
            node = self.identity.place.node_id
            raise Draining(f"node {node} takes nothing new", node=node)

    def change(self) -> None:
        """Something began or ended: wakes all who wait for that."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()

    async def close(self) -> None:
        """Cancel and free everything, and wait for it."""
        for run in list(self._runs.values()):
            await self.stop(run)
        await self.free_holds()
        if self._chores:
            await asyncio.wait(self._chores)

    def _expire(self, run_id: RunId) -> None:
        log.info("hold_expired", run_id=run_id)
        self.counters.holds_expired += 1
        self._chore(self.free(run_id))

    def _chore(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task
