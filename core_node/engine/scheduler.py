"""Which tokens of which sequences the next step computes. Pure; no torch, no clock, no asyncio.

There are no prefill and decode phases: every sequence has tokens (prompt and generated) and a count of computed
positions, and a step hands out a budget of tokens. Running sequences come first, those that decode before those
that still prefill, so that a long prompt never stalls the others; then waiting ones are admitted in the order of
(priority, arrival). One whose next block is just being computed by another waits for the step's end and finds it
in the cache: what requests that come together share is computed once, and nobody waits longer than that step for
it. When a running sequence needs a block and none is free, the sequence with the worst
(priority, arrival) loses all its blocks and waits again; it recomputes later, mostly from the prefix cache since
its freed blocks keep their names. A step that preempted admits nobody, unless it would compute nothing else.

Progress: an empty step means that holds, which only their owners free, leave no room for the first in the queue.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from core_node.engine.blocks import BlockPool, blocks_for
from core_node.engine.chunk import Chunk as Chunk
from core_node.engine.policies import Policy, Queued, Snapshot, aged_priority_s, priority
from core_node.engine.sequence import Phase, Sequence
from core_node.engine.step_time import StepTimeFit, StepWork
from core_node.engine.swap import BlockCopy, CopyKind, HostBlocks, MoveRates, swap_is_cheaper
from mesh.errors import Overloaded
from mesh.kv.hashing import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`watermark_blocks` stay free at an admission while others run, which limits preemption. `tpot_target_s`: steps
    in which somebody decodes take at most so much prefill that they last no longer than this; 0: no limit of this
    kind. `host_blocks`: room for swapped KV. `policy`, `ageing_s`, `starvation_s`: see policies."""

    max_step_tokens: int
    max_running: int
    max_waiting: int
    watermark_blocks: int = 0
    tpot_target_s: float = 0.0
    host_blocks: int = 0
    policy: Policy = priority
    ageing_s: float = 10.0
    starvation_s: float = 30.0


