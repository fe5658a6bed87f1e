"""A modelled node: continuous batching with chunked prefill, a KV pool and a prefix cache, in virtual time.

Every step decodes one token of each sequence that is past its prompt, and prefills the oldest prompts with what is
left of the step's tokens. A request is admitted when there is a place and room for its prompt and its whole output
(so nothing is ever preempted), first come first served. Steps that are alike are computed at once: a segment of k
steps has a duration in closed form, and ends early, at a step's end, when something comes in that changes it.

Durations are the profile's times the node's own speed and a random factor for each segment. The node fits its own
steps with the same code as a real engine (mesh.node.latency_model), and tells what real ones tell.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass

import simpy

from mesh.node.engine import EngineLoad
from mesh.node.latency_model import LatencyModel
from placement.sim.cache import KvPool
from placement.sim.job import Job
from placement.sim.profiles import NodeProfile

_SPEED_WEIGHT = 0.1  # of the newest segment in the moving averages that nodes tell


@dataclass(frozen=True, slots=True)
class _Segment:
    """`steps` like steps. `chunk`: tokens of the first prompt in each; 0 and `mixed` False: decoding only. `mixed`: one
    step that ends at least one prompt."""

    start_s: float
    steps: int
    rows: int
    attended: float  # positions attended to in step 0, if there were one
    growth: int  # and more in each
    chunk: int
    mixed: bool
    factor: float


class SimNode:
    """One node. `factor`: how much slower than its profile it is; `noise`: sigma of a segment's random factor."""

    def __init__(
        self,
        env: simpy.Environment,
        node_id: str,
        profile: NodeProfile,
        *,
        rng: random.Random,
        factor: float = 1.0,
        noise: float = 0.05,
    ) -> None:
        self._env = env
        self.node_id = node_id
        self.profile = profile
        self._rng = rng
        self._factor = factor
        self._noise = noise
        self.pool = KvPool(profile.kv_capacity_tokens)
        self.up = True
        self.on_change = _nothing
        self.busy_s = 0.0
        self.steps_total = 0
        self._waiting: deque[Job] = deque()
        self._waiting_tokens = 0
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # heap by finish step
        self._rows = 0
        self._context = 0  # positions of the rows
        self._leaving: list[Job] = []  # to be taken out at the next step's end
        self._numbers = itertools.count()
        self._segment: _Segment | None = None
        self._epoch = 0  # an end that is not of the current segment is void
        self._latency: LatencyModel | None = None  # made when it is first asked for
        self._prefill_speed = profile.chunk_tokens / (factor * profile.step_s(profile.chunk_tokens))
        self._decode_speed = 1.0 / (factor * profile.step_s(4096.0))

    # Work

    def submit(self, job: Job) -> None:
        """Take a run. One that could never fit fails at once."""
        job.node_id, job.submitted_s = self.node_id, self._env.now
        if not self.up or job.total_tokens > min(self.pool.capacity_tokens, self.profile.max_context_tokens):
            job.gone = True
            job.listener.on_failed(job)
            return
        self._waiting.append(job)
        self._waiting_tokens += job.prompt_tokens
        self._wake()

    def cancel(self, job: Job) -> None:
        """Take a run out, without a word; at the end of the step if it runs."""
        if job.gone:
            return
        if job in self._waiting:
            self._unqueue(job)
            job.gone = True
            self.on_change(self)
            return
        self._leave(job)

    def stop(self, job: Job) -> None:
        """Pause a run between two tokens; the listener is told."""
        job.stopping = True
        if job.gone or job in self._waiting:
            return
        self._leave(job)

    def crash(self) -> None:
        """Everything here fails and is forgotten."""
        self._catch_up()
        self.up = False
        jobs = [*self._waiting, *self._prefilling, *(job for _, _, job in self._decoding if not job.gone)]
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._leaving.clear()
        self._waiting_tokens = self._rows = self._context = 0
        self._segment = None
        self._epoch += 1
        self.pool.clear()
        for job in jobs:
            if not job.gone:
                self._count(job)
                job.gone = True
                job.listener.on_failed(job)
        self.on_change(self)

    def restart(self) -> None:
        """Up again, with an empty pool."""
        self.up = True
        self.on_change(self)

    # What it tells

    @property
    def n_running(self) -> int:
        return len(self._prefilling) + self._rows

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def load(self) -> EngineLoad:
        """As a real engine reports it."""
        ahead = self._waiting_tokens + sum(job.prompt_tokens - job.position for job in self._prefilling)
        return EngineLoad(
            running=self.n_running,
            waiting=len(self._waiting),
            waiting_prefill_tokens=ahead,
            kv_used_tokens=self.pool.taken_tokens,
            kv_capacity_tokens=self.pool.capacity_tokens,
            prefill_tokens_per_s=self._prefill_speed,
            decode_tokens_per_s=self._decode_speed,
            curve=self._fit().curve,
            context_tokens=self._context + sum(job.position for job in self._prefilling),
            step_tokens=self.profile.chunk_tokens,
            most_running=self.profile.most_running,
        )

    # Segments

    def _wake(self) -> None:
        if self._segment is None:
            self._begin()
        elif self._leaving or not (self._prefilling or self._segment.mixed):
            self._cut()
        self.on_change(self)

    def _begin(self) -> None:
        """Start what comes next; nothing if there is nothing."""
        rows = self._rows
        self._admit(max(1, self.profile.chunk_tokens - rows))
        until = self._first_finish() - self.steps_total if rows else 0
        chunk, mixed, steps, growth, attended = 0, False, until, rows, float(self._context)
        if self._prefilling:
            head = self._prefilling[0]
            budget = max(1, self.profile.chunk_tokens - rows)
            left = head.prompt_tokens - head.position
            if left > budget:
                steps = (left - 1) // budget
                steps = min(steps, until) if rows else steps
                chunk, growth, attended = budget, rows + budget, attended + head.position
            else:
                mixed, steps = True, 1
                attended += self._mixed_context(budget)
        elif not rows:
            self._segment = None
            return
        factor = self._factor * math.exp(self._rng.gauss(0.0, self._noise)) if self._noise else self._factor
        self._segment = _Segment(self._env.now, steps, rows, attended, growth, chunk, mixed, factor)
        self._schedule(self._duration(self._segment, steps))

    def _mixed_context(self, budget: int) -> int:
        """Positions that the prompts of the next step attend to, at its end."""
        attended = 0
        for job in self._prefilling:
            part = min(budget, job.prompt_tokens - job.position)
            attended += job.position + part
            budget -= part
            if budget <= 0:
                break
        return attended

    def _duration(self, segment: _Segment, steps: int) -> float:
        """Seconds of its first `steps` steps."""
        profile = self.profile
        attended = steps * segment.attended + segment.growth * steps * (steps + 1) / 2
        return segment.factor * (steps * profile.base_s + profile.context_s * attended)

    def _steps_in(self, segment: _Segment, elapsed_s: float) -> float:
        """How many steps (with a fraction) it has done after so long."""
        a = segment.factor * self.profile.context_s * segment.growth / 2
        b = segment.factor * (self.profile.base_s + self.profile.context_s * segment.attended) + a
        return 2 * elapsed_s / (b + math.sqrt(b * b + 4 * a * elapsed_s))

    def _schedule(self, delay_s: float) -> None:
        self._epoch += 1
        event = self._env.timeout(max(0.0, delay_s), self._epoch)
        event.callbacks.append(self._on_timeout)

    def _on_timeout(self, event: simpy.Event) -> None:
        if event.value == self._epoch and self._segment is not None:
            self._end(self._segment.steps)

    def _cut(self) -> None:
        """End the segment at the end of the step that is under way."""
        segment = self._segment
        assert segment is not None
        elapsed_s = self._env.now - segment.start_s
        steps = min(segment.steps, max(1, math.ceil(self._steps_in(segment, elapsed_s) - 1e-9)))
        if steps < segment.steps:
            self._segment = _Segment(
                segment.start_s, steps, segment.rows, segment.attended, segment.growth, segment.chunk,
                segment.mixed, segment.factor,
            )  # fmt: skip
            self._schedule(segment.start_s + self._duration(segment, steps) - self._env.now)

    def _catch_up(self) -> None:
        """Count the whole steps of the running segment, before everything is lost."""
        if self._segment is not None and not self._segment.mixed:
            steps = math.floor(self._steps_in(self._segment, self._env.now - self._segment.start_s) + 1e-9)
            self.steps_total += min(steps, self._segment.steps)

    def _end(self, steps: int) -> None:
        segment = self._segment
        assert segment is not None
        duration_s = self._duration(segment, steps)
        self.busy_s += duration_s
        self.steps_total += steps
        self._context += segment.rows * steps
        prefilled = 0
        done: list[Job] = []
        if segment.chunk:
            prefilled = segment.chunk * steps
            self._prefilling[0].position += prefilled
        elif segment.mixed:
            prefilled, done = self._end_prompts(max(1, self.profile.chunk_tokens - segment.rows))
        self._learn(segment, steps, duration_s, prefilled)
        self._take_out()
        self._finish()
        for job in done:
            self._join(job)
        self._begin()
        self.on_change(self)

    def _end_prompts(self, budget: int) -> tuple[int, list[Job]]:
        """One step's prefill over the oldest prompts; tokens of it, and the prompts that it ended."""
        prefilled, done = 0, []
        while self._prefilling and budget > 0:
            job = self._prefilling[0]
            part = min(budget, job.prompt_tokens - job.position)
            job.position += part
            budget -= part
            prefilled += part
            if job.position < job.prompt_tokens:
                break
            done.append(self._prefilling.popleft())
        return prefilled, done

    def _join(self, job: Job) -> None:
        """Its prompt is done in the step that ends now: it has its first token."""
        if job.gone:
            return
        kept = self.pool.keep(job.blocks, len(job.pinned))
        job.pinned += kept
        job.private_tokens -= len(kept) * job.block_tokens
        job.made = 0 if job.prefill_only else 1
        job.listener.on_prefilled(job)
        if job.prefill_only or job.output_tokens <= 1:
            self._release(job)
            job.listener.on_ended(job)
            return
        job.join_step = self.steps_total
        job.finish_step = self.steps_total + job.output_tokens - 1
        heapq.heappush(self._decoding, (job.finish_step, next(self._numbers), job))
        self._rows += 1
        self._context += job.prompt_tokens + 1

    def _finish(self) -> None:
        while self._decoding and (self._decoding[0][0] <= self.steps_total or self._decoding[0][2].gone):
            job = heapq.heappop(self._decoding)[2]
            if job.gone:
                continue
            job.made = job.output_tokens
            self._rows -= 1
            self._context -= job.total_tokens
            self._release(job)
            job.listener.on_ended(job)

    def _first_finish(self) -> int:
        while self._decoding[0][2].gone:
            heapq.heappop(self._decoding)
        return self._decoding[0][0]

    # Places and room

    def _admit(self, budget: int) -> None:
        """As many as the next step has tokens for: whoever waits longer finds more in the cache."""
        budget -= sum(job.prompt_tokens - job.position for job in self._prefilling)
        while budget > 0 and self._waiting and self.n_running < self.profile.most_running:
            job = self._waiting[0]
            blocks = job.blocks if not job.kv_tokens else ()
            n = self.pool.reserve(blocks, job.block_tokens, job.total_tokens)
            if n is None:
                return
            self._unqueue(job)
            job.pinned = list(blocks[:n])
            job.cached_tokens = min(max(n * job.block_tokens, job.kv_tokens), job.prompt_tokens - 1)
            job.private_tokens = job.total_tokens - n * job.block_tokens
            job.position = job.cached_tokens
            self._prefilling.append(job)
            budget -= job.prompt_tokens - job.position

    def _unqueue(self, job: Job) -> None:
        self._waiting.remove(job)
        self._waiting_tokens -= job.prompt_tokens

    def _leave(self, job: Job) -> None:
        self._leaving.append(job)
        if self._segment is not None:
            self._cut()

    def _take_out(self) -> None:
        """Runs that were cancelled or stopped leave between two steps."""
        leaving, self._leaving = self._leaving, []
        for job in leaving:
            if job.gone:
                continue
            if job in self._prefilling:
                self._prefilling.remove(job)
            elif job.join_step or job.finish_step:
                if job.finish_step <= self.steps_total:
                    continue  # it ends by itself now
                self._count(job)
                self._rows -= 1
                self._context -= job.prompt_tokens + job.made
            self._release(job)
            if job.stopping:
                job.listener.on_held(job)

    def _count(self, job: Job) -> None:
        """How many tokens it has made."""
        if job.finish_step:
            job.made = min(job.output_tokens, 1 + self.steps_total - job.join_step)

    def _release(self, job: Job) -> None:
        job.gone = True
        self.pool.free(job.pinned, job.private_tokens)

    # What it learns of itself

    def _learn(self, segment: _Segment, steps: int, duration_s: float, prefilled: int) -> None:
        per_step_s = duration_s / steps
        tokens = prefilled // steps
        context = self._context - segment.rows * steps / 2
        in_prompt = max(0.0, segment.attended + segment.growth * (steps + 1) / 2 - context)
        self._fit().saw_step(
            prefill_tokens=tokens,
            prefill_attention=max(0.0, in_prompt - tokens / 2) * tokens,
            decode_rows=segment.rows,
            decode_context=int(context),
            duration_s=per_step_s,
        )
        if prefilled:
            speed = prefilled / duration_s
            self._prefill_speed += _SPEED_WEIGHT * (speed - self._prefill_speed)
        if segment.rows:
            self._decode_speed += _SPEED_WEIGHT * (1.0 / per_step_s - self._decode_speed)

    def _fit(self) -> LatencyModel:
        """Its fit, which begins with the steps that a real engine times before it registers."""
        if self._latency is not None:
            return self._latency
        profile, factor, fit = self.profile, self._factor, LatencyModel()
        self._latency = fit
        for tokens, before in ((32, 0), (profile.chunk_tokens, 0), (profile.chunk_tokens, 4096)) * 2:
            fit.saw_step(
                prefill_tokens=tokens,
                prefill_attention=(before + tokens / 2) * tokens,
                decode_rows=0,
                decode_context=0,
                duration_s=factor * profile.step_s(before + tokens),
            )
        for rows in (1, 4, 8, 16):
            fit.saw_step(
                prefill_tokens=0,
                prefill_attention=0.0,
                decode_rows=rows,
                decode_context=rows * 512,
                duration_s=factor * profile.step_s(rows * 512),
            )
        return fit


def _nothing(node: SimNode) -> None:
    """Nobody listens."""
