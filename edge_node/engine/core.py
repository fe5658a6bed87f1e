"""The engine itself, one step at a time: admit, plan, compute, sample. Runs in the child process.

Synchronous and without I/O but the backend, so that tests drive it over a model made of lists. Commands (of `book`
and `kv`) come between steps; what runs have to tell is taken from the book after each command and step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edge_node.engine.backend import Backend, BatchItem, DecodeStatus
from edge_node.engine.blob import BlobLayout
from edge_node.engine.book import CoreLimits, RunBook
from edge_node.engine.kv_access import KvAccess
from edge_node.engine.kv_store import KvStore
from edge_node.engine.run import NewTextStream, Run
from edge_node.engine.schedule import RunState, may_admit, plan_step, step_budget
from edge_node.engine.speed import SpeedMeter
from mesh.errors import Internal, MeshError, Overloaded
from mesh.node.engine import EngineLoad, Prefilled, SelfTest, Tokens
from mesh.node.latency_model import LatencyModel
from mesh.node.prefill_curve import PrefillCurve

_MAX_FAILURES_IN_A_ROW: Final = 3
_MEASURED_CHUNK_TOKENS: Final = 16  # a smaller chunk says little of prefill speed
_SELF_TEST_PREFILL_TOKENS: Final = 256
_SELF_TEST_DECODE_TOKENS: Final = 16
_SELF_TEST_SALT: Final = b"\0self-test"


class BackendBroken(Exception):
    """llama.cpp failed again and again: the process should be replaced."""


class EngineCore:
    """`clock` gives seconds and is only used to measure speed."""

    def __init__(
        self,
        backend: Backend,
        layout: BlobLayout,
        limits: CoreLimits,
        *,
        eos_token_ids: frozenset[int],
        new_stream: NewTextStream,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._clock = clock
        self._store = KvStore(backend, layout, capacity=limits.capacity_tokens, n_sequences=limits.max_sequences)
        self.book = RunBook(self._store, limits, eos_token_ids=eos_token_ids, new_stream=new_stream)
        self.kv = KvAccess(self.book, self._store, limits)
        self._prefill_speed, self._decode_speed = SpeedMeter(), SpeedMeter()
        self._prefill_curve = PrefillCurve()
        self._latency = LatencyModel()
        self._preempted_in_last_step = False
        self._failures_in_a_row = 0
        self._preempted_total = self._cached_total = self._prompt_total = 0

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one batch. False if there was nothing to do: then only a command can change that."""
        if not (self._preempted_in_last_step and self.book.running):
            self._admit()
        self._preempted_in_last_step = False
        by_key = {run.key: run for run in self.book.running}
        if not by_key:
            return False
        states = [self._state(run) for run in self.book.running]
        budget = step_budget(
            max_step_tokens=self._limits.max_step_tokens,
            n_decoding=sum(s.decoding for s in states),
            prefill_tokens_per_s=self._prefill_speed.tokens_per_s,
            max_stall_s=self._limits.max_stall_s,
        )
        plan = plan_step(states, budget_tokens=budget, room_cells=self._store.room)
        for key in plan.preempt:
            self._preempt(by_key[key])
        if plan.compute:
            self._compute([(by_key[key], n_tokens) for key, n_tokens in plan.compute])
        return True

    def _state(self, run: Run) -> RunState:
        return RunState(
            key=run.key,
            priority=run.spec.priority,
            arrival=run.arrival,
            outstanding=run.outstanding,
            decoding=run.outstanding == 1,
            frees=self._store.only_of(run.sequence) if run.sequence is not None else 0,
        )

    def _preempt(self, run: Run) -> None:
        self.book.preempt(run)
        self._preempted_total += 1
        self._preempted_in_last_step = True

    def _admit(self) -> None:
        book, store = self.book, self._store
        while book.waiting:
            run = book.waiting[0]
            source, shared = None, run.computed
            if run.sequence is None:
                source, shared = store.match(run.spec.salt, run.tokens, run.shareable)
            admitted = (run.sequence is not None or store.has_id) and may_admit(
                need_cells=store.cost(source, shared, len(run.tokens)),
                room_cells=store.room - sum(r.outstanding for r in book.running),
                capacity_cells=store.capacity,
                n_running=len(book.running),
                max_running=self._limits.max_running,
            )
            if not admitted:
                if not book.running and self._reclaim_from_waiting(run):
                    continue
                return
            book.admit(run)
            if run.sequence is None:
                run.sequence = store.open(run.spec.salt, run.tokens, source, shared)
            if not run.started:
                run.started, run.cached = True, run.computed
                self._cached_total += run.cached
                self._prompt_total += len(run.tokens)
            if run.outstanding == 0:
                self._prefill_done(run)

    def _reclaim_from_waiting(self, head: Run) -> bool:
        """Nothing runs and the head does not fit: another waiting run gives up KV that it brought along."""
        for run in reversed(self.book.waiting):
            if run is not head and run.sequence is not None:
                self.book.forget_kv(run)
                return True
        return False

    def _compute(self, work: list[tuple[Run, int]]) -> None:
        started_s = self._clock()
        status = self._decode(work)
        if status is DecodeStatus.NO_SLOT and len(work) > 1:
            # By our account there is room, by llama.cpp's there is none: the last run gives way.
            self._preempt(work[-1][0])
            return
        if status is not DecodeStatus.OK:
            self._failures_in_a_row += 1
            reason = self._backend.last_errors() or "no reason given"
            for run, _ in work:
                self.book.fail(run, Internal(f"llama.cpp could not compute a batch: {reason}"))
            if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
                raise BackendBroken(f"{self._failures_in_a_row} batches failed in a row: {reason}")
            return
        self._failures_in_a_row = 0
        self._measure(work, self._clock() - started_s)
        for item, (run, n_tokens) in enumerate(work):
            assert run.sequence is not None
            self._store.extend(run.sequence, n_tokens)
            self._advance(run, item)

    def _decode(self, work: list[tuple[Run, int]]) -> DecodeStatus:
        items = []
        for run, n_tokens in work:
            assert run.sequence is not None
            at = run.computed
            wants = n_tokens == run.outstanding and not run.spec.prefill_only
            items.append(BatchItem(run.sequence.id, at, run.tokens[at : at + n_tokens], wants))
        if not self._store.make_room(sum(n_tokens for _, n_tokens in work)):
            raise AssertionError("the plan took cells that are not there")
        while (status := self._backend.decode(items)) is DecodeStatus.NO_SLOT and self._store.evict_one():
            pass
        return status

    def _measure(self, work: list[tuple[Run, int]], seconds: float) -> None:
        prefill = sum(n_tokens for run, n_tokens in work if n_tokens > 1 or not run.prefilled)
        decoding = [run for run, n_tokens in work if n_tokens == 1 and run.prefilled]
        self._latency.saw_step(
            prefill_tokens=prefill,
            prefill_attention=sum(n * run.computed + n * (n + 1) / 2 for run, n in work if n > 1 or not run.prefilled),
            decode_rows=len(decoding),
            decode_context=sum(run.computed + 1 for run in decoding),
            duration_s=seconds,
        )
        if prefill == 0:
            self._decode_speed.add(1, seconds)
        elif prefill >= _MEASURED_CHUNK_TOKENS:
            self._prefill_speed.add(sum(n_tokens for _, n_tokens in work), seconds)
            if len(work) == 1:
                self._prefill_curve.add(work[0][0].computed, prefill, seconds)

    def _advance(self, run: Run, item: int) -> None:
        if run.outstanding > 0:
            if run.spec.prefill_only:
                self.book.tell(run, Prefilled(run.computed, run.cached))
            return
        if run.spec.prefill_only:
            self._prefill_done(run)
            return
        if not run.prefilled:
            run.prefilled = True
            self.book.tell(run, Prefilled(run.computed, run.cached))
        try:
            drawn = run.sample(self._backend.logits(item), self.book.eos_token_ids)
        except MeshError as error:
            self.book.fail(run, error)
            return
        run.tokens.append(drawn.token_id)
        wanted = run.spec.sampling.logprobs is not None
        self.book.tell(run, Tokens((drawn.token_id,), ((drawn.logprob, drawn.top),) if wanted else ()))
        over = run.finish_reason(self.book.eos_token_ids, self._limits.max_context_tokens)
        if over is not None:
            self.book.finish(run, *over)

    def _prefill_done(self, run: Run) -> None:
        self.book.tell(run, Prefilled(run.computed, run.cached))
        self.book.hold(run)

    # --- about the engine -----------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """The load now. `kv_used_tokens`: cells that no new run could have, promised ones included."""
        book, store = self.book, self._store
        return EngineLoad(
            running=len(book.running),
            waiting=len(book.waiting),
            waiting_prefill_tokens=sum(r.outstanding for r in book.waiting)
            + sum(r.outstanding for r in book.running if not r.prefilled),
            kv_used_tokens=store.capacity - store.room,
            kv_capacity_tokens=store.capacity,
            prefill_tokens_per_s=self._prefill_speed.tokens_per_s,
            decode_tokens_per_s=self._decode_speed.tokens_per_s,
            preempted_total=self._preempted_total,
            cached_tokens_total=self._cached_total,
            prompt_tokens_total=self._prompt_total,
            prefill_token_s=self._prefill_curve.token_s,
            prefill_growth_s=self._prefill_curve.growth_s,
            curve=self._latency.curve,
            context_tokens=sum(r.computed for r in book.running),
            step_tokens=self._limits.max_step_tokens,
            most_running=self._limits.max_running,
        )

    def self_test(self) -> SelfTest:
        """Measure both speeds on one sequence; blocks for about a second. Raises Overloaded unless idle."""
        n_decode = _SELF_TEST_DECODE_TOKENS
        n_prefill = min(_SELF_TEST_PREFILL_TOKENS, self._store.room - n_decode)
        if self.book.running or self.book.waiting or n_prefill < _MEASURED_CHUNK_TOKENS or not self._store.has_id:
            raise Overloaded("the engine is busy: its speed can only be measured when it is idle")
        chunk = min(n_prefill, self._limits.max_step_tokens)
        self._measure_alone(chunk, chunk, n_decode=1)  # first touch of the weights, not measured
        prefill_s, decode_s = self._measure_alone(n_prefill, chunk, n_decode)
        self._prefill_speed.add(n_prefill, prefill_s)
        self._prefill_curve.add(0, n_prefill, prefill_s)
        self._decode_speed.add(n_decode, decode_s)
        return SelfTest(
            prefill_tokens_per_s=n_prefill / max(prefill_s, 1e-9),
            decode_tokens_per_s=n_decode / max(decode_s, 1e-9),
            notes=(f"{n_prefill} tokens prefilled, {n_decode} decoded, one sequence alone",),
        )

    def _measure_alone(self, n_prefill: int, chunk: int, n_decode: int) -> tuple[float, float]:
        """Seconds of prefill and of decode. Leaves nothing."""
        token_ids = [i % self._backend.vocab_size for i in range(n_prefill + n_decode)]
        sequence = self._store.open(_SELF_TEST_SALT, token_ids)
        times = [self._clock()]
        try:
            for start, stop, step in ((0, n_prefill, chunk), (n_prefill, n_prefill + n_decode, 1)):
                for at in range(start, stop, step):
                    n_tokens = min(step, stop - at)
                    self._store.make_room(n_tokens)
                    item = BatchItem(sequence.id, at, token_ids[at : at + n_tokens], True)
                    if self._backend.decode([item]) is not DecodeStatus.OK:
                        raise Internal(f"llama.cpp could not compute: {self._backend.last_errors()}")
                    self._backend.logits(0)
                    self._store.extend(sequence, n_tokens)
                times.append(self._clock())
        finally:
            self._store.drop(sequence)
        return times[1] - times[0], times[2] - times[1]

    def check(self) -> None:
        """Raise AssertionError if memory accounting is off."""
        self._store.check()
        owners = [r.sequence for r in (*self.book.running, *self.book.waiting)]
        owners += [h.sequence for h in self.book.holds.values()]
        owned = [s.id for s in owners if s is not None]
        assert len(owned) == len(set(owned)), "two runs or holds share a sequence"
        assert set(owned) == self._store.live_ids, "a live sequence has no run or hold, or the reverse"
