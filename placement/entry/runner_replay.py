"""Moves without KV: the target computes it from the tokens while the source goes on.

First the target prefills the tokens so far, as a hold; then it runs on from there with those that came meanwhile. The
source is closed only when the target has made a token. Until then what the source tells is kept aside: the client does
not see it, and should the target fail, it is as if nothing had happened.
"""

from __future__ import annotations

from mesh import errors
from mesh.errors import MeshError
from placement.entry.runner_legs import Arrival, Legs, Phase, Run
from placement.entry.runner_types import (
    CloseRun,
    Event,
    MoveCause,
    MoveFailed,
    MoveRequested,
    RunFailed,
    RunFinished,
    RunHeld,
    RunnerSpec,
    RunPrefilled,
    RunTokens,
    StartRun,
)

RunEvent = RunPrefilled | RunTokens | RunFinished | RunHeld | RunFailed


class Replays(Legs):
    """Owns `_replay`, the target's prefill, and `_shadow`, the source's run while the target starts."""

    def __init__(self, spec: RunnerSpec) -> None:
        super().__init__(spec)
        self._replay: Run | None = None
        self._replay_cause = MoveCause.OPERATOR
        self._shadow: Run | None = None
        self._aside: list[Event] = []  # what the shadow told

    def _begin_replay(self, event: MoveRequested) -> None:
        token_ids = self._token_ids()
        self._replay = Run(event.target_node_id, self._next_run(), None)
        self._replay_cause = event.cause
        self._open_runs[self._replay.run_id] = self._replay.node_id
        self._phase = Phase.REPLAYING
        # All but the last token, which the target decodes.
        prefill = token_ids[: max(1, len(token_ids) - 1)]
        self._do(
            StartRun(
                node_id=self._replay.node_id,
                run_id=self._replay.run_id,
                token_ids=prefill,
                kv_from=None,
                prefill_only=True,
            )
        )

    def _on_replay(self, event: RunEvent) -> None:
        """The target's prefill told something."""
        replay = self._replay
        assert replay is not None
        match event:
            case RunHeld() if self._reached_end() is not None:  # the source's last word is on its way
                self._end_leg_of(replay, event)
                self._give_up_replay(errors.StalePlan("the request finished before it had moved"))
            case RunHeld() if event.kv_tokens < len(self._token_ids()):
                self._replay = None
                self._end_leg_of(replay, event)
                self._shadow, self._run = self._run, None
                self._run_at(replay.node_id, replay.run_id, Arrival(self._replay_cause, replayed=True))
            case RunHeld():  # of one token, of which nothing is left to compute
                self._end_leg_of(replay, event)
                self._give_up_replay(errors.StalePlan("too little was there to move; ask again"))
            case RunFailed():  # if its stream broke, it may have become a hold of which nothing was heard
                self._give_up_replay(event.error)
            case RunFinished() | RunTokens():
                message = f"node {replay.node_id} ran what it was to prefill"
                self._give_up_replay(errors.Internal(message, node=replay.node_id))

    def _give_up_replay(self, error: MeshError) -> None:
        """The source goes on, as it did."""
        replay, self._replay = self._replay, None
        assert replay is not None
        self._do(CloseRun(node_id=replay.node_id, run_id=replay.run_id))
        self._release(replay.node_id, replay.run_id)
        self._phase = Phase.RUNNING
        self._do(MoveFailed(target_node_id=replay.node_id, cause=self._replay_cause, error=error))

    def _on_shadow(self, event: RunEvent) -> None:
        """The source told something while the target starts."""
        shadow = self._shadow
        assert shadow is not None
        match event:
            case RunTokens() | RunPrefilled():
                self._aside.append(event)
            case RunFinished():
                self._aside.append(event)
                self._back_to_shadow(errors.StalePlan("the request finished before it had moved"), close=True)
            case RunHeld():  # by itself; the target goes on, and needs it no more
                self._release(shadow.node_id, shadow.run_id)
                self._drop_shadow()
            case RunFailed():
                self._failed.add(shadow.node_id)
                self._drop_shadow()

    def _back_to_shadow(self, error: MeshError, *, close: bool) -> None:
        """The target failed, or is not needed: what the source told is told now. `close`: its run goes on."""
        run, shadow, arrival = self._run, self._shadow, self._arrival
        assert shadow is not None
        assert arrival is not None
        if run is not None:
            if close:
                self._do(CloseRun(node_id=run.node_id, run_id=run.run_id))
            if run.untaken_hold is not None:
                self._release(run.node_id, run.untaken_hold)
        target = run.node_id if run is not None else ""
        self._failed.add(target)
        self._arrival, self._shadow, self._run = None, None, shadow
        self._phase = Phase.RUNNING
        self._do(MoveFailed(target_node_id=target, cause=arrival.cause, error=error))
        aside, self._aside = self._aside, []
        for event in aside:
            self._dispatch(event)

    def _drop_shadow(self) -> None:
        self._shadow, self._aside = None, []

    def _close_shadow(self) -> None:
        """The target made a token, or nobody is needed any more."""
        if self._shadow is not None:
            self._do(CloseRun(node_id=self._shadow.node_id, run_id=self._shadow.run_id))
        self._drop_shadow()

    def _free_everything(self, why: MeshError) -> None:
        if self._replay is not None:
            self._give_up_replay(why)
        arrival = self._arrival
        if arrival is not None and arrival.replayed and self._run is not None:
            self._do(MoveFailed(target_node_id=self._run.node_id, cause=arrival.cause, error=why))
        self._close_shadow()
        super()._free_everything(why)

    def _end_leg_of(self, run: Run, event: RunHeld) -> None:
        raise NotImplementedError

    def _dispatch(self, event: Event) -> None:
        raise NotImplementedError
