"""The engine without threads or asyncio: runs and holds by name, and one step at a time.

Everything here runs on the engine thread. A run's events go into its sink in order; its last one is Finished,
Held or an error, and by then its name is free (or the name of a hold) and its memory accounted for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import structlog

from core_node.engine.block_copies import BlockCopier, block_bytes
from core_node.engine.blocks import BlockPool
from core_node.engine.checks import check_continues, check_import, check_run
from core_node.engine.ending import Ending
from core_node.engine.runner import Runner
from core_node.engine.sampler import SampleRow
from core_node.engine.scheduler import Chunk, Scheduler, SchedulerLimits
from core_node.engine.sequence import Sequence
from core_node.engine.speed import SpeedMeter
from core_node.engine.step_parts import COMPUTE, DELIVER, SCHEDULE, StepParts
from core_node.engine.step_time import StepWork
from core_node.engine.swap import MoveRates
from core_node.engine.tails import check_tail, join, open_tail
from mesh.errors import AlreadyExists, Cancelled, Internal, InvalidRequest, MeshError, NotFound
from mesh.kv.hashing import BLOCK_TOKENS, root_hash
from mesh.kv.slab import KvSlab
from mesh.node.engine import (
    EngineInfo,
    EngineLoad,
    Held,
    ImportSpec,
    Prefilled,
    RunEvent,
    RunId,
    RunSpec,
    Tokens,
)
from mesh.node.latency_model import LatencyModel
from mesh.node.prefill_curve import PrefillCurve
from mesh.node.sampling import Sampled
from mesh.node.stop import TextStream

_log = structlog.get_logger(__name__)


class Sink(Protocol):
    """Where a run's events go; must not block."""

    def put(self, item: RunEvent | MeshError) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    spec: RunSpec
    sequence: Sequence
    ending: Ending
    sink: Sink
    announced_tokens: int = 0  # of the last Prefilled event


@dataclass(slots=True, kw_only=True, eq=False)
class _Hold:
    sequence: Sequence
    max_tokens: int  # positions that may be written; 0 if it is not an import
    first_position: int = 0  # of a tail without its head; what `sequence.computed` counts from

    @property
    def leading_tokens(self) -> int:
        return 0 if self.first_position else self.sequence.computed


