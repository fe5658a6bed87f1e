"""One run at a node: the task that drives the engine's iterator, whoever reads its events and how slowly.

The ledger must know the tokens of a run while its KV is being shipped, so the engine's events are taken as they
come and queued; the queue is bounded by the run's own max_tokens.

A run can be paced while it moves: it is then made a hold after each token, and continued from it when the next one is
due. Nobody but its engine sees that; its KV stays where it is, and can be exported all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from mesh.errors import Cancelled, Expired, Internal, MeshError, NotFound
from mesh.node.engine import Engine, Finished, Held, Prefilled, RunEvent, RunId, RunSpec, Tokens
from mesh.node.host_counters import Counters
from mesh.node.host_ledger import Entry, Ledger
from mesh.node.legs import Clock, Leg, LegKind, LegOutcome
from mesh.node.port import RunOrder
from mesh.telemetry.log import get_logger

log = get_logger(__name__)


class HostRun:
    """Owned by who started it, who must `cancel` it in the end. Its entry outlives it only as a hold."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        counters: Counters,
        clock: Clock,
        order: RunOrder,
        entry: Entry,
        claimed: Entry | None,
    ) -> None:
        self.order = order
        self.entry = entry
        self.reported = False  # its leg was signed and, where there is a log, kept
        self._engine = engine
        self._ledger = ledger
        self._counters = counters
        self._clock = clock
        self._claimed = claimed
        self._queue: asyncio.Queue[RunEvent | MeshError] = asyncio.Queue()
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._started_unix_s = clock.unix_s()
        self._last_s = clock.monotonic_s()  # its start, then its last token
        self._ended_unix_s = 0.0
        self._token_ids = list(order.token_ids)
        self._pace_s = 0.0
        self._next_token_s = 0.0  # when the pace lets it be made
        self._pausing = False  # somebody wants it to become a hold
        self._resting: asyncio.Event | None = None  # it is a hold in the engine, for its pace only; set to end that
        self._task = asyncio.create_task(self._pump(), name=f"run:{order.run_id}")

    async def events(self) -> AsyncGenerator[RunEvent, None]:
        """Ends with Finished or Held, or raises a MeshError. One reader."""
        while True:
            item = await self._queue.get()
            if isinstance(item, MeshError):
                raise item
            yield item
            if isinstance(item, Finished | Held):
                return

    async def pause(self) -> None:
        """Have it become a hold after its current step. Raises what the engine raises (NotFound: it just ended)."""
        self._pausing = True
        if self._resting is not None:
            self._resting.set()  # it is one
        else:
            await self._engine.pause(self.order.run_id)

    def pace(self, min_interval_s: float) -> None:
        """Make a token at most this often from now on; 0: as often as the engine does."""
        self._pace_s = min_interval_s
        if not min_interval_s and self._resting is not None:
            self._resting.set()

    async def cancel(self) -> None:
        """Stop it if it runs, and wait until the engine has freed it. A hold that it became stays."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self._fail(Cancelled(f"run {self.order.run_id!r} was cancelled"))  # if it had not even started

    def leg(self, end: Finished | Held | None) -> Leg:
        """The report, once it has ended; None: it failed or was cancelled."""
        if end is None:
            outcome = LegOutcome.FAILED
        else:
            outcome = LegOutcome.HELD if isinstance(end, Held) else LegOutcome(end.reason.value)
        if self.order.prefill_only:
            kind = LegKind.PREFILL
        else:
            kind = LegKind.DECODE if self._claimed is not None else LegKind.RUN
        return Leg(
            context=self.order.context,
            run_id=self.order.run_id,
            kind=kind,
            outcome=outcome,
            prompt_tokens=self.order.prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            kv_tokens=self.entry.kv_tokens,
            kv_in_bytes=self._claimed.kv_in_bytes if self._claimed is not None else 0,
            kv_out_bytes=self.entry.kv_out_bytes,
            started_unix_s=self._started_unix_s,
            ended_unix_s=self._ended_unix_s or self._clock.unix_s(),
        )

    async def _pump(self) -> None:
        try:
            await self._drive()
        except asyncio.CancelledError:
            await self._fail(Cancelled(f"run {self.order.run_id!r} was cancelled"))
            raise
        except MeshError as exc:
            await self._fail(exc)
        except Exception as exc:
            log.exception("run_failed_by_a_bug", run_id=self.order.run_id)
            await self._fail(Internal(f"the run failed by a bug: {type(exc).__name__}; the node's log has it"))

    async def _drive(self) -> None:
        deadline_s = self.order.context.deadline_s
        try:
            async with asyncio.timeout(deadline_s) as limit:
                kv_from = self.order.kv_from
                while await self._drive_once(kv_from):
                    kv_from = self.order.run_id
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise Expired(f"the deadline of {deadline_s:g} s passed") from exc
        if self._ended_unix_s == 0.0:
            raise Internal("the engine ended a run without an outcome")

    async def _drive_once(self, kv_from: RunId | None) -> bool:
        """One run of the engine; whether there is to be another one, from the hold that it became."""
        events = self._engine.generate(self._spec(kv_from))
        try:
            async for event in events:
                if isinstance(event, Held) and self._resting is not None:
                    if await self._rest(event):
                        return True
                    self._resting = None
                elif isinstance(event, Prefilled) and self._generated_tokens:
                    continue  # of a run that was paced
                self._take(event)
                if isinstance(event, Tokens):
                    await self._slow_down()
        finally:
            # Closing frees the engine's memory now; the garbage collector would do it some time.
            await events.aclose()  # type: ignore[attr-defined]
        return False

    async def _slow_down(self) -> None:
        """After a token: the engine is to make no more of them than the pace allows. One that it had begun still comes,
        and is waited for twice as long."""
        self._next_token_s = max(self._next_token_s, self._clock.monotonic_s()) + self._pace_s
        if self._pace_s and not self._pausing and self._resting is None:
            self._resting = asyncio.Event()
            try:
                await self._engine.pause(self.order.run_id)
            except NotFound:
                self._resting = None  # that was its last token

    async def _rest(self, held: Held) -> bool:
        """Until the next token is due; False if it stays a hold."""
        assert self._resting is not None
        due_s = self._next_token_s - self._clock.monotonic_s()
        if not self._pausing and due_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._resting.wait()
        if self._pausing:
            return False
        self._resting = None
        return held.kv_tokens < len(self._token_ids)

    def _spec(self, kv_from: RunId | None) -> RunSpec:
        order = self.order
        return RunSpec(
            run_id=order.run_id,
            token_ids=tuple(self._token_ids),
            prompt_tokens=order.prompt_tokens,
            sampling=order.sampling,
            salt=order.context.salt,
            priority=order.priority,
            kv_from=kv_from,
            prefill_only=order.prefill_only,
        )

    def _take(self, event: RunEvent) -> None:
        entry = self.entry
        match event:
            case Prefilled():
                self._cached_tokens = event.cached
                entry.kv_tokens = event.tokens
                entry.changed.beat()
            case Tokens():
                self._time_tokens(len(event.ids))
                self._generated_tokens += len(event.ids)
                self._token_ids += event.ids
                entry.names.extend(event.ids)
                entry.changed.beat()
            case Finished():
                self._ended_unix_s = self._clock.unix_s()
                self._counters.runs_finished += 1
                entry.kv_tokens = max(0, entry.names.known_tokens - 1)
                self._ledger.close(entry)
            case Held():
                self._ended_unix_s = self._clock.unix_s()
                self._counters.runs_held += 1
                self._ledger.hold(entry, event.kv_tokens, entry.names.prefix(event.kv_tokens))
        self._queue.put_nowait(event)

    def _time_tokens(self, n_tokens: int) -> None:
        """Count how long new tokens took; the first one of a run that goes on from KV tells of neither kind."""
        now_s = self._clock.monotonic_s()
        if self._generated_tokens:
            for _ in range(n_tokens):
                self._counters.inter_token.observe((now_s - self._last_s) / n_tokens)
        elif self._claimed is None:
            self._counters.ttft.observe(now_s - self._last_s)
        self._last_s = now_s

    async def _fail(self, error: MeshError) -> None:
        """The engine has freed the run; a hold that it was to continue goes too, whatever the engine did with it."""
        if self._ended_unix_s or self.entry.failed is not None:
            return  # it had its outcome before
        self.entry.failed = error
        self._ledger.close(self.entry)
        self._counters.run_failed(error)
        self._queue.put_nowait(error)
        if self._claimed is not None:
            await let_go(self._engine, self._claimed.run_id)
        if self._resting is not None:  # in the engine it is a hold, or about to be
            await let_go(self._engine, self.order.run_id)


async def let_go(engine: Engine, run_id: RunId) -> None:
    """Release it; an engine that is down has nothing to release, which must not hide why this is being done."""
    try:
        await engine.release(run_id)
    except MeshError as exc:
        log.warning("release_failed", run_id=run_id, reason=exc.reason, error=exc.message)
