"""The plan runner: carries one request along its plan, through moves and failures, to exactly one outcome.

A state machine without I/O, clock or randomness: `handle(event, now_s)` returns effects (see runner_types for
both and for what a driver owes it). It does not know ports, links, detokenising or policy; it never starts work
at a node that is not in its plan, that it was not told to move to, or that did not run the request before.

The table at the end says which event does what in which phase. Tokens count only from the current run, in order,
so none is lost or twice. A source's hold is given up only when its successor has made a token: a move that fails
late goes back to it. Events of runs and transfers that are not current any more are late, and at most free what
they left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mesh import errors
from mesh.errors import MeshError, Retry
from placement.decide.moves import Tactic
from placement.entry.runner_legs import Arrival, Phase, Run, Transfer, Way
from placement.entry.runner_replay import Replays, RunEvent
from placement.entry.runner_types import (
    Begin,
    Cancelled,
    DeadlineExpired,
    Effect,
    Emit,
    Event,
    KvFailed,
    KvMoved,
    KvSourceKind,
    LegDone,
    MoveCause,
    MoveFailed,
    MoveRequested,
    RunFailed,
    RunFinished,
    RunHeld,
    RunPrefilled,
    RunTokens,
)


class PlanRunner(Replays):
    """See the module's docstring. One request; not thread-safe; owned by one driver."""

    def handle(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take one event at monotonic time `now_s`; returns effects to execute in order.

        Raises Internal on an event that cannot come in this phase: a bug of the driver."""
        self._now_s = now_s
        self._effects = []
        if not self._is_late(event):
            self._dispatch(event)
        return tuple(self._effects)

    def _dispatch(self, event: Event) -> None:
        handler = _TABLE[self._phase].get(type(event))
        if handler is None:
            raise errors.Internal(f"{type(event).__name__} cannot come while {self._phase.value}")
        handler(self, event)

    def _is_late(self, event: Event) -> bool:
        """Whether the event is of a run or transfer that is not current; then does what is left to do for that."""
        match event:
            case RunPrefilled() | RunTokens() | RunFinished() | RunHeld() | RunFailed():
                node_id = self._open_runs.get(event.run_id)
                if node_id is None:
                    raise errors.Internal(f"{type(event).__name__} of a run that ended or never was: {event.run_id}")
                if isinstance(event, (RunFinished, RunHeld, RunFailed)):
                    del self._open_runs[event.run_id]
                if self._run is not None and self._run.run_id == event.run_id:
                    return False
                if self._is_beside(event):
                    return True
                if isinstance(event, RunHeld):
                    self._release(node_id, event.run_id)
                return True
            case KvMoved() | KvFailed():
                transfer = self._open_transfers.pop(event.transfer_id, None)
                if transfer is None:
                    raise errors.Internal(f"{type(event).__name__} of an unknown transfer: {event.transfer_id}")
                if transfer is self._transfer:
                    return False
                if isinstance(event, KvMoved):
                    self._release(transfer.target_node, transfer.target_run)
                self._release(transfer.source_node, transfer.source_run)
                return True
        return False

    def _is_beside(self, event: RunEvent) -> bool:
        """Whether it is of one of a replay's runs, which are beside the current one; then takes it."""
        if self._replay is not None and self._replay.run_id == event.run_id:
            self._on_replay(event)
        elif self._shadow is not None and self._shadow.run_id == event.run_id:
            self._on_shadow(event)
        else:
            return False
        return True

    # The current run

    def _on_begin(self, _: Begin) -> None:
        self._began_s = self._now_s
        ended = self._reached_end() if self._generated else None
        if ended is not None:  # its last token had come when its entry was lost
            self._finish(ended, None)
            return
        self._start(Way.of(self._spec.plan.choice), cause=None)

    def _on_prefilled(self, event: RunPrefilled) -> None:
        # A hold is not a cache hit, and what a later leg finds cached saved the caller nothing.
        if not self._generated and self._current_run().kv_from is None:
            self._cached_tokens = event.cached_tokens

    def _on_tokens(self, event: RunTokens) -> None:
        if not event.ids:
            return
        if self._phase is Phase.ARRIVING:
            self._arrive()
            self._close_shadow()
        run, offset = self._current_run(), len(self._generated)
        self._do(Emit(offset_tokens=offset, ids=event.ids, logprobs=event.logprobs, node_id=run.node_id))
        run.tokens += len(event.ids)
        self._generated.extend(event.ids)
        self._last_token_s = self._now_s
        if self._first_token_s is None:
            self._first_token_s = self._now_s
        target, self._offload_to = self._offload_to, ""
        if target and self._reached_end() is None:
            self._begin_move(target, MoveCause.PLAN)

    def _on_finished(self, event: RunFinished) -> None:
        if self._phase is Phase.ARRIVING:
            self._arrive()
            self._close_shadow()
        run = self._current_run()
        self._run = None
        self._do(LegDone(node_id=run.node_id, run_id=run.run_id, record=event.leg))
        self._finish(event.reason, event.stop_string)

    def _on_held(self, event: RunHeld) -> None:
        """Paused without a transfer under way: by one that failed meanwhile, or by the node itself. Resume."""
        run = self._current_run()
        if run.tokens == 0 and run.run_id not in self._pausable:  # resuming that could go on for ever
            self._release(run.node_id, run.run_id)
            message = f"node {run.node_id} paused a run that nobody moves"
            self._on_failed(RunFailed(run_id=run.run_id, error=errors.StalePlan(message, node=run.node_id)))
            return
        self._end_leg(event)
        self._run_at(run.node_id, run.run_id, None)

    def _on_paused(self, event: RunHeld) -> None:
        self._end_leg(event)
        self._phase = Phase.PAUSED

    def _on_paused_last(self, event: RunHeld) -> None:
        """The source's last tokens are in, after the KV had landed."""
        self._kept = (self._current_run().node_id, event.run_id)
        self._end_leg(event)
        self._switch()

    def _end_leg(self, event: RunHeld) -> None:
        run = self._current_run()
        self._run = None
        self._end_leg_of(run, event)

    def _end_leg_of(self, run: Run, event: RunHeld) -> None:
        self._do(LegDone(node_id=run.node_id, run_id=run.run_id, record=event.leg))

    def _on_failed(self, event: RunFailed) -> None:
        if self._shadow is not None:  # the target of a replay: the source has gone on
            self._back_to_shadow(event.error, close=False)
            return
        run, error = self._current_run(), event.error
        self._run = None
        if run.untaken_hold is not None:
            self._release(run.node_id, run.untaken_hold)
        if run.run_id in self._pausable:  # it may be a hold, of which nothing was heard
            self._release(run.node_id, run.run_id)
        arrival, self._arrival = self._arrival, None
        if arrival is not None and arrival.replayed:
            self._do(MoveFailed(target_node_id=run.node_id, cause=arrival.cause, error=error))
        if arrival is not None and arrival.transfer is not None:
            self._tell_move_failed(arrival.transfer, error)
            if arrival.transfer.kind is KvSourceKind.RUNNING and self._kept is not None:
                self._failed.add(run.node_id)
                kept, self._kept = self._kept, None
                self._run_at(*kept, None)
                return
        kv_lost = isinstance(error, errors.NotFound) or error.retry is Retry.RECOMPUTE
        if run.untaken_hold is not None and kv_lost:
            self._run_at(run.node_id, None, Arrival(MoveCause.FALLBACK))
            return
        self._failed.add(run.node_id)
        self._fall_back(error, made_tokens=run.tokens > 0)

    def _on_source_failed(self, event: RunFailed) -> None:
        """The source of a move is gone. What it had shipped helps only if all tokens that it is of came."""
        run, transfer = self._current_run(), self._current_transfer()
        if transfer.report is not None and transfer.report.tokens < len(self._token_ids()):
            self._run = None
            self._failed.add(run.node_id)
            self._release(run.node_id, run.run_id)
            self._switch()
            return
        self._drop_transfer(event.error)
        self._on_failed(event)

    def _on_replay_source_gone(self, event: RunHeld | RunFailed) -> None:
        """The source ended while the target prefills: its request goes on without the move, elsewhere if need be."""
        self._give_up_replay(errors.StalePlan("the run that was to move ended"))
        self._dispatch(event)

    # The current transfer

    def _on_landed(self, event: KvMoved) -> None:
        """Done before the running source's last tokens came."""
        self._current_transfer().report = event.report
        self._phase = Phase.LANDED

    def _on_moved(self, event: KvMoved) -> None:
        """Done, and the source stands still."""
        transfer = self._current_transfer()
        transfer.report = event.report
        self._kept = (transfer.source_node, transfer.source_run)
        if event.report.leg is not None:
            self._do(LegDone(node_id=transfer.source_node, run_id=transfer.source_run, record=event.report.leg))
        if transfer.kind is KvSourceKind.PREFILL and not self._generated:
            self._cached_tokens = event.report.skipped_tokens
        self._switch()

    def _switch(self) -> None:
        """Go on at the target of the transfer, which is done."""
        transfer = self._current_transfer()
        assert transfer.report is not None
        if transfer.report.tokens >= len(self._token_ids()):
            self._release(transfer.target_node, transfer.target_run)
            message = f"{transfer.target_node} has KV of {transfer.report.tokens} positions, more than tokens came"
            self._give_up_transfer(errors.KvIncompatible(message, node=transfer.target_node))
            return
        self._transfer = None
        self._run_at(transfer.target_node, transfer.target_run, Arrival(transfer.cause, transfer))

    def _on_transfer_failed(self, event: KvFailed) -> None:
        # The target may have it all: if its last word was lost, only it knows.
        transfer = self._current_transfer()
        self._release(transfer.target_node, transfer.target_run)
        self._give_up_transfer(event.error)

    def _give_up_transfer(self, error: MeshError) -> None:
        """The current transfer failed, or what it brought is of no use."""
        transfer = self._current_transfer()
        self._transfer = self._kept = None
        self._tell_move_failed(transfer, error)
        if transfer.kind is KvSourceKind.PREFILL:
            self._without_prefill(transfer, error)
        elif self._run is not None:
            self._phase = Phase.RUNNING  # it goes on; if it was paused already, RunHeld comes and it is resumed
        else:
            self._run_at(transfer.source_node, transfer.source_run, None)

    def _without_prefill(self, transfer: Transfer, error: MeshError) -> None:
        self._release(transfer.source_node, transfer.source_run)
        if error.retry is Retry.RECOMPUTE:
            self._run_at(transfer.target_node, None, Arrival(MoveCause.FALLBACK))
            return
        culprit = error.details.get("node", "")
        if culprit in (transfer.source_node, transfer.target_node):
            self._failed.add(culprit)
        self._fall_back(error, made_tokens=False)

    # Requests from outside

    def _on_move_requested(self, event: MoveRequested) -> None:
        if event.target_node_id == self._current_run().node_id:
            message = f"the request runs at {event.target_node_id} already"
            self._refuse_move(event, errors.InvalidRequest(message, field="node_id"))
            return
        self._offload_to = ""
        if event.way is not None and event.way.tactic is Tactic.REPLAY:
            self._begin_replay(event)
        else:
            self._begin_move(event.target_node_id, event.cause, event.way)

    def _on_move_too_soon(self, event: MoveRequested) -> None:
        self._refuse_move(event, errors.StalePlan("the request is on its way between nodes; ask again"))

    def _on_move_too_late(self, event: MoveRequested) -> None:
        self._refuse_move(event, errors.NotFound("the request has ended"))

    def _refuse_move(self, event: MoveRequested, error: MeshError) -> None:
        self._do(MoveFailed(target_node_id=event.target_node_id, cause=event.cause, error=error))

    def _on_cancelled(self, _: Cancelled) -> None:
        self._fail(errors.Cancelled("the request was cancelled"))

    def _on_expired(self, _: DeadlineExpired) -> None:
        self._fail(errors.Expired("the request's deadline passed"))

    def _ignore(self, _: Event) -> None:
        """The outcome was given."""


# A handler takes the event type of its row; the table as a whole cannot say so.
_Handler = Callable[[PlanRunner, Any], None]
_Row = Mapping[type[Event], _Handler]

_STOP: _Row = {Cancelled: PlanRunner._on_cancelled, DeadlineExpired: PlanRunner._on_expired}
_ON_THE_WAY: _Row = {**_STOP, MoveRequested: PlanRunner._on_move_too_soon}
_PROGRESS: _Row = {
    RunPrefilled: PlanRunner._on_prefilled,
    RunTokens: PlanRunner._on_tokens,
    RunFinished: PlanRunner._on_finished,
}
_TRANSFER: _Row = {KvMoved: PlanRunner._on_moved, KvFailed: PlanRunner._on_transfer_failed}

_TABLE: Mapping[Phase, _Row] = {
    Phase.NEW: {**_ON_THE_WAY, Begin: PlanRunner._on_begin},
    Phase.FETCHING: {**_ON_THE_WAY, **_TRANSFER},
    Phase.RUNNING: {
        **_STOP,
        **_PROGRESS,
        RunHeld: PlanRunner._on_held,
        RunFailed: PlanRunner._on_failed,
        MoveRequested: PlanRunner._on_move_requested,
    },
    Phase.MOVING: {
        **_ON_THE_WAY,
        **_PROGRESS,
        RunHeld: PlanRunner._on_paused,
        RunFailed: PlanRunner._on_source_failed,
        KvMoved: PlanRunner._on_landed,
        KvFailed: PlanRunner._on_transfer_failed,
    },
    Phase.PAUSED: {**_ON_THE_WAY, **_TRANSFER},
    Phase.LANDED: {
        **_ON_THE_WAY,
        **_PROGRESS,
        RunHeld: PlanRunner._on_paused_last,
        RunFailed: PlanRunner._on_source_failed,
    },
    Phase.REPLAYING: {
        **_ON_THE_WAY,
        **_PROGRESS,
        RunHeld: PlanRunner._on_replay_source_gone,
        RunFailed: PlanRunner._on_replay_source_gone,
    },
    Phase.ARRIVING: {
        **_ON_THE_WAY,
        **_PROGRESS,
        RunHeld: PlanRunner._on_held,
        RunFailed: PlanRunner._on_failed,
    },
    Phase.ENDED: {
        Cancelled: PlanRunner._ignore,
        DeadlineExpired: PlanRunner._ignore,
        MoveRequested: PlanRunner._on_move_too_late,
    },
}
