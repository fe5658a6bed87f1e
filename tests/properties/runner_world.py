"""A tiny simulated world for the plan runner: nodes that run, hold, ship KV, die and come back, in any interleaving.

It obeys what mesh.node.port promises and nothing more. The token at position p is p itself, so that a lost or
doubled token shows at once. Each step does one thing that could happen next, drawn by `rng`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from mesh import errors
from mesh.errors import MeshError
from mesh.node.engine import FinishReason, RunId
from placement.decide.moves import MoveWay, Tactic
from placement.entry.runner import PlanRunner
from placement.entry.runner_legs import Phase
from placement.entry.runner_types import (
    Begin,
    Cancelled,
    CancelMove,
    CloseRun,
    DeadlineExpired,
    Effect,
    Emit,
    EmitMigration,
    Event,
    Fail,
    Finish,
    KvFailed,
    KvMoved,
    KvSourceKind,
    LegDone,
    MoveCause,
    MoveFailed,
    MoveKv,
    MoveRequested,
    Release,
    RunFailed,
    RunFinished,
    RunHeld,
    RunnerSpec,
    RunPrefilled,
    RunTokens,
    StartRun,
)
from tests.placement.entry.plans import LEG, report

RUN_ERRORS = (
    errors.NodeUnreachable("gone"), errors.Overloaded("full"), errors.LeaseLost("lost"), errors.Cancelled("closed"),
    errors.NotFound("no such hold"), errors.PayloadCorrupt("digest"), errors.Internal("bug"),
)  # fmt: skip
KV_ERRORS = (
    errors.NodeUnreachable("gone"), errors.KvIncompatible("layout"), errors.PayloadCorrupt("digest"),
    errors.PolicyDenied("no"),
)  # fmt: skip
WAYS_TO_MOVE = (None, *(MoveWay(tactic=tactic, codec="f16") for tactic in Tactic))


@dataclass
class SimRun:
    node: str
    run_id: RunId
    length: int  # tokens it has, prompt included
    kv_from: RunId | None
    prefill_only: bool = False
    started: bool = False  # the order has reached the node
    prefilled: bool = False


@dataclass
class SimTransfer:
    effect: MoveKv
    step: int = 0


@dataclass
class World:
    spec: RunnerSpec
    rng: random.Random
    end: int  # position where a run finishes by itself
    faults: int = 6
    moves: int = 3
    stops: bool = False  # whether the client may go away or the deadline pass
    up: dict[str, bool] = field(default_factory=dict)
    runs: dict[RunId, SimRun] = field(default_factory=dict)  # at the nodes
    holds: dict[RunId, tuple[str, int]] = field(default_factory=dict)  # run id -> node, KV tokens
    streams: dict[RunId, deque[Event]] = field(default_factory=dict)  # on the way to the entry
    transfers: dict[str, SimTransfer] = field(default_factory=dict)
    arrived: list[Event] = field(default_factory=list)  # ends of transfers on the way
    effects: list[Effect] = field(default_factory=list)
    requested: int = 0
    nodes_used: set[str] = field(default_factory=set)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.runner = PlanRunner(self.spec)

    @property
    def ended(self) -> bool:
        return any(isinstance(e, Finish | Fail) for e in self.effects)

    # The driver

    def feed(self, event: Event) -> None:
        self.now_s += self.rng.random()
        for effect in self.runner.handle(event, self.now_s):
            self.effects.append(effect)
            self._execute(effect)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case StartRun():
                self._start(effect)
            case MoveKv():
                assert effect.source_node_id != effect.target_node_id
                self.nodes_used |= {effect.source_node_id, effect.target_node_id}
                self.transfers[effect.transfer_id] = SimTransfer(effect)
            case CloseRun(run_id=run_id):
                self._close(run_id)
                if self.rng.random() < 0.5:  # what was on the way may or may not still be delivered
                    self.streams.pop(run_id, None)
            case CancelMove(transfer_id=transfer_id):
                self._cancel(transfer_id)
            case Release(node_id=node_id, run_id=run_id):
                if run_id in self.holds:
                    assert self.holds[run_id][0] == node_id
                    del self.holds[run_id]
                self.runs.pop(run_id, None)
            case Emit() | EmitMigration() | MoveFailed() | LegDone() | Finish() | Fail():
                pass

    def _start(self, effect: StartRun) -> None:
        expected = tuple(range(len(effect.token_ids)))
        assert effect.token_ids == expected, "tokens were lost or doubled"
        assert effect.run_id not in self.streams, "a run id was used twice"
        self.nodes_used.add(effect.node_id)
        stream = self.streams[effect.run_id] = deque()
        if not self.up.get(effect.node_id, True):
            stream.append(RunFailed(run_id=effect.run_id, error=errors.NodeUnreachable("down", node=effect.node_id)))
            return
        self.runs[effect.run_id] = SimRun(
            effect.node_id, effect.run_id, len(effect.token_ids), effect.kv_from, effect.prefill_only
        )

    def _close(self, run_id: RunId) -> None:
        """Cancel a run; a transfer may have paused it at the same moment, which nobody tells any more."""
        shipping = any(t.effect.source_run == run_id and t.step == 1 for t in self.transfers.values())
        if run_id in self.runs and self.runs[run_id].started and shipping and self.rng.random() < 0.5:
            self._pause(run_id)
        self.runs.pop(run_id, None)

    def _cancel(self, transfer_id: str) -> None:
        """Cancel a transfer; it may have been done at the same moment, which nobody tells any more."""
        transfer = self.transfers.pop(transfer_id, None)
        if transfer is not None and transfer.effect.source_run in self.holds and self.rng.random() < 0.5:
            kv_tokens = self.holds[transfer.effect.source_run][1]
            if self.up.get(transfer.effect.target_node_id, True):
                self.holds[transfer.effect.target_run] = (transfer.effect.target_node_id, kv_tokens)

    # What may happen next

    def step(self) -> bool:
        """One thing that could happen next; False if nothing can."""
        choices = [(self._deliver, run_id) for run_id, queue in self.streams.items() if queue]
        choices += [(self._deliver_kv, event) for event in self.arrived]  # type: ignore[misc]
        choices += [(self._advance_run, run_id) for run_id in self.runs]
        choices += [(self._advance_kv, transfer_id) for transfer_id in self.transfers]  # type: ignore[misc]
        if not choices:
            return False
        if not self.ended:
            delicate = self.transfers or self.arrived or self.runner.phase is Phase.ARRIVING
            if self.faults and self.rng.random() < (0.25 if delicate else 0.05):
                self.faults -= 1
                self._fault()
                return True
            if self.moves and self.rng.random() < 0.2:
                self.moves -= 1
                self.requested += 1
                target = self.rng.choice(sorted(self.nodes_known()))
                self.nodes_used.add(target)
                self.feed(
                    MoveRequested(target_node_id=target, cause=MoveCause.OPERATOR, way=self.rng.choice(WAYS_TO_MOVE))
                )
                return True
            if self.stops and self.rng.random() < (0.1 if delicate else 0.02):
                self.feed(self.rng.choice([Cancelled(), DeadlineExpired()]))
                return True
        action, what = self.rng.choice(choices)
        action(what)
        return True

    def nodes_known(self) -> set[str]:
        ways = (self.spec.plan.choice, *self.spec.plan.fallbacks)
        return {p.node_id for w in ways for p in (w.prefill, w.decode)} | {"core-9"}

    def _deliver(self, run_id: RunId) -> None:
        self.feed(self.streams[run_id].popleft())

    def _deliver_kv(self, event: Event) -> None:
        self.arrived.remove(event)
        self.feed(event)

    def _advance_run(self, run_id: RunId) -> None:
        run, stream = self.runs[run_id], self.streams[run_id]
        if not run.started:
            run.started = True
            if run.kv_from is not None:
                node, kv_tokens = self.holds.pop(run.kv_from, ("", 0))
                if node != run.node:
                    del self.runs[run_id]
                    stream.append(RunFailed(run_id=run_id, error=errors.NotFound("no such hold")))
                assert kv_tokens < run.length, "a hold reaches beyond the tokens"
        elif not run.prefilled:
            run.prefilled = True
            stream.append(RunPrefilled(run_id=run_id, tokens=run.length, cached_tokens=1))
        elif run.prefill_only:
            del self.runs[run_id]
            self.holds[run_id] = (run.node, run.length)
            stream.append(RunHeld(run_id=run_id, kv_tokens=run.length, leg=LEG))
        elif run.length >= self.end:
            del self.runs[run_id]
            stream.append(RunFinished(run_id=run_id, reason=FinishReason.LENGTH, stop_string=None, leg=LEG))
        else:
            count = min(self.rng.randint(1, 2), self.end - run.length)
            stream.append(RunTokens(run_id=run_id, ids=tuple(range(run.length, run.length + count))))
            run.length += count

    def _pause(self, run_id: RunId) -> None:
        run = self.runs.pop(run_id)
        kv_tokens = run.length - 1 if run.prefilled else self.rng.randrange(run.length)
        self.holds[run_id] = (run.node, kv_tokens)
        self.streams[run_id].append(RunHeld(run_id=run_id, kv_tokens=kv_tokens, leg=LEG))

    def _advance_kv(self, transfer_id: str) -> None:
        transfer = self.transfers[transfer_id]
        effect = transfer.effect
        if not (self.up.get(effect.source_node_id, True) and self.up.get(effect.target_node_id, True)):
            self._end_kv(transfer_id, errors.NodeUnreachable("down"))
            return
        transfer.step += 1
        if transfer.step == 1 and effect.source is KvSourceKind.PREFILL:
            self.holds[effect.source_run] = (effect.source_node_id, len(effect.token_ids))
        if transfer.step == 2 and effect.source is KvSourceKind.RUNNING:
            if (
                effect.source_run not in self.runs or not self.runs[effect.source_run].started
            ):  # it finished, failed, or its node came back empty
                self._end_kv(transfer_id, errors.NotFound("no such run"))
                return
            self._pause(effect.source_run)
        if transfer.step == 3:
            if effect.source_run not in self.holds:
                self._end_kv(transfer_id, errors.NotFound("no such hold"))
                return
            self._end_kv(transfer_id, None)

    def _end_kv(self, transfer_id: str, error: MeshError | None) -> None:
        effect = self.transfers.pop(transfer_id).effect
        if error is not None:
            self.arrived.append(KvFailed(transfer_id=transfer_id, error=error))
            return
        kv_tokens = self.holds[effect.source_run][1]
        self.holds[effect.target_run] = (effect.target_node_id, kv_tokens)
        self.arrived.append(KvMoved(transfer_id=transfer_id, report=report(kv_tokens, transfer_id)))

    def _fault(self) -> None:
        kind = self.rng.choice(["kill", "revive", "run", "link", "kv"])
        if kind in ("kill", "revive"):
            self._flip(self.rng.choice(sorted(self.nodes_known())), up=kind == "revive")
        elif kind == "run" and self.runs:  # the run fails at its node, which frees its memory
            run_id = self.rng.choice(sorted(self.runs))
            del self.runs[run_id]
            self.streams[run_id].append(RunFailed(run_id=run_id, error=self.rng.choice(RUN_ERRORS)))
        elif kind == "link":  # the stream breaks; the node cancels the run, but keeps what had become a hold
            open_streams = sorted(r for r, q in self.streams.items() if r in self.runs or q)
            if open_streams:
                run_id = self.rng.choice(open_streams)
                self.runs.pop(run_id, None)
                kept = list(self.streams[run_id])[: self.rng.randint(0, len(self.streams[run_id]))]
                if not any(isinstance(e, RunHeld | RunFinished | RunFailed) for e in kept):
                    kept.append(RunFailed(run_id=run_id, error=errors.NodeUnreachable("stream broke")))
                self.streams[run_id] = deque(kept)
        elif kind == "kv" and self.transfers:
            self._end_kv(self.rng.choice(sorted(self.transfers)), self.rng.choice(KV_ERRORS))

    def _flip(self, node: str, *, up: bool) -> None:
        self.up[node] = up
        if up:
            return
        for run_id in [r for r, run in self.runs.items() if run.node == node]:
            del self.runs[run_id]
            self.streams[run_id].append(RunFailed(run_id=run_id, error=errors.NodeUnreachable("died", node=node)))
        for run_id in [r for r, (at, _) in self.holds.items() if at == node]:
            del self.holds[run_id]

    def play(self) -> None:
        """From Begin until nothing can happen any more."""
        if self.stops and self.rng.random() < 0.1:
            self.feed(Cancelled())
            return
        self.feed(Begin())
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("it never ends")
