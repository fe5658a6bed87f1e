"""What a plan runner owns (the current run, the current transfer, a kept hold) and how it starts and frees them.

The lower half of placement.entry.runner: it knows effects but no events. Invariants: at most one current run, one
current transfer and one kept hold; each is consumed, dropped or freed on every path out of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mesh import errors
from mesh.errors import MeshError, Retry
from mesh.node.engine import FinishReason, RunId
from mesh.node.port import KvReport
from placement.decide.moves import MoveWay, Tactic
from placement.decide.types import Candidate, PlanShape
from placement.entry.runner_types import (
    CancelMove,
    CloseRun,
    Effect,
    EmitMigration,
    Fail,
    Finish,
    KvSourceKind,
    MoveCause,
    MoveFailed,
    MoveKv,
    Release,
    RunnerSpec,
    StartRun,
    Usage,
)


class Phase(Enum):
    """States of the runner."""

    NEW = "new"  # nothing yet
    FETCHING = "fetching"  # a prefill and its KV transfer are under way (split, disaggregated); no run
    RUNNING = "running"  # a run makes tokens
    MOVING = "moving"  # a run makes tokens while its KV is shipped
    PAUSED = "paused"  # the source run became a hold; the transfer is not done
    LANDED = "landed"  # the transfer is done; the source's last tokens are not in
    REPLAYING = "replaying"  # a run makes tokens while the node it is to move to computes KV of them
    ARRIVING = "arriving"  # a run was started somewhere else; it has made no token yet
    ENDED = "ended"  # the outcome was given; late events may still need a release


@dataclass(frozen=True, slots=True)
class Way:
    """Where to start, and where to go on by KV: a split and a disaggregated way fetch KV from `first` to `then`, an
    offload moves on."""

    shape: PlanShape
    first: str
    then: str
    codec: str = ""  # of a split's KV; empty: the plan's
    own_tokens: int = 0  # of a split: computed at `then` itself meanwhile

    @classmethod
    def of(cls, candidate: Candidate) -> Way:
        nodes = candidate.prefill.node_id, candidate.decode.node_id
        return cls(candidate.shape, *nodes, candidate.codec, candidate.own_tokens)


@dataclass(slots=True)
class Run:
    """The current run; `tokens` were made by it."""

    node_id: str
    run_id: RunId
    kv_from: RunId | None
    tokens: int = 0

    @property
    def untaken_hold(self) -> RunId | None:
        """The hold it was to continue, if it may not have taken it yet."""
        return self.kv_from if self.tokens == 0 else None


@dataclass(slots=True)
class Transfer:
    """A transfer; `report` once it is done."""

    transfer_id: str
    kind: KvSourceKind
    source_node: str
    source_run: RunId
    target_node: str
    target_run: RunId
    cause: MoveCause
    report: KvReport | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the first token of the current run will tell; `transfer` is the one that brought its KV, if any;
    `replayed`: a move whose KV the target computed."""

    cause: MoveCause
    transfer: Transfer | None = None
    replayed: bool = False