class Scheduler:
    """Owns the waiting and the running sequences and all block book-keeping."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.step_time = StepTimeFit()
        self.rates = MoveRates()  # the owner keeps them up to date
        self.waiting: list[Sequence] = []  # sorted by rank
        self.running: list[Sequence] = []
        self._host = HostBlocks(limits.host_blocks)
        self._copies: list[BlockCopy] = []
        self.preempted_total = 0
        self.swapped_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0

    # --- coming and going ---------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise Overloaded if the queue is full."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting, at most {self.limits.max_waiting} may")

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises Overloaded if the queue is full."""
        self.check_room()
        sequence.aged_s = aged_priority_s(sequence.priority, sequence.arrived_s, self.limits.ageing_s)
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended or was cancelled: free everything. Works in any phase but GONE."""
        self._detach(sequence)
        self._free(sequence)
        sequence.phase = Phase.GONE

    def hold(self, sequence: Sequence) -> None:
        """Take it out of the schedule with its blocks; from here the caller owns it."""
        self._detach(sequence)
        self._drop_swapped(sequence)
        sequence.phase = Phase.HELD

    def adopt(self, hold: Sequence, sequence: Sequence) -> None:
        """Give a hold's KV to a new sequence; the hold is GONE. `hold.computed` <= `sequence.n_tokens`, and the
        tokens agree. A position is always left to compute, for its logits."""
        assert hold.phase is Phase.HELD
        keep, computed = len(hold.blocks), hold.computed
        if computed >= sequence.n_tokens:
            # Redo the last block in a new one: the old one may be named and shared, so it is not written again.
            keep = (sequence.n_tokens - 1) // BLOCK_TOKENS
            computed = keep * BLOCK_TOKENS
        keep = min(keep, blocks_for(computed))
        self.pool.free(hold.blocks[keep:])
        sequence.blocks, sequence.computed, sequence.cached = hold.blocks[:keep], computed, computed
        sequence.named = min(hold.named, keep)
        hold.blocks, hold.computed, hold.named, hold.phase = [], 0, 0, Phase.GONE
        self._name_full_blocks(sequence)

    def open_hold(self, hold: Sequence) -> None:
        """Start an import: cached prefix first, then blocks for all known tokens, so that a transfer that has
        begun cannot run out of room for them. Raises Overloaded with nothing taken."""
        hits = self.pool.find(hold.hashes(hold.n_tokens // BLOCK_TOKENS))
        need = blocks_for(hold.n_tokens) - len(hits)
        free = self.pool.n_free_without(hits)
        if need > free:
            raise Overloaded(f"the import needs {need} KV blocks, {free} of {self.pool.n_blocks} are free")
        self.pool.take(hits)
        hold.blocks = hits + self.pool.allocate(need)
        hold.computed, hold.named, hold.phase = len(hits) * BLOCK_TOKENS, len(hits), Phase.HELD

    def grow_hold(self, hold: Sequence, n_tokens: int) -> None:
        """Room for `n_tokens` positions. Raises Overloaded with nothing changed."""
        need = blocks_for(n_tokens) - len(hold.blocks)
        if need > self.pool.n_free:
            raise Overloaded(f"the import needs {need} more KV blocks, {self.pool.n_free} are free")
        if need > 0:
            hold.blocks += self.pool.allocate(need)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens that a lookup would find now; one position is always left for its logits."""
        return len(self._hits(sequence)) * BLOCK_TOKENS

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> list[Chunk]:
        """Chunks of the next step, those of one token first. Their blocks are allocated. Empty: nothing to do
        now (nobody waits, or nobody who waits fits). Carry out `take_copies` before anything is computed, even then."""
        step = _Step(self.limits.max_step_tokens)
        self.running.sort(key=lambda s: (s.remaining > 1, *s.rank))
        for sequence in list(self.running):
            if sequence.remaining > 1:
                self._limit_prefill(step, sequence.computed)
            if step.budget == 0:
                break
            if sequence.phase is Phase.RUNNING:  # else it was preempted by one before it
                self._continue(sequence, step)
        if self.waiting and step.budget > 0 and (not step.preempted or not step.chunks):
            self._admit(step, now_s)
        return sorted(step.chunks.values(), key=lambda c: c.n_tokens > 1)

    def take_copies(self) -> list[BlockCopy]:
        """Copies of blocks that the last `schedule` ordered; once."""
        copies, self._copies = self._copies, []
        return copies

    def computed(self, chunk: Chunk) -> None:
        """The step computed this chunk: its KV is there, full blocks get their names."""
        assert chunk.sequence.computed == chunk.start
        chunk.sequence.computed = chunk.stop
        self._name_full_blocks(chunk.sequence)

    def _limit_prefill(self, step: _Step, start: int) -> None:
        """Once a step, before its first prefill chunk (from position `start` on): what the target leaves for it."""
        if step.limited or self.limits.tpot_target_s <= 0:
            return
        step.limited = True
        if step.chunks:
            work = StepWork.of(step.chunks.values())
            step.budget = self.step_time.prefill_budget(self.limits.tpot_target_s, work, start, step.budget)

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        n = min(sequence.remaining, step.budget)
        need = blocks_for(sequence.computed + n) - len(sequence.blocks)
        while need > self.pool.n_free:
            victim = self._victim()
            self._preempt(victim, step)
            if victim is sequence:
                return
        self._grant(sequence, n, step)

    def _admit(self, step: _Step, now_s: float) -> None:
        step.note_pending()
        for sequence in self._queue(now_s):
            if len(self.running) >= self.limits.max_running:
                return
            hits = self._hits_of_waiting(sequence)
            if not sequence.blocks and step.computes(sequence, len(hits)):
                continue  # it finds those blocks in the cache in the next step
            # Order matters: look up, check that all of it fits, take the hits, and only then allocate.
            while not self._fits(sequence, hits):
                # If nobody runs, nobody will make room: then those behind give up the KV that they came with.
                if self.running or not self._reclaim_behind(sequence, step):
                    return
                hits = self._hits_of_waiting(sequence)
            self._limit_prefill(step, len(hits) * BLOCK_TOKENS)
            if step.budget == 0:
                return
            self._start(sequence, hits, step)
            if step.budget == 0:
                return

    def _queue(self, now_s: float) -> list[Sequence]:
        """Who waits, by the policy."""
        policy = self.limits.policy
        if policy is priority:  # that is how they are kept
            return list(self.waiting)
        snapshot = Snapshot(
            now_s=now_s,
            running=len(self.running),
            waiting=len(self.waiting),
            free_blocks=self.pool.n_free,
            ageing_s=self.limits.ageing_s,
            starvation_s=self.limits.starvation_s,
            cached_tokens=self._cached_tokens_of,
        )
        return sorted(self.waiting, key=lambda s: policy(s, snapshot))

    def _cached_tokens_of(self, request: Queued) -> int:
        assert isinstance(request, Sequence)
        return request.computed or self.cached_tokens(request)

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        need = blocks_for(sequence.n_tokens) - len(sequence.blocks) - len(hits)
        reserve = self.limits.watermark_blocks if self.running else 0
        return need + reserve <= self.pool.n_free_without(hits)

    def _start(self, sequence: Sequence, hits: list[int], step: _Step) -> None:
        came_with_kv = bool(sequence.blocks)
        if not came_with_kv:
            self.pool.take(hits)
            sequence.blocks, sequence.named = hits, len(hits)
            sequence.computed = len(hits) * BLOCK_TOKENS
            self._swap_in(sequence)
            self._copy_tail(sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.phase = Phase.RUNNING
        if not sequence.admitted:
            sequence.admitted = True
            self.prompt_tokens_total += sequence.n_tokens
            self.cached_tokens_total += 0 if came_with_kv else sequence.computed
            sequence.cached = sequence.computed
        self._grant(sequence, min(sequence.remaining, step.budget), step)
        step.note_pending_of(sequence)

    def _copy_tail(self, sequence: Sequence) -> None:
        """Copy on write of a block that cannot be shared, since this sequence writes into it at once: a full one whose
        last position must be computed again for its logits, or the last of a running sequence with the same tokens
        (another sample of one prompt)."""
        start, stop = sequence.computed, sequence.n_tokens - 1
        if start % BLOCK_TOKENS or not start < stop <= start + BLOCK_TOKENS - 1:
            return
        source = self._block_with(sequence, start, stop)
        if source is not None:
            target = self.pool.allocate(1)
            self._copies.append(BlockCopy(CopyKind.WITHIN, (source,), tuple(target)))
            sequence.blocks += target
            sequence.computed = stop

    def _block_with(self, sequence: Sequence, start: int, stop: int) -> int | None:
        at = start // BLOCK_TOKENS
        if sequence.n_tokens % BLOCK_TOKENS == 0:
            found = self.pool.find(sequence.hashes(at + 1)[at:])
            if found:
                return found[0]
        tail = sequence.token_ids[start:stop]
        for other in self.running:
            if (
                other.computed >= stop
                and other.token_ids[start:stop] == tail
                and (other.blocks[at - 1] == sequence.blocks[at - 1] if at else other.root == sequence.root)
            ):
                return other.blocks[at]
        return None

    # --- swapping -----------------------------------------------------------------------------------------------

    def _swap_out(self, victim: Sequence) -> None:
        """Copy its KV to the host if that is cheaper than computing it again and there is room."""
        n = blocks_for(victim.computed)
        if 0 < n <= self._host.n_free and swap_is_cheaper(victim.computed, n, self.rates):
            victim.swapped, victim.swapped_tokens = self._host.allocate(n), victim.computed
            self._copies.append(BlockCopy(CopyKind.OUT, tuple(victim.blocks[:n]), tuple(victim.swapped)))
            self.swapped_total += 1

    def _swap_in(self, sequence: Sequence) -> None:
        """Bring back what the cache has lost meanwhile."""
        found = len(sequence.blocks)
        if len(sequence.swapped) > found and sequence.swapped_tokens > sequence.computed:
            targets = self.pool.allocate(len(sequence.swapped) - found)
            self._copies.append(BlockCopy(CopyKind.IN, tuple(sequence.swapped[found:]), tuple(targets)))
            sequence.blocks += targets
            sequence.computed = sequence.swapped_tokens
            self._name_full_blocks(sequence)
        self._drop_swapped(sequence)

    def _drop_swapped(self, sequence: Sequence) -> None:
        self._host.free(sequence.swapped)
        sequence.swapped, sequence.swapped_tokens = [], 0

    def _reclaim_behind(self, first: Sequence, step: _Step) -> bool:
        """Take the blocks of the worst other waiting sequence that has some; False if none has."""
        owners = [s for s in self.waiting if s.blocks and s is not first]
        if owners:
            self._preempt(max(owners, key=lambda s: s.rank), step)
        return bool(owners)

    def _grant(self, sequence: Sequence, n: int, step: _Step) -> None:
        need = blocks_for(sequence.computed + n) - len(sequence.blocks)
        if need > 0:
            sequence.blocks += self.pool.allocate(need)
        step.chunks[id(sequence)] = Chunk(sequence, sequence.computed, n)
        step.budget -= n

    def _victim(self) -> Sequence:
        """Worst rank of all that hold blocks here: a waiting one may (KV that came with it)."""
        return max((s for s in (*self.running, *self.waiting) if s.blocks), key=lambda s: s.rank)

    def _preempt(self, victim: Sequence, step: _Step) -> None:
        granted = step.chunks.pop(id(victim), None)
        if granted is not None:
            step.budget += granted.n_tokens
        self._swap_out(victim)
        self._detach(victim)
        self.pool.free(victim.blocks)
        victim.blocks, victim.computed, victim.named = [], 0, 0
        self._enqueue(victim)
        step.preempted = True
        self.preempted_total += 1

    # --- book-keeping -------------------------------------------------------------------------------------------

    @property
    def used_tokens(self) -> int:
        """Positions in blocks that somebody owns; free blocks that are still findable do not count."""
        return self.pool.n_used * BLOCK_TOKENS

    def check(self, holds: Iterator[Sequence]) -> None:
        """Raise AssertionError unless every block is accounted for. `holds` are those that the caller owns."""
        scheduled = [*self.waiting, *self.running]
        assert all(s.phase is Phase.WAITING for s in self.waiting)
        assert all(s.phase is Phase.RUNNING for s in self.running)
        assert [s.rank for s in self.waiting] == sorted(s.rank for s in self.waiting)
        assert len({id(s) for s in scheduled}) == len(scheduled), "a sequence is scheduled twice"
        everyone = [*scheduled, *holds]
        for s in everyone:
            assert blocks_for(s.computed) <= len(s.blocks), f"{s.computed} positions in {len(s.blocks)} blocks"
            assert s.named * BLOCK_TOKENS <= s.computed, "a block was named before it was full"
            assert not s.swapped or (s.phase is Phase.WAITING and not s.blocks), "swapped KV of one that has blocks"
        self.pool.check(s.blocks for s in everyone)
        self._host.check([s.swapped for s in everyone])

    def _hits_of_waiting(self, sequence: Sequence) -> list[int]:
        return [] if sequence.blocks else self._hits(sequence)

    def _hits(self, sequence: Sequence) -> list[int]:
        return self.pool.find(sequence.hashes((sequence.n_tokens - 1) // BLOCK_TOKENS))

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.rank)
        sequence.phase = Phase.WAITING

    def _detach(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._drop_swapped(sequence)
        self.pool.free(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.named = [], 0, 0

    def _name_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.computed // BLOCK_TOKENS
        if full > sequence.named:
            hashes = sequence.hashes(full)
            blocks = list(sequence.blocks)  # a new table: blocks in the middle of it may be replaced by equal ones
            for i in range(sequence.named, full):
                blocks[i] = self.pool.name(blocks[i], hashes[i])
            sequence.blocks, sequence.named = blocks, full


class _Step:
    """The budget object of one schedule() call."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[int, Chunk] = {}
        self.preempted = False
        self.limited = False
        self._pending: set[bytes] = set()

    def note_pending(self) -> None:
        """Look at what the chunks granted so far compute."""
        for chunk in self.chunks.values():
            if chunk.n_tokens > 1:
                self.note_pending_of(chunk.sequence)

    def note_pending_of(self, sequence: Sequence) -> None:
        """This sequence's full blocks that have no names yet will have them after this step: whenever budget is left
        for somebody else, every chunk so far goes up to its sequence's last token."""
        self._pending.update(sequence.hashes(sequence.n_tokens // BLOCK_TOKENS)[sequence.named :])

    def computes(self, sequence: Sequence, n_hits: int) -> bool:
        """Whether the block that this sequence would compute first is being computed by another one."""
        full = (sequence.n_tokens - 1) // BLOCK_TOKENS
        return n_hits < full and sequence.hashes(n_hits + 1)[n_hits] in self._pending