class EngineCore:
    """Owned by the engine thread. `new_stream` makes the tokenizer's incremental detokeniser; `clock` gives seconds."""

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        limits: SchedulerLimits,
        new_stream: Callable[[], TextStream],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.info = info
        self._runner = runner
        self._copier = BlockCopier(runner.pool, limits.host_blocks, clock)
        self._block_bytes = block_bytes(runner.pool)
        self._clock = clock
        self._limits = limits
        self._new_stream = new_stream
        self._speed = SpeedMeter()
        self._parts = StepParts()
        self._prefill_curve = PrefillCurve()
        self._latency = LatencyModel()
        self._arrivals = 0
        self._reset()

    def _reset(self) -> None:
        self._scheduler = Scheduler(BlockPool(self._runner.pool.n_blocks), self._limits)
        self._runs: dict[RunId, _Run] = {}
        self._holds: dict[RunId, _Hold] = {}

    # --- runs ---------------------------------------------------------------------------------------------------

    def add_run(self, spec: RunSpec, sink: Sink) -> None:
        """Queue a run. Raises InvalidRequest, NotFound, AlreadyExists or Overloaded with nothing changed."""
        check_run(spec, self.info)
        if spec.kv_from != spec.run_id:
            self._check_free(spec.run_id)
        root = root_hash(self.info.geometry.layout_hash, spec.salt)
        hold = None
        if spec.kv_from is not None:
            found = self._hold(spec.kv_from)
            if found.first_position:
                raise InvalidRequest(f"hold {spec.kv_from} has no head yet", field="kv_from")
            hold = found.sequence
            check_continues(spec, hold, root)
        self._scheduler.check_room()
        ending = Ending(
            spec.sampling,
            spec.token_ids,
            spec.prompt_tokens,
            max_context_tokens=self.info.max_context_tokens,
            eos_token_ids=self.info.eos_token_ids,
            stream=self._new_stream() if spec.sampling.stop else None,
        )
        if ending.finished is not None and not spec.prefill_only:  # by the tokens that it came with
            if spec.kv_from is not None:
                self.release(spec.kv_from)
            sink.put(ending.finished)
            return
        self._arrivals += 1
        sequence = Sequence(
            run_id=spec.run_id,
            token_ids=list(spec.token_ids),
            root=root,
            priority=spec.priority,
            arrival=self._arrivals,
            arrived_s=self._clock(),
            max_new_tokens=spec.sampling.max_tokens,
            predicted_tokens=spec.predicted_tokens,
            prefill_only=spec.prefill_only,
        )
        if hold is not None and spec.kv_from is not None:
            del self._holds[spec.kv_from]
            self._scheduler.adopt(hold, sequence)
        self._scheduler.add(sequence)
        self._runs[spec.run_id] = _Run(spec=spec, sequence=sequence, ending=ending, sink=sink)

    def cancel(self, run_id: RunId, sink: Sink) -> None:
        """The consumer of `sink` went away: free its run at once, if it has one still (the name may be another's)."""
        run = self._runs.get(run_id)
        if run is not None and run.sink is sink:
            self._end(run, None)

    def pause(self, run_id: RunId) -> None:
        """See Engine.pause."""
        run = self._runs.get(run_id)
        if run is None:
            raise NotFound(f"no run {run_id}")
        self._to_hold(run)

    def release(self, run_id: RunId) -> None:
        """See Engine.release."""
        run = self._runs.get(run_id)
        if run is not None:
            self._end(run, Cancelled(f"run {run_id} was released"))
        hold = self._holds.pop(run_id, None)
        if hold is not None:
            self._scheduler.remove(hold.sequence)

    # --- KV -----------------------------------------------------------------------------------------------------

    def kv_tokens(self, run_id: RunId) -> int:
        """See Engine.kv_tokens."""
        hold = self._holds.get(run_id)
        return hold.leading_tokens if hold is not None else self._sequence(run_id).computed

    def export_kv(self, run_id: RunId, start: int, stop: int) -> KvSlab:
        """See Engine.export_kv."""
        sequence, have = self._sequence(run_id), self.kv_tokens(run_id)
        if not 0 <= start < stop <= have:
            raise InvalidRequest(f"positions [{start}, {stop}) of {run_id} are not inside [0, {have})")
        return self._runner.pool.read(sequence.blocks, start, stop)

    def open_import(self, spec: ImportSpec) -> int:
        """See Engine.open_import."""
        check_import(spec, self.info)
        check_tail(spec)
        self._check_free(spec.run_id)
        sequence = Sequence(
            run_id=spec.run_id,
            token_ids=list(spec.token_ids),
            root=root_hash(self.info.geometry.layout_hash, spec.salt),
        )
        first = spec.first_position
        if first:
            open_tail(self._scheduler.pool, sequence, first)
        else:
            self._scheduler.open_hold(sequence)
        self._holds[spec.run_id] = _Hold(sequence=sequence, max_tokens=spec.max_tokens, first_position=first)
        return first or sequence.computed

    def write_kv(self, run_id: RunId, slab: KvSlab) -> None:
        """See Engine.write_kv. A refused write leaves the hold as it was."""
        hold = self._hold(run_id)
        sequence, first = hold.sequence, hold.first_position
        if slab.start != first + sequence.computed:
            raise InvalidRequest(
                f"KV of {run_id} goes on at {first + sequence.computed}, the slab starts at {slab.start}"
            )
        if slab.n_tokens == 0:
            raise InvalidRequest("the KV slab is empty")
        if slab.stop > hold.max_tokens:
            raise InvalidRequest(f"the slab ends at {slab.stop}, {hold.max_tokens} positions were announced")
        slab.check(self.info.geometry)
        self._scheduler.grow_hold(sequence, slab.stop - first)
        self._runner.pool.write([0] * (first // BLOCK_TOKENS) + sequence.blocks, slab)  # no position is below `first`
        sequence.computed = slab.stop - first

    def join_kv(self, run_id: RunId, head: RunId) -> None:
        """See Engine.join_kv."""
        tail, front = self._hold(run_id), self._hold(head)
        if not tail.first_position or front.first_position:
            raise InvalidRequest(f"{run_id} is no tail of {head}", field="head")
        join(tail.sequence, front.sequence, tail.first_position)
        del self._holds[head]
        tail.first_position = 0

    def cached_tokens(self, token_ids: Seq[int], salt: bytes) -> int:
        """See Engine.cached_tokens."""
        root = root_hash(self.info.geometry.layout_hash, salt)
        return self._scheduler.cached_tokens(Sequence(run_id=RunId(""), token_ids=list(token_ids), root=root))

    # --- state --------------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """See Engine.load. `waiting_prefill_tokens` counts prompts that are being prefilled too: a new request
        queues behind them as well."""
        s = self._scheduler
        to_prefill = sum(q.remaining for q in s.waiting) + sum(q.remaining for q in s.running if q.remaining > 1)
        return EngineLoad(
            running=len(s.running),
            waiting=len(s.waiting),
            waiting_prefill_tokens=to_prefill,
            kv_used_tokens=s.used_tokens,
            kv_capacity_tokens=self.info.kv_capacity_tokens,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            decode_tokens_per_s=self._speed.decode_tokens_per_s,
            preempted_total=s.preempted_total,
            cached_tokens_total=s.cached_tokens_total,
            prompt_tokens_total=s.prompt_tokens_total,
            prefill_token_s=self._prefill_curve.token_s,
            prefill_growth_s=self._prefill_curve.growth_s,
            curve=self._latency.curve,
            context_tokens=sum(q.computed for q in s.running),
            step_tokens=self._limits.max_step_tokens,
            most_running=self._limits.max_running,
            steps_total=self._parts.steps,
            step_seconds_total=self._parts.total_s,
        )

    def check_integrity(self) -> None:
        """See Engine.check_integrity."""
        assert not self._runs.keys() & self._holds.keys(), "a name is both a run and a hold"
        scheduled = {id(s) for s in (*self._scheduler.waiting, *self._scheduler.running)}
        assert scheduled == {id(r.sequence) for r in self._runs.values()}, "a run is not scheduled, or none's is"
        self._scheduler.check(h.sequence for h in self._holds.values())

    def drop_all(self, error: type[MeshError], message: str) -> None:
        """End every run with an error of its own, forget all holds and the prefix cache."""
        runs = list(self._runs.values())
        self._reset()
        for run in runs:
            run.sink.put(error(message))

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one batch; False if there was nothing to compute (then only a command can change that)."""
        self._parts.begin()
        self._scheduler.rates = self._rates()
        chunks = self._scheduler.schedule(self._clock())
        # The books say already that this is copied: if it fails, no KV can be trusted (EngineThread drops all).
        self._copier.run(self._scheduler.take_copies())
        if not chunks:
            return False
        runs = [self._runs[c.sequence.run_id] for c in chunks]
        rows = [_sample_row(run, chunk) for run, chunk in zip(runs, chunks, strict=True)]
        work = StepWork.of(chunks)
        self._parts.end(SCHEDULE)
        started = self._clock()
        try:
            drawn = self._runner.run(chunks, rows)
        except Exception as exc:
            # The border to the device: whatever it raised, these runs are lost and the others can go on.
            _log.exception("engine step failed", runs=len(runs), tokens=sum(c.n_tokens for c in chunks))
            for run in runs:
                self._end(run, Internal(f"the engine step failed: {type(exc).__name__}"))
            return True
        duration_s = self._clock() - started
        self._parts.end(COMPUTE)
        if len(chunks) == 1 and not work.decode_tokens:
            self._prefill_curve.add(chunks[0].start, chunks[0].n_tokens, duration_s)
        self._latency.saw_step(
            prefill_tokens=work.prefill_tokens,
            prefill_attention=work.prefill_attention,
            decode_rows=work.decode_tokens,
            decode_context=work.decode_context,
            duration_s=duration_s,
        )
        self._speed.observe(duration_s=duration_s, prefill_tokens=work.prefill_tokens, decode_tokens=work.decode_tokens)
        if self._limits.tpot_target_s > 0:
            self._scheduler.step_time.observe(work, duration_s)
        for run, chunk, row, token in zip(runs, chunks, rows, drawn, strict=True):
            completes = chunk.completes
            self._scheduler.computed(chunk)
            if run.spec.prefill_only:
                self._after_prefill_chunk(run, completes)
            elif row is not None:
                self._after_token(run, token)
        self._parts.end(DELIVER)
        return True

    def measure_copies(self) -> None:
        """How fast KV goes to the host and back; before the first run."""
        self._copier.probe()

    def _rates(self) -> MoveRates:
        return MoveRates(
            recompute_tokens_per_s=self._speed.prefill_tokens_per_s,
            copy_bytes_per_s=self._copier.bytes_per_s,
            block_bytes=self._block_bytes,
        )

    def _after_prefill_chunk(self, run: _Run, completes: bool) -> None:
        sequence = run.sequence
        if sequence.computed > run.announced_tokens:  # a preempted run passes the same positions twice
            run.announced_tokens = sequence.computed
            run.sink.put(Prefilled(sequence.computed, sequence.cached))
        if completes:
            self._to_hold(run)

    def _after_token(self, run: _Run, token: Sampled | None) -> None:
        if run.announced_tokens == 0:
            run.announced_tokens = run.sequence.computed
            run.sink.put(Prefilled(run.sequence.computed, run.sequence.cached))
        if token is None:
            self._end(run, Internal("the model gave logits that are not finite"))
            return
        run.sequence.token_ids.append(token.token_id)
        asked = run.spec.sampling.logprobs is not None
        run.sink.put(Tokens((token.token_id,), ((token.logprob, token.top),) if asked else ()))
        finished = run.ending.after(token.token_id)
        if finished is not None:
            self._end(run, finished)

    def _end(self, run: _Run, last: RunEvent | MeshError | None) -> None:
        del self._runs[run.spec.run_id]
        self._scheduler.remove(run.sequence)
        if last is not None:
            run.sink.put(last)

    def _to_hold(self, run: _Run) -> None:
        run_id = run.spec.run_id
        del self._runs[run_id]
        self._scheduler.hold(run.sequence)
        self._holds[run_id] = _Hold(sequence=run.sequence, max_tokens=0)
        run.sink.put(Held(run.sequence.computed))

    # --- names --------------------------------------------------------------------------------------------------

    def _hold(self, run_id: RunId) -> _Hold:
        hold = self._holds.get(run_id)
        if hold is None:
            raise NotFound(f"no hold {run_id}")
        return hold

    def _sequence(self, run_id: RunId) -> Sequence:
        owner = self._runs.get(run_id) or self._holds.get(run_id)
        if owner is None:
            raise NotFound(f"no run or hold {run_id}")
        return owner.sequence

    def _check_free(self, run_id: RunId) -> None:
        if run_id in self._runs or run_id in self._holds:
            raise AlreadyExists(f"a run or hold {run_id} is there already")


def _sample_row(run: _Run, chunk: Chunk) -> SampleRow | None:
    if run.spec.prefill_only or not chunk.completes:
        return None
    return SampleRow(sampling=run.spec.sampling, token_ids=run.sequence.token_ids, prompt_tokens=run.spec.prompt_tokens)