class Legs:
    """See the module's docstring."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._phase = Phase.NEW
        self._generated: list[int] = list(spec.generated_ids)
        self._fallbacks = [Way.of(c) for c in spec.plan.fallbacks]
        self._failed: set[str] = set()  # nodes that failed this request
        self._run: Run | None = None
        self._transfer: Transfer | None = None
        self._arrival: Arrival | None = None
        self._kept: tuple[str, RunId] | None = None  # node and hold to go back to until the successor makes a token
        self._offload_to = ""  # planned move, due at the first token
        self._home = ""  # node of the last token
        self._pausable: set[RunId] = set()  # runs that a transfer was told to pause
        self._open_runs: dict[RunId, str] = {}  # runs without a last event, closed ones too, and their nodes
        self._open_transfers: dict[str, Transfer] = {}  # transfers without a last event, dropped ones too
        self._n_runs = self._n_transfers = 0
        self._cached_tokens = 0
        self._began_s = self._now_s = self._last_token_s = 0.0
        self._first_token_s: float | None = None
        self._effects: list[Effect] = []

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def node_id(self) -> str:
        """The node where the request is (that of its last token); empty before Begin."""
        return self._home

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens emitted so far."""
        return tuple(self._generated)

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=len(self._spec.prompt_ids),
            completion_tokens=len(self._generated),
            cached_tokens=min(self._cached_tokens, len(self._spec.prompt_ids)),
        )

    # Starting

    def _start(self, way: Way, cause: MoveCause | None) -> None:
        """Start a way with all tokens so far; `cause` is None for the plan's choice."""
        self._home = self._home or way.first
        self._offload_to = way.then if way.shape is PlanShape.OFFLOAD and way.then != way.first else ""
        token_ids = self._token_ids()
        if way.shape in (PlanShape.SPLIT, PlanShape.DISAGGREGATED) and way.then != way.first and len(token_ids) > 1:
            self._release_kept()
            # All but the last token: the target has to decode one, since logits do not travel.
            source = (way.first, self._next_run())
            shipped = way.codec or self._spec.plan.codec, way.own_tokens
            self._ship(KvSourceKind.PREFILL, source, way.then, cause or MoveCause.PLAN, token_ids[:-1], shipped)
            self._phase = Phase.FETCHING
            return
        node_id = way.first if way.shape is PlanShape.OFFLOAD else way.then
        kv_from = None
        if self._kept is not None and self._kept[0] == node_id:
            kv_from, self._kept = self._kept[1], None
        self._release_kept()
        self._run_at(node_id, kv_from, None if cause is None else Arrival(cause))

    def _run_at(self, node_id: str, kv_from: RunId | None, arrival: Arrival | None) -> None:
        """Start a run with all tokens so far, or finish if the run before it had made the last one."""
        self._arrival = arrival
        reason = self._reached_end()
        if reason is not None:
            if kv_from is not None:
                self._release(node_id, kv_from)
            self._finish(reason, None)
            return
        self._run = Run(node_id, self._next_run(), kv_from)
        self._open_runs[self._run.run_id] = node_id
        self._phase = Phase.RUNNING if arrival is None else Phase.ARRIVING
        self._do(StartRun(node_id=node_id, run_id=self._run.run_id, token_ids=self._token_ids(), kv_from=kv_from))

    def _reached_end(self) -> FinishReason | None:
        count = len(self._generated)
        if count and count >= self._spec.min_tokens and self._generated[-1] in self._spec.eos_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self._spec.max_tokens else None

    def _begin_move(self, target: str, cause: MoveCause, way: MoveWay | None = None) -> None:
        run = self._current_run()
        self._pausable.add(run.run_id)
        self._ship(KvSourceKind.RUNNING, (run.node_id, run.run_id), target, cause, self._token_ids(), way=way)
        self._phase = Phase.MOVING

    def _ship(
        self,
        kind: KvSourceKind,
        source: tuple[str, RunId],
        target: str,
        cause: MoveCause,
        token_ids: tuple[int, ...],
        shipped: tuple[str, int] | None = None,
        way: MoveWay | None = None,
    ) -> None:
        """`shipped`: codec, and how many tokens the target computes itself."""
        codec, own_tokens = shipped or (self._spec.plan.codec, 0)
        transfer_id = f"{self._spec.request_id}/kv{self._n_transfers}"
        self._n_transfers += 1
        transfer = Transfer(transfer_id, kind, *source, target, self._next_run(), cause)
        self._transfer = self._open_transfers[transfer_id] = transfer
        self._do(
            MoveKv(
                transfer_id=transfer_id,
                source_node_id=transfer.source_node,
                target_node_id=target,
                source=kind,
                source_run=transfer.source_run,
                target_run=transfer.target_run,
                token_ids=token_ids,
                max_tokens=len(self._spec.prompt_ids) + self._spec.max_tokens,
                codec=(way.codec if way is not None else "") or codec,
                own_tokens=own_tokens,
                stop_first=way is not None and way.tactic is Tactic.STOP_AND_COPY,
                pace_s=way.pace_s if way is not None else 0.0,
            )
        )

    def _arrive(self) -> None:
        """The current run made its first token: tell of the move, give up what was kept for a way back."""
        run, arrival = self._current_run(), self._arrival
        assert arrival is not None
        self._arrival, self._phase = None, Phase.RUNNING
        transfer = arrival.transfer
        if transfer is not None or run.node_id != self._home:
            report = transfer.report if transfer is not None else None
            self._do(
                EmitMigration(
                    from_node_id=self._home,
                    to_node_id=run.node_id,
                    offset_tokens=len(self._generated),
                    kv_wire_bytes=report.wire_bytes if report else 0,
                    kv_tokens=report.tokens if report else 0,
                    codec=report.codec if report else "",
                    cause=arrival.cause,
                    pause_s=self._now_s - self._last_token_s if self._generated else 0.0,
                    transfer_s=report.duration_s if report else 0.0,
                    own_tokens=report.own_tokens if report else 0,
                    recomputed=arrival.replayed or arrival.cause is MoveCause.FALLBACK,
                )
            )
        if arrival.replayed or (transfer is not None and transfer.kind is KvSourceKind.RUNNING):
            # The node that it left ran it well: the first to go back to, by replay, should the new one fail.
            self._fallbacks.insert(0, Way(PlanShape.CORE, self._home, self._home))
        self._home = run.node_id
        self._release_kept()

    def _fall_back(self, error: MeshError, *, made_tokens: bool) -> None:
        """Start the next fallback that needs no failed node, or fail with `error`."""
        if may_go_elsewhere(error, made_tokens=made_tokens):
            while self._fallbacks:
                way = self._fallbacks.pop(0)
                if not self._failed & {way.first, way.then}:
                    self._start(way, MoveCause.FALLBACK)
                    return
        self._fail(error)

    # Ending and freeing

    def _finish(self, reason: FinishReason, stop_string: str | None) -> None:
        self._free_everything(errors.StalePlan("the request finished before it had moved"))
        total_s = self._now_s - self._began_s
        ttft_s = total_s if self._first_token_s is None else self._first_token_s - self._began_s
        self._do(Finish(reason=reason, stop_string=stop_string, usage=self.usage, ttft_s=ttft_s, total_s=total_s))

    def _fail(self, error: MeshError) -> None:
        self._free_everything(error)
        self._do(Fail(error=error, usage=self.usage))

    def _free_everything(self, why: MeshError) -> None:
        run, self._run = self._run, None
        arrival, self._arrival = self._arrival, None
        if run is not None:
            self._do(CloseRun(node_id=run.node_id, run_id=run.run_id))
            if run.run_id in self._pausable:
                self._release(run.node_id, run.run_id)
            if run.untaken_hold is not None:
                self._release(run.node_id, run.untaken_hold)
        if arrival is not None and arrival.transfer is not None:
            self._tell_move_failed(arrival.transfer, why)
        if self._transfer is not None:
            self._drop_transfer(why)
        self._release_kept()
        self._phase = Phase.ENDED

    def _drop_transfer(self, why: MeshError) -> None:
        """Stop the current transfer; neither its target's nor its source's hold is needed any more."""
        transfer = self._current_transfer()
        if transfer.report is None:
            self._do(CancelMove(transfer_id=transfer.transfer_id))
        self._release(transfer.target_node, transfer.target_run)
        if self._phase in (Phase.FETCHING, Phase.PAUSED):
            self._release(transfer.source_node, transfer.source_run)
        self._transfer = None
        self._tell_move_failed(transfer, why)

    def _tell_move_failed(self, transfer: Transfer, error: MeshError) -> None:
        self._do(MoveFailed(target_node_id=transfer.target_node, cause=transfer.cause, error=error))

    def _release(self, node_id: str, run_id: RunId) -> None:
        self._do(Release(node_id=node_id, run_id=run_id))

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._release(*kept)

    # Small things

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _token_ids(self) -> tuple[int, ...]:
        return self._spec.prompt_ids + tuple(self._generated)

    def _next_run(self) -> RunId:
        self._n_runs += 1
        return RunId(f"{self._spec.request_id}/{self._n_runs - 1}")

    def _current_run(self) -> Run:
        assert self._run is not None
        return self._run

    def _current_transfer(self) -> Transfer:
        assert self._transfer is not None
        return self._transfer


def may_go_elsewhere(error: MeshError, *, made_tokens: bool) -> bool:
    """Whether another node may do better. A run that its node cancelled (we did not), and a node without room for
    a run that made no token there, are reasons to try elsewhere too."""
    if isinstance(error, errors.Cancelled):
        return True
    if error.retry is Retry.BACK_OFF:
        return not made_tokens
    return error.retry in (Retry.ELSEWHERE, Retry.RECOMPUTE, Retry.REPLAN)
