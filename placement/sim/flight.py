"""One request in virtual time: the real plan runner, driven over modelled nodes and links.

What placement.entry.driver is with asyncio and gRPC, this is with simpy: it executes the runner's effects, and tells
it what happens. Tokens are told in two pieces, the first and the rest, since nothing depends on those between. A
prompt is one token to the runner; how many it stands for is the request's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import simpy

from mesh.errors import MeshError, NodeUnreachable
from mesh.identity.signing import SignedRecord
from mesh.node.engine import FinishReason, RunId
from mesh.node.port import KvReport
from placement.decide.settings import DEFAULTS
from placement.decide.types import Plan
from placement.entry import runner_types as rt
from placement.entry.runner import PlanRunner
from placement.sim.job import Job
from placement.sim.net import Net
from placement.sim.node import SimNode
from placement.sim.routers import Router
from placement.sim.traces import TraceRequest

_LEG = SignedRecord(body=b"", signature=b"", certificate=b"")
_LOST_RUN_S = 0.001


class Outcome(Enum):
    """How a request ended; each ends in exactly one. REFUSED: no plan. FAILED: no node finished it."""

    WITHIN_SLO = "within_slo"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of a request. Times in seconds from its arrival; 0 where there are none."""

    request: TraceRequest
    outcome: Outcome
    node_id: str = ""  # of its last token
    shape: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    fallbacks: int = 0
    predicted_ttft_s: float = 0.0
    reason: str = ""


class World(Protocol):
    """What a flight needs of its simulation."""

    env: simpy.Environment
    net: Net

    def node(self, node_id: str) -> SimNode: ...

    def site_of(self, node_id: str) -> str: ...

    def detect_s(self) -> float:
        """After how long a silent link counts as broken."""
        ...


@dataclass(slots=True)
class _Leg:
    """A run at a node. `dead`: nothing that it says is heard any more."""

    job: Job
    node_id: str
    told: int = 0
    dead: bool = False
    transfer: rt.MoveKv | None = None


