"""An engine core whose model can be foretold, and a naive model of what each run must give.

The pretended model stores each token's id and position as its KV. A step's logits are a function of the history *read
back through the block table*, so that a wrong, stale, shared or overwritten block gives wrong tokens. The naive model
knows only lists of tokens. Numbers given to the operations choose among what is there, so that any driver (Hypothesis,
a seeded walk) can use them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.engine.core import EngineCore
from core_node.engine.kv_pool import KvPool, slots_of
from core_node.engine.runner import Runner
from core_node.engine.sampler import Logits
from core_node.engine.scheduler import Chunk, SchedulerLimits
from core_node.engine.swap import MoveRates
from mesh.errors import Cancelled, Internal, MeshError, Overloaded
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.kv.slab import KvSlab
from mesh.node.engine import EngineInfo, Finished, Held, ImportSpec, Prefilled, RunEvent, RunId, RunSpec, Tokens
from mesh.node.sampling import SamplingParams, sample

VOCAB = 50
GEOMETRY = KvGeometry(
    architecture="pretended",
    n_layers=1,
    n_kv_heads=1,
    head_dim=2,
    rope_base=1.0,
    rope_scaling="none",
    tokenizer_hash="0" * 64,
)
SALTS = (b"tenant-a", b"tenant-b")


def logits_after(history: Seq[int]) -> NDArray[np.float32]:
    """f32 [VOCAB]: a function of the whole history."""
    seed = zlib.crc32(np.asarray(history, dtype="<i8").tobytes()) % 100_003
    return np.sin(np.arange(1, VOCAB + 1, dtype=np.float64) * (seed + 1)).astype(np.float32) * 4


class PretendedModel:
    """A StepModel. `fail_next`: the next step raises half-way, as a device may."""

    def __init__(self) -> None:
        self.fail_next = False
        self.computed_tokens = 0

    def compute(self, chunks: Seq[Chunk], wants_logits: Seq[bool], pool: KvPool, *, only_best: bool) -> Logits:
        for chunk in chunks:
            self.computed_tokens += chunk.n_tokens
            slots = slots_of(chunk.sequence.blocks, chunk.start, chunk.stop)
            pool.k[0, slots, 0, 0] = torch.tensor(chunk.sequence.token_ids[chunk.start : chunk.stop]).float()
            pool.k[0, slots, 0, 1] = torch.arange(chunk.start, chunk.stop).float()
            pool.v[0, slots, 0, :] = pool.k[0, slots, 0, :] + 1
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is pretended to be lost")
        rows = [self._row(chunk, pool) for chunk, wanted in zip(chunks, wants_logits, strict=True) if wanted]
        return Logits(
            best_ids=[int(row.argmax()) for row in rows], finite=[True] * len(rows), row=lambda i: rows[i].copy()
        )

    @staticmethod
    def _row(chunk: Chunk, pool: KvPool) -> NDArray[np.float32]:
        slots = slots_of(chunk.sequence.blocks, 0, chunk.stop)
        k, v = pool.k[0, slots, 0, :].numpy(), pool.v[0, slots, 0, :].numpy()
        assert (v == k + 1).all(), "K and V of one position come from different places"
        return logits_after([*k[:, 0].astype(int).tolist(), *(k[:, 1].astype(int) - np.arange(chunk.stop)).tolist()])


def expected_logits(token_ids: Seq[int]) -> NDArray[np.float32]:
    """What the pretended model gives if every position lies where it should."""
    return logits_after([*token_ids, *[0] * len(token_ids)])


@dataclass(slots=True, eq=False)
class Life:
    """One run as its caller sees it, and as it must be. `ended` is None while it goes on."""

    spec: RunSpec
    ids: list[int]
    ended: RunEvent | MeshError | None = None
    may_fail: bool = False

    def put(self, item: RunEvent | MeshError) -> None:
        assert self.ended is None, f"{self.spec.run_id} goes on after its end"
        match item:
            case Tokens(ids=ids):
                for token_id in ids:
                    s = self.spec
                    want = sample(expected_logits(self.ids), s.sampling, self.ids, s.prompt_tokens).token_id
                    assert token_id == want, f"{s.run_id}: token {len(self.ids)} is {token_id}, not {want}"
                    self.ids.append(token_id)
            case Prefilled(tokens=tokens, cached=cached):
                assert 0 <= cached < tokens <= len(self.ids)
            case Finished():
                assert len(self.ids) - self.spec.prompt_tokens == self.spec.sampling.max_tokens
                self.ended = item
            case Held(kv_tokens=kv_tokens):
                assert kv_tokens <= len(self.ids)
                self.ended = item
            case MeshError():
                self.ended = item


@dataclass(slots=True, eq=False)
class HeldKv:
    """A hold: whose tokens, in which namespace."""

    run_id: RunId
    ids: list[int]
    prompt_tokens: int
    salt: bytes
    sampling: SamplingParams
    import_limit: int = 0  # 0: not an import


@dataclass(slots=True)
class World:
    """Operations on the core; after each, `check`."""

    n_blocks: int = 12
    limits: SchedulerLimits = field(
        default_factory=lambda: SchedulerLimits(
            max_step_tokens=40, max_running=5, max_waiting=8, watermark_blocks=1, host_blocks=7
        )
    )
    lives: list[Life] = field(default_factory=list)
    holds: list[HeldKv] = field(default_factory=list)
    names: int = 0
    ended_by_themselves: int = 0
    model: PretendedModel = field(default_factory=PretendedModel)
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        pool = KvPool(GEOMETRY, self.n_blocks, KvDtype.F32, torch.device("cpu"))
        info = EngineInfo(
            model_id="pretended",
            geometry=GEOMETRY,
            weights_lineage="pretended",
            weights_dtype="f32",
            kv_dtype=KvDtype.F32,
            max_context_tokens=self.n_blocks * BLOCK_TOKENS,
            kv_capacity_tokens=self.n_blocks * BLOCK_TOKENS,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            build="test",
        )
        ticks = itertools.count()
        self.core = EngineCore(
            info,
            Runner(self.model, pool, frozenset()),
            self.limits,
            new_stream=None,  # type: ignore[arg-type] - nobody has stop strings
        )
        # Not what was measured: two of three victims are swapped if there is room, the same ones each time.
        self.core._rates = lambda: MoveRates(  # type: ignore[method-assign]
            recompute_tokens_per_s=100.0 if next(ticks) % 3 else 1e9, copy_bytes_per_s=1e6, block_bytes=1
        )

    # --- operations ---------------------------------------------------------------------------------------------

    def add(self, branch: int, n_tokens: int, salt: int, priority: int, max_tokens: int, sampled: int) -> None:
        """Prompts share heads on purpose, and often end at a block's border."""
        n_tokens = -(-n_tokens // BLOCK_TOKENS) * BLOCK_TOKENS if n_tokens % 3 == 0 else n_tokens
        ids = [i % 40 if i < 20 else (branch * 7 + i) % 50 for i in range(n_tokens)]
        self._run(ids, n_tokens, SALTS[salt % 2], _sampling(max_tokens, sampled), priority)

    def fork(self, which: int, max_tokens: int, sampled: int) -> None:
        """Another sample of a run that is there, from all that it has now."""
        if self.lives:
            life = self.lives[which % len(self.lives)]
            ids = list(life.ids)
            self._run(ids, len(ids), life.spec.salt, _sampling(max_tokens, sampled), life.spec.priority)

    def samples(self, branch: int, n_tokens: int, n: int) -> None:
        """`n` samples of one prompt that come together."""
        for i in range(n):
            self.add(branch, n_tokens, 0, 0, 6, 1 + i)

    def prefill(self, branch: int, n_tokens: int, salt: int) -> None:
        ids = [(branch * 7 + i) % 50 if i >= 20 else i % 40 for i in range(n_tokens)]
        self._run(ids, n_tokens, SALTS[salt % 2], _sampling(1, 0), 0, prefill_only=True)

    def step(self, n: int) -> None:
        for _ in range(n):
            if not self.core.step():
                break
            self._collect()

    def fail_a_step(self) -> None:
        """Those in the step are lost, nobody else."""
        self.model.fail_next = True
        for life in self.lives:
            life.may_fail = True
        self.step(1)
        self.model.fail_next = False
        for life in self.lives:
            life.may_fail = False

    def abort(self, which: int, by_consumer: bool) -> None:
        if self.lives:
            life = self.lives.pop(which % len(self.lives))
            if by_consumer:
                self.core.cancel(life.spec.run_id, life)
                assert life.ended is None
            else:
                self.core.release(life.spec.run_id)
                assert isinstance(life.ended, Cancelled)

    def pause(self, which: int) -> None:
        if self.lives:
            self.core.pause(self.lives[which % len(self.lives)].spec.run_id)
            self._collect()

    def resume(self, which: int, priority: int) -> None:
        if self.holds:
            hold = self.holds[which % len(self.holds)]
            run_id = hold.run_id
            self._run(hold.ids, hold.prompt_tokens, hold.salt, hold.sampling, priority, kv_from=run_id)

    def release(self, which: int) -> None:
        if self.holds:
            self.core.release(self.holds.pop(which % len(self.holds)).run_id)

    def export_and_import(self, which: int, whole: bool, n_blocks_more: int) -> None:
        """Copy the KV of a run or hold into an import of the other tenant, as a move between nodes would."""
        sources = [(x.spec.run_id, x.ids, x.spec.prompt_tokens, x.spec.salt, x.spec.sampling) for x in self.lives]
        sources += [(x.run_id, x.ids, x.prompt_tokens, x.salt, x.sampling) for x in self.holds]
        if not sources:
            return
        run_id, ids, prompt_tokens, salt, sampling = sources[which % len(sources)]
        n = self.core.kv_tokens(run_id)
        if n == 0:
            return
        slab = self.core.export_kv(run_id, 0, n)
        assert slab.k[0, :, 0, 0].astype(int).tolist() == ids[:n]
        other = SALTS[1 - SALTS.index(salt)]
        limit = min(self.core.info.max_context_tokens, len(ids) + n_blocks_more)
        hold = HeldKv(self._name(), list(ids), prompt_tokens, other, sampling, limit)
        try:
            have = self.core.open_import(
                ImportSpec(run_id=hold.run_id, token_ids=tuple(ids), max_tokens=limit, salt=other)
            )
        except Overloaded:
            return
        self.holds.append(hold)
        stop = n if whole else max(have, n // 2)
        if have < stop:
            self.core.write_kv(hold.run_id, slab.tokens(have, stop))

    def refused_write(self, which: int) -> None:
        """A gap is refused and costs nothing."""
        imports = [h for h in self.holds if h.import_limit]
        if imports:
            run_id = imports[which % len(imports)].run_id
            n = self.core.kv_tokens(run_id)
            zeros = np.zeros((1, 1, 1, 2), np.float32)
            try:
                self.core.write_kv(run_id, KvSlab(start=n + 1, dtype=KvDtype.F32, k=zeros, v=zeros))
            except MeshError:
                assert self.core.kv_tokens(run_id) == n
            else:
                raise AssertionError("a gap was written")

    # --- the naive model ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """The books agree with each other and with what is there."""
        self.core.check_integrity()
        load = self.core.load()
        assert load.running + load.waiting == len(self.lives)
        if not self.lives and not self.holds:
            assert load.kv_used_tokens == 0, "a block leaked"
        for hold in self.holds:
            n = self.core.kv_tokens(hold.run_id)
            if n:
                got = self.core.export_kv(hold.run_id, 0, n).k[0, :, 0, :].astype(int)
                assert got[:, 0].tolist() == hold.ids[:n]
                assert got[:, 1].tolist() == list(range(n))

    def finish(self) -> None:
        """Let everything end; nothing may be left."""
        for _ in range(5_000):
            while self.holds:
                self.release(0)
            if not self.core.step():
                break
            self._collect()
        assert not self.lives, "a run never ended"
        self.check()

    def _run(
        self,
        ids: list[int],
        prompt_tokens: int,
        salt: bytes,
        sampling: SamplingParams,
        priority: int,
        *,
        kv_from: RunId | None = None,
        prefill_only: bool = False,
    ) -> None:
        spec = RunSpec(
            run_id=kv_from or self._name(),
            token_ids=tuple(ids),
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            salt=salt,
            priority=priority,
            kv_from=kv_from,
            prefill_only=prefill_only,
        )
        limit = self.core.info.max_context_tokens - prompt_tokens
        if limit < sampling.max_tokens:
            spec = replace(spec, sampling=replace(sampling, max_tokens=max(1, limit)))
        life = Life(spec, list(ids))
        try:
            self.core.add_run(spec, life)
        except MeshError:
            assert life.ended is None
            return
        self.holds = [h for h in self.holds if h.run_id != kv_from]
        self.lives.append(life)
        self._collect()

    def _collect(self) -> None:
        going = []
        for life in self.lives:
            if life.ended is None:
                going.append(life)
            elif isinstance(life.ended, Held):
                s = life.spec
                self.holds.append(HeldKv(s.run_id, life.ids, s.prompt_tokens, s.salt, s.sampling))
            elif isinstance(life.ended, Finished):
                self.ended_by_themselves += 1
            else:
                assert isinstance(life.ended, Internal), life.ended
                assert life.may_fail, life.ended
        self.lives = going

    def _name(self) -> RunId:
        self.names += 1
        return RunId(f"r{self.names}")


def _sampling(max_tokens: int, sampled: int) -> SamplingParams:
    """0 is greedy; any other number is a sample index."""
    return SamplingParams(
        max_tokens=max_tokens, seed=11, temperature=1.0 if sampled else 0.0, sample_index=sampled, ignore_eos=True
    )
