"""Who is where: waiting and running runs, holds, and the events they have to tell. A state machine without a model.

    submit -> waiting -> running -> finished (KV kept as a prefix)
                 ^          |-----> held     (pause, end of a prefill_only run)
                 '- preempt-'-----> failed   (KV dropped)
    held -> consumed by a run that names it, or released

Commands raise errors of mesh.errors and then have changed nothing. Names of runs and holds are one name space.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from edge_node.engine.kv_store import KvStore, Sequence
from edge_node.engine.run import Hold, NewTextStream, Run, StopScan
from mesh.errors import AlreadyExists, Cancelled, InvalidRequest, MeshError, NotFound, Overloaded
from mesh.node.engine import Finished, FinishReason, Held, RunEvent, RunId, RunSpec

KeyedEvent = tuple[int, RunEvent | MeshError]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Sizes; see EdgeEngineSettings for each."""

    capacity_tokens: int
    max_context_tokens: int
    max_running: int
    max_sequences: int
    max_step_tokens: int
    max_waiting: int
    max_stall_s: float


class RunBook:
    """Runs, holds and events. The engine core moves runs from waiting to running and back."""

    def __init__(
        self, store: KvStore, limits: CoreLimits, *, eos_token_ids: frozenset[int], new_stream: NewTextStream
    ) -> None:
        self.waiting: list[Run] = []  # in order of (priority, arrival)
        self.running: list[Run] = []
        self.holds: dict[RunId, Hold] = {}
        self.eos_token_ids = eos_token_ids
        self._store = store
        self._limits = limits
        self._new_stream = new_stream
        self._runs: dict[RunId, Run] = {}
        self._events: list[KeyedEvent] = []
        self._arrivals = 0

    # --- commands -------------------------------------------------------------------------------------------------

    def submit(self, key: int, spec: RunSpec) -> None:
        """Queue a run. Errors as in mesh.node.engine.Engine.generate."""
        limits, n_tokens = self._limits, len(spec.token_ids)
        if spec.run_id != spec.kv_from or spec.run_id in self._runs:
            self.check_free(spec.run_id)
        if n_tokens > min(limits.max_context_tokens, limits.capacity_tokens):
            raise Overloaded(f"{n_tokens} tokens can never fit a context of {limits.max_context_tokens}")
        if len(self._runs) >= limits.max_running + limits.max_waiting:
            raise Overloaded(f"{len(self._runs)} runs are running or waiting, which is all this engine takes")
        hold = None if spec.kv_from is None else self._matching_hold(spec.kv_from, spec)
        self._arrivals += 1
        run = Run(key, spec, self._arrivals, list(spec.token_ids))
        if spec.sampling.stop:
            run.stops = StopScan(spec, self._new_stream)
        if hold is not None and spec.kv_from is not None:
            del self.holds[spec.kv_from]
            self._adopt(run, hold.sequence)
        self._runs[spec.run_id] = run
        over = None if spec.prefill_only else run.finish_reason(self.eos_token_ids, limits.max_context_tokens)
        if over is not None:
            self.finish(run, *over)
        else:
            bisect.insort(self.waiting, run, key=lambda r: r.order)

    def cancel(self, key: int) -> None:
        """Forget a run without an event, if it is still there. What it computed is kept as a prefix."""
        run = next((r for r in self._runs.values() if r.key == key), None)
        if run is not None:
            self._leave(run)
            self._keep(run.sequence)

    def pause(self, run_id: RunId) -> None:
        """Make a run a hold. Raises NotFound."""
        run = self._runs.get(run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id!r}", run=run_id)
        self.hold(run)

    def release(self, run_id: RunId) -> None:
        """Free a hold or cancel a run. Idempotent. An import that no run took over leaves nothing behind."""
        if (run := self._runs.get(run_id)) is not None:
            self._leave(run)
            self._keep(run.sequence)
            self._events.append((run.key, Cancelled(f"run {run_id!r} was released", run=run_id)))
        elif (hold := self.holds.pop(run_id, None)) is not None:
            if hold.max_tokens is None:
                self._keep(hold.sequence)
            elif hold.sequence is not None:
                self._store.drop(hold.sequence)

    def check_free(self, run_id: RunId) -> None:
        """Raise AlreadyExists if a run or hold has this name."""
        if run_id in self._runs or run_id in self.holds:
            raise AlreadyExists(f"run {run_id!r} exists", run=run_id)

    def sequence(self, run_id: RunId) -> Sequence | None:
        """KV of a run or hold; None if it has none yet. Raises NotFound."""
        if (run := self._runs.get(run_id)) is not None:
            return run.sequence
        if (hold := self.holds.get(run_id)) is not None:
            return hold.sequence
        raise NotFound(f"there is no run or hold {run_id!r}", run=run_id)

    def take_events(self) -> list[KeyedEvent]:
        """Events since the last call, in order. A MeshError, a Finished or a Held is the last of its key."""
        events, self._events = self._events, []
        return events

    # --- what the core reports ------------------------------------------------------------------------------------

    def tell(self, run: Run, event: RunEvent) -> None:
        """Queue an event that does not end the run."""
        self._events.append((run.key, event))

    def admit(self, run: Run) -> None:
        """From waiting to running."""
        self.waiting.remove(run)
        self.running.append(run)

    def preempt(self, run: Run) -> None:
        """Back to waiting, at its old place, without KV."""
        self.running.remove(run)
        self.forget_kv(run)
        bisect.insort(self.waiting, run, key=lambda r: r.order)

    def forget_kv(self, run: Run) -> None:
        """Drop what a run has computed; it will be computed again."""
        if run.sequence is not None:
            self._store.drop(run.sequence)
            run.sequence = None

    def finish(self, run: Run, reason: FinishReason, stop_string: str | None) -> None:
        """The run ended by itself; its KV is kept as a prefix."""
        self._leave(run)
        self._keep(run.sequence)
        self._events.append((run.key, Finished(reason, stop_string)))

    def hold(self, run: Run) -> None:
        """The run becomes a hold of its name."""
        self._leave(run)
        self.holds[run.spec.run_id] = Hold(run.sequence, run.spec.salt)
        self._events.append((run.key, Held(run.computed)))

    def fail(self, run: Run, error: MeshError) -> None:
        """The run ends with an error; its KV is dropped, since it may be what is wrong."""
        self._leave(run)
        self.forget_kv(run)
        self._events.append((run.key, error))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _matching_hold(self, run_id: RunId, spec: RunSpec) -> Hold:
        hold = self.holds.get(run_id)
        if hold is None:
            raise NotFound(f"there is no hold {run_id!r} to continue", run=run_id)
        if hold.sequence is not None and hold.sequence.first:
            raise InvalidRequest(f"hold {run_id!r} has no head yet", field="kv_from")
        known = hold.sequence.token_ids[: hold.sequence.known] if hold.sequence is not None else []
        n = min(len(known), len(spec.token_ids))
        if hold.salt != spec.salt or tuple(known[:n]) != spec.token_ids[:n]:
            raise InvalidRequest(f"hold {run_id!r} has KV of other tokens or of another namespace", field="kv_from")
        return hold

    def _adopt(self, run: Run, sequence: Sequence | None) -> None:
        run.sequence = sequence
        if sequence is not None:
            sequence.token_ids = run.tokens
            sequence.reserved = 0
            self._store.cut(sequence, run.shareable)

    def _leave(self, run: Run) -> None:
        del self._runs[run.spec.run_id]
        for place in (self.running, self.waiting):
            if run in place:
                place.remove(run)

    def _keep(self, sequence: Sequence | None) -> None:
        if sequence is not None:
            self._store.keep(sequence)