class Flight:
    """See the module's docstring; `on_done` is told the outcome once."""

    def __init__(
        self,
        world: World,
        request: TraceRequest,
        plan: Plan,
        *,
        site: str,
        router: Router,
        max_tokens: int,
        on_done: Callable[[Flight, rt.Finish | rt.Fail], None],
    ) -> None:
        self.request = request
        self.plan = plan
        self.site = site
        self.cached_tokens = 0
        self.fallbacks = 0
        self.moves = 0
        self.node_id = ""
        self._world = world
        self.router = router
        self._on_done = on_done
        self._legs: dict[str, _Leg] = {}
        self._done = False
        self._runner = PlanRunner(
            rt.RunnerSpec(
                request_id=str(request.index),
                prompt_ids=(0,),
                max_tokens=max(max_tokens, request.output_tokens),
                plan=plan,
            )
        )

    def begin(self) -> None:
        """Start it."""
        self._handle(rt.Begin())

    def link_lost(self, site: str) -> None:
        """The entry has found out that it hears nothing from a site any more."""
        for leg in [leg for leg in self._legs.values() if self._world.site_of(leg.node_id) == site]:
            self._fail(leg, NodeUnreachable(f"no word from {leg.node_id}", node=leg.node_id))
            self._world.node(leg.node_id).cancel(leg.job)

    # Effects

    def _handle(self, event: rt.Event) -> None:
        for effect in self._runner.handle(event, self._world.env.now):
            self._execute(effect)

    def _execute(self, effect: rt.Effect) -> None:
        match effect:
            case rt.StartRun():
                self._start(effect)
            case rt.MoveKv():
                self._move(effect)
            case rt.CloseRun(run_id=run_id) | rt.Release(run_id=run_id):
                self._close(run_id)
            case rt.Emit(node_id=node_id):
                self.node_id = node_id
            case rt.EmitMigration(cause=cause):
                self.moves += 1
                self.fallbacks += cause is rt.MoveCause.FALLBACK
            case rt.Finish() | rt.Fail():
                self._done = True
                self._on_done(self, effect)
            case _:
                pass  # told to a client, or to a receipt

    def _start(self, effect: rt.StartRun) -> None:
        made, request = len(effect.token_ids) - 1, self.request
        prompt = request.prompt_tokens + made
        job = Job(
            run_id=str(effect.run_id),
            prompt_tokens=prompt,
            output_tokens=max(1, request.output_tokens - made),
            blocks=request.blocks,
            block_tokens=request.block_tokens,
            kv_tokens=prompt - 1 if effect.kv_from is not None else 0,
            listener=self,
        )
        self._submit(_Leg(job, effect.node_id), self.site)

    def _submit(self, leg: _Leg, from_site: str) -> None:
        self._legs[leg.job.run_id] = leg
        self.router.started(self.request, leg.node_id, self._world.env.now)
        node, site = self._world.node(leg.node_id), self._world.site_of(leg.node_id)

        def arrive() -> None:
            if not leg.dead:
                node.submit(leg.job)

        self._across(leg, from_site, site, arrive)

    def _across(self, leg: _Leg, a: str, b: str, then: Callable[[], None]) -> None:
        """Do `then` when a message has passed from site to site; a cut that lasts breaks the run."""
        world = self._world
        now_s, opens_s = world.env.now, world.net.opens_s(a, b)
        if opens_s > now_s + world.detect_s():
            self._after(world.detect_s(), lambda: self._fail(leg, _cut_off(leg.node_id)))
            return
        self._after(opens_s - now_s + world.net.rtt_s(a, b) / 2, then)

    def _after(self, delay_s: float, then: Callable[[], None]) -> None:
        event = self._world.env.timeout(max(delay_s, 0.0))
        event.callbacks.append(lambda _: then())

    def _close(self, run_id: RunId) -> None:
        leg = self._legs.pop(str(run_id), None)
        if leg is not None and not leg.dead:
            leg.dead = True
            self.router.ended(self.request, leg.node_id, self._world.env.now)
            self._world.node(leg.node_id).cancel(leg.job)

    # KV

    def _move(self, effect: rt.MoveKv) -> None:
        source = self._legs.get(str(effect.source_run))
        if effect.source is rt.KvSourceKind.PREFILL:
            tokens = max(1, self.request.prompt_tokens - 1)
            job = Job(
                run_id=str(effect.source_run),
                prompt_tokens=tokens,
                output_tokens=0,
                blocks=self.request.blocks,
                block_tokens=self.request.block_tokens,
                listener=self,
                prefill_only=True,
            )
            self._submit(_Leg(job, effect.source_node_id, transfer=effect), self.site)
        elif source is not None:
            source.transfer = effect
            tokens = self.request.prompt_tokens + source.job.made
            seconds = self._link_s(effect, tokens)
            self._after(seconds, lambda: self._world.node(effect.source_node_id).stop(source.job))

    def _link_s(self, effect: rt.MoveKv, tokens: float) -> float:
        world = self._world
        a, b = world.site_of(effect.source_node_id), world.site_of(effect.target_node_id)
        per_token = world.node(effect.source_node_id).profile.kv_bytes_per_token
        trips_s = DEFAULTS.transfer_round_trips * world.net.rtt_s(a, b)
        return tokens * per_token / world.net.goodput_bytes_per_s(a, b) + trips_s

    def _shipped(self, leg: _Leg, effect: rt.MoveKv, delay_s: float) -> None:
        def arrive() -> None:
            report = KvReport(
                transfer_id=effect.transfer_id, tokens=0, skipped_tokens=0, wire_bytes=0, codec=effect.codec,
                duration_s=delay_s, first_chunk_s=0.0, leg=_LEG,
            )  # fmt: skip
            if not self._done:
                self._handle(rt.KvMoved(transfer_id=effect.transfer_id, report=report))

        self._after(delay_s, arrive)

    # What nodes tell: Listener of placement.sim.job

    def on_prefilled(self, job: Job) -> None:
        if not job.prefill_only:
            made, prompt, cached = job.made, job.prompt_tokens, job.cached_tokens
            self._tell(job, lambda leg: self._told_prefilled(leg, prompt, cached, made))

    def on_ended(self, job: Job) -> None:
        leg = self._legs.get(job.run_id)
        if job.prefill_only and leg is not None and leg.transfer is not None:
            effect, now_s = leg.transfer, self._world.env.now
            self._end(leg)
            # Chunks travel while later ones are computed: what is left is the last one, or what the link owes.
            left = max(DEFAULTS.chunk_tokens, job.prompt_tokens - job.cached_tokens)
            owed_s = self._link_s(effect, left) - (now_s - job.submitted_s)
            self._shipped(leg, effect, max(self._link_s(effect, DEFAULTS.chunk_tokens), owed_s))
            return
        made = job.made
        self._tell(job, lambda leg: self._told_end(leg, made))

    def on_held(self, job: Job) -> None:
        made = job.made
        self._tell(job, lambda leg: self._told_held(leg, made))

    def on_failed(self, job: Job) -> None:
        leg = self._legs.get(job.run_id)
        if leg is not None:
            self._after(_LOST_RUN_S, lambda: self._fail(leg, _down(leg.node_id)))

    def _tell(self, job: Job, then: Callable[[_Leg], None]) -> None:
        leg = self._legs.get(job.run_id)
        if leg is None or leg.dead:
            return

        def arrive() -> None:
            if not leg.dead:
                then(leg)

        self._across(leg, self._world.site_of(leg.node_id), self.site, arrive)

    def _told_prefilled(self, leg: _Leg, prompt: int, cached: int, made: int) -> None:
        if not leg.job.kv_tokens and not self.cached_tokens:
            self.cached_tokens = cached
        self.router.prefilled(self.request, leg.node_id, cached, self._world.env.now)
        run_id = RunId(leg.job.run_id)
        self._handle(rt.RunPrefilled(run_id=run_id, tokens=prompt, cached_tokens=cached))
        self._told_tokens(leg, made)

    def _told_tokens(self, leg: _Leg, made: int) -> None:
        if made > leg.told and not self._done:
            ids, leg.told = (0,) * (made - leg.told), made
            self._handle(rt.RunTokens(run_id=RunId(leg.job.run_id), ids=ids))

    def _told_end(self, leg: _Leg, made: int) -> None:
        self._told_tokens(leg, made)
        self._end(leg)
        run_id = RunId(leg.job.run_id)
        self._handle(rt.RunFinished(run_id=run_id, reason=FinishReason.LENGTH, stop_string=None, leg=_LEG))

    def _told_held(self, leg: _Leg, made: int) -> None:
        self._told_tokens(leg, made)
        self._end(leg)
        self._handle(rt.RunHeld(run_id=RunId(leg.job.run_id), kv_tokens=made, leg=_LEG))
        if leg.transfer is not None:
            self._shipped(leg, leg.transfer, self._link_s(leg.transfer, 1))

    def _fail(self, leg: _Leg, error: MeshError) -> None:
        if leg.dead:
            return
        # What it made before had come already; only the times of these tokens are not known here, and do not matter.
        if not leg.job.prefill_only:
            self._told_tokens(leg, min(leg.job.made, leg.job.output_tokens - 1))
        self._end(leg)
        if leg.job.prefill_only and leg.transfer is not None:
            self._handle(rt.KvFailed(transfer_id=leg.transfer.transfer_id, error=error))
        else:
            self._handle(rt.RunFailed(run_id=RunId(leg.job.run_id), error=error))

    def _end(self, leg: _Leg) -> None:
        leg.dead = True
        self._legs.pop(leg.job.run_id, None)
        self.router.ended(self.request, leg.node_id, self._world.env.now)


def _cut_off(node_id: str) -> MeshError:
    return NodeUnreachable(f"node {node_id} cannot be reached", node=node_id)


def _down(node_id: str) -> MeshError:
    return NodeUnreachable(f"node {node_id} is down, or has no room for such a run", node=node_id)
