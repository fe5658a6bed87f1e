"""Random lives of sequences against the books: no block leaks, none has two owners, every run ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from core_node.engine.blocks import BlockPool
from core_node.engine.scheduler import Scheduler, SchedulerLimits
from core_node.engine.sequence import Phase, Sequence
from core_node.engine.swap import BlockCopy, CopyKind, MoveRates
from mesh.errors import Overloaded
from mesh.kv.hashing import BLOCK_TOKENS, root_hash
from mesh.node.engine import RunId

N_BLOCKS = 7
SALTS = (b"a", b"b")


def content(sequence: Sequence, block: int) -> tuple[bytes, tuple[int, ...]]:
    """What a full block of a sequence must hold: all tokens up to its end, and the namespace."""
    return sequence.root, tuple(sequence.token_ids[: (block + 1) * BLOCK_TOKENS])


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts share prefixes on purpose. `written` is a naive model of the pool: what each block holds."""

    sequences: Bundle[Sequence] = Bundle("sequences")
    holds: Bundle[Sequence] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        limits = SchedulerLimits(max_step_tokens=24, max_running=4, max_waiting=6, watermark_blocks=1, host_blocks=4)
        self.s = Scheduler(BlockPool(N_BLOCKS), limits)
        self.arrivals = 0
        self.live: list[Sequence] = []
        self.held: list[Sequence] = []
        self.written: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.host: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.s.rates = MoveRates(
            recompute_tokens_per_s=1.0, copy_bytes_per_s=1.0, block_bytes=1
        )  # swap if there is room

    def new(self, branch: int, n_tokens: int, salt: bytes, priority: int = 0) -> Sequence:
        self.arrivals += 1
        n_tokens = -(-n_tokens // BLOCK_TOKENS) * BLOCK_TOKENS if n_tokens % 3 == 0 else n_tokens  # borders matter
        ids = [i if i < 20 else branch * 100 + i for i in range(n_tokens)]
        return Sequence(
            run_id=RunId(f"r{self.arrivals}"),
            token_ids=ids,
            root=root_hash("layout", salt),
            priority=priority,
            arrival=self.arrivals,
        )

    @rule(
        target=sequences,
        branch=st.integers(0, 2),
        n_tokens=st.integers(1, 80),
        salt=st.sampled_from(SALTS),
        priority=st.integers(0, 2),
    )
    def add(self, branch: int, n_tokens: int, salt: bytes, priority: int) -> Sequence:
        sequence = self.new(branch, n_tokens, salt, priority)
        try:
            self.s.add(sequence)
        except Overloaded:
            sequence.phase = Phase.GONE
        else:
            self.live.append(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: Sequence) -> None:
        if sequence in self.live:
            self.s.remove(sequence)
            self.live.remove(sequence)

    @rule(target=holds, sequence=consumes(sequences))
    def pause(self, sequence: Sequence) -> Sequence:
        if sequence in self.live:
            self.s.hold(sequence)
            self.live.remove(sequence)
            self.held.append(sequence)
        return sequence

    @rule(target=holds, branch=st.integers(0, 2), n_tokens=st.integers(1, 40), salt=st.sampled_from(SALTS))
    def open_import(self, branch: int, n_tokens: int, salt: bytes) -> Sequence:
        hold = self.new(branch, n_tokens, salt)
        try:
            self.s.open_hold(hold)
        except Overloaded:
            hold.phase = Phase.GONE
        else:
            self.held.append(hold)
        return hold

    @rule(hold=holds, n=st.one_of(st.none(), st.integers(1, 30)))
    def write(self, hold: Sequence, n: int | None) -> None:
        n = hold.remaining if n is None else n  # None: all that is missing
        if hold in self.held and 0 < n <= hold.remaining:
            try:
                self.s.grow_hold(hold, hold.computed + n)
            except Overloaded:
                return
            self.write_positions(hold, hold.computed, hold.computed + n)
            hold.computed += n

    @rule(target=sequences, hold=consumes(holds), extra=st.one_of(st.just(0), st.integers(1, 20)))
    def resume(self, hold: Sequence, extra: int) -> Sequence:
        sequence = self.new(0, 1, SALTS[0])
        if hold not in self.held:
            sequence.phase = Phase.GONE
            return sequence
        sequence.token_ids = [*hold.token_ids, *range(7000, 7000 + extra)]
        sequence.root = hold.root
        if len(self.s.waiting) >= self.s.limits.max_waiting or sequence.n_tokens > N_BLOCKS * BLOCK_TOKENS:
            self.s.remove(hold)
            sequence.phase = Phase.GONE
        else:
            self.s.adopt(hold, sequence)
            self.s.add(sequence)
            self.live.append(sequence)
        self.held.remove(hold)
        return sequence

    @rule(hold=consumes(holds))
    def release(self, hold: Sequence) -> None:
        if hold in self.held:
            self.s.remove(hold)
            self.held.remove(hold)

    @rule(n=st.integers(1, 40))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def step(self) -> None:
        chunks = self.s.schedule(0.0)
        self.copy(self.s.take_copies())
        assert sum(c.n_tokens for c in chunks) <= self.s.limits.max_step_tokens
        assert len({id(c.sequence) for c in chunks}) == len(chunks)
        assert chunks or self.held or not self.live, "nobody runs though nothing is in the way"
        for chunk in chunks:
            self.write_positions(chunk.sequence, chunk.start, chunk.stop)
        for chunk in chunks:
            completes = chunk.completes
            self.s.computed(chunk)
            if completes:
                chunk.sequence.token_ids.append(9000 + chunk.stop)
                if chunk.sequence.n_tokens >= N_BLOCKS * BLOCK_TOKENS or chunk.stop % 53 == 0:
                    self.s.remove(chunk.sequence)
                    self.live.remove(chunk.sequence)

    def copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            source = self.host if copy.kind is CopyKind.IN else self.written
            target = self.host if copy.kind is CopyKind.OUT else self.written
            for i, j in zip(copy.sources, copy.targets, strict=True):
                target[j] = source[i]

    def write_positions(self, sequence: Sequence, start: int, stop: int) -> None:
        """A write goes only to a block that this sequence alone owns."""
        for i in range(start // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1):
            block = sequence.blocks[i]
            owners = [q for q in (*self.live, *self.held) if block in q.blocks]
            assert owners == [sequence], f"block {block} is written by one of {len(owners)} owners"
            self.written[block] = content(sequence, i)

    @invariant()
    def books_agree(self) -> None:
        self.s.check(iter(self.held))
        assert self.s.pool.n_free + self.s.pool.n_used == N_BLOCKS
        assert len(self.s.running) <= self.s.limits.max_running

    @invariant()
    def computed_blocks_hold_their_tokens(self) -> None:
        """Whatever was shared, freed, reused or found again: a full block holds what its owner thinks."""
        for sequence in (*self.live, *self.held):
            for i in range(min(sequence.computed, sequence.n_tokens) // BLOCK_TOKENS):
                assert self.written[sequence.blocks[i]][0] == sequence.root
                assert self.written[sequence.blocks[i]][1] == content(sequence, i)[1]

    def teardown(self) -> None:
        for hold in list(self.held):
            self.release(hold)
        for _ in range(3_000):
            if not self.live:
                break
            self.step()
        assert not self.live, "a run never ended"
        assert self.s.pool.n_used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
