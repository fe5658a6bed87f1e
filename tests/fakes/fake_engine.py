"""FakeEngine: the Engine protocol over a toy model, for tests of everything above an engine.

The toy model reads nothing but its KV: each KV row encodes token id and position, and the logits of the next token
are a function of all rows so far. Wrong, missing or swapped KV therefore gives other tokens, and a test can read
from a slab what it is of. Rows hold small integers and one 127 per 32, so that f16, bf16 and q8_0 carry them
exactly. Everything runs on the event loop; `step_delay_s` sleeps between steps (0: only yields).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import AlreadyExists, Cancelled, InvalidRequest, NotFound, Overloaded
from mesh.kv.elements import convert, from_f32, to_f32
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.hashing import BLOCK_TOKENS, block_hashes
from mesh.kv.slab import KvSlab
from mesh.node.engine import (
    EngineInfo,
    EngineLoad,
    Finished,
    FinishReason,
    Held,
    ImportSpec,
    Prefilled,
    RunEvent,
    RunId,
    RunSpec,
    SelfTest,
    Tokens,
)
from mesh.node.sampling import sample
from mesh.node.stop import StopMatcher

VOCAB = 512
EOS = 2
GEOMETRY = KvGeometry(
    architecture="toy", n_layers=2, n_kv_heads=2, head_dim=32, rope_base=1e4, rope_scaling="none",
    tokenizer_hash="0" * 64,
)  # fmt: skip
_HEADS = np.arange(2)[:, None]
_WEIGHTS = np.random.default_rng(1).integers(1, 2**31, size=(2, 2, 1, 2, 32), dtype=np.int64)  # [k or v, layer, 1, ...]


class FakeTextStream:
    """One letter per token."""

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def flush(self) -> str:
        return ""


def kv_rows(token_ids: tuple[int, ...], start: int) -> NDArray[np.float32]:
    """Rows of the tokens at positions start, start + 1 ...: f32 [2 (K, V), layers, tokens, heads, dim]."""
    ids = np.asarray(token_ids, dtype=np.int64)[:, None, None]
    positions = start + np.arange(len(token_ids))[:, None, None]
    lanes = np.arange(32)[None, None, :]
    rows = np.empty((2, GEOMETRY.n_layers, len(token_ids), 2, 32), dtype=np.float32)
    for kind in range(2):
        for layer in range(GEOMETRY.n_layers):
            row = (ids * 31 + positions * 17 + layer * 7 + _HEADS * 3 + lanes * 11 + kind) % 100
            row[..., 0] = 127
            row[..., 1], row[..., 2] = ids[..., 0] % 100, ids[..., 0] // 100
            row[..., 3], row[..., 4] = positions[..., 0] % 100, positions[..., 0] // 100
            rows[kind, layer] = row
    return rows


def tokens_of(slab: KvSlab) -> tuple[int, ...]:
    """The token ids that a slab is of; fails if positions or any row are not what the toy model would write."""
    k = to_f32(slab.k, slab.dtype)[0, :, 0]
    ids = tuple(int(i) for i in np.rint(k[:, 1] + 100 * k[:, 2]))
    want = kv_rows(ids, slab.start)
    got = np.stack([to_f32(slab.k, slab.dtype), to_f32(slab.v, slab.dtype)])
    assert np.array_equal(got, want), "the slab is not of these tokens at these positions"
    return ids


@dataclass(eq=False)
class _Sequence:
    """One run, hold or import."""

    run_id: RunId
    ids: list[int]
    salt: bytes
    rows: NDArray[Any]  # [2, layers, room, heads, dim] in pool dtype
    kv: int = 0
    reserved: int = 0
    state: int = 1  # of the first `digested` rows
    digested: int = 0
    running: bool = False
    importing: int | None = None  # max_tokens
    tail: tuple[int, int] | None = None  # first and one after the last position of a tail without its head
    pause: bool = False
    dead: bool = False
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """See the module's docstring. Admission reserves all KV that a run may need, so nothing is ever preempted."""

    def __init__(
        self,
        *,
        capacity_tokens: int = 4096,
        max_context_tokens: int = 1024,
        kv_dtype: KvDtype = KvDtype.F16,
        step_delay_s: float = 0.0,
        prefill_chunk_tokens: int = 64,
        model_id: str = "toy",
        weights_lineage: str = "toy-1",
        geometry: KvGeometry = GEOMETRY,
    ) -> None:
        self._info = EngineInfo(
            model_id=model_id,
            geometry=geometry,
            weights_lineage=weights_lineage,
            weights_dtype="toy",
            kv_dtype=kv_dtype,
            max_context_tokens=max_context_tokens,
            kv_capacity_tokens=capacity_tokens,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            build="fake-engine 1",
        )
        self.step_delay_s = step_delay_s
        self.gate: asyncio.Event | None = None  # if set, each step waits for it
        self._chunk = prefill_chunk_tokens
        self._sequences: dict[RunId, _Sequence] = {}
        self._waiting: list[tuple[int, int, _Sequence, int]] = []  # priority, arrival, who, tokens
        self._arrivals = 0
        self._cache: OrderedDict[bytes, NDArray[Any]] = OrderedDict()
        self._closed = False
        self._measured = False
        self._cached_total = 0
        self._prompt_total = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def hold_ids(self) -> list[RunId]:
        """Holds and open imports: what is left when nothing runs."""
        return [s.run_id for s in self._sequences.values() if not s.running]

    async def start(self) -> None:
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for sequence in list(self._sequences.values()):
            self._drop(sequence)

    # Runs

    async def generate(self, spec: RunSpec) -> AsyncGenerator[RunEvent, None]:
        if self._closed:
            raise Cancelled("the engine is closed")
        sequence = self._open_run(spec)
        try:
            await self._wait_admission(sequence)
            async for event in self._compute(sequence, spec):
                yield event
                if isinstance(event, Held):
                    return
        finally:
            if sequence.running:
                self._drop(sequence)

    def _open_run(self, spec: RunSpec) -> _Sequence:
        limit = self._info.max_context_tokens
        left = spec.sampling.max_tokens - (len(spec.token_ids) - spec.prompt_tokens)
        need = len(spec.token_ids) if spec.prefill_only else min(len(spec.token_ids) + left, limit)
        if len(spec.token_ids) > limit or need > self._info.kv_capacity_tokens:
            raise Overloaded(f"{need} tokens do not fit {self._info.kv_capacity_tokens}")
        if spec.run_id in self._sequences and spec.run_id != spec.kv_from:
            raise AlreadyExists(f"{spec.run_id} is in use")
        sequence = self._sequence(spec.run_id, spec.token_ids, spec.salt, need)
        if spec.kv_from is not None:
            self._continue(sequence, spec, need)
        sequence.running = True
        self._sequences[spec.run_id] = sequence
        if sequence.reserved < need:
            self._arrivals += 1
            self._waiting.append((spec.priority, self._arrivals, sequence, need))
            self._waiting.sort(key=lambda w: w[:2])
            self._admit()
        else:
            sequence.admitted.set()
        return sequence

    def _continue(self, sequence: _Sequence, spec: RunSpec, need: int) -> None:
        hold = self._sequences.get(spec.kv_from or RunId(""))
        if hold is None or hold.running:
            raise NotFound(f"no hold {spec.kv_from}")
        most = len(spec.token_ids) - (0 if spec.prefill_only else 1)
        if hold.tail is not None:
            raise InvalidRequest("the hold has no head yet", field="kv_from")
        known = min(len(hold.ids), hold.kv)
        if hold.kv > most or tuple(hold.ids[:known]) != spec.token_ids[:known]:
            raise InvalidRequest("the hold is of other tokens", field="kv_from")
        if self._free() + hold.reserved < need:
            raise Overloaded("no room to continue the hold")
        sequence.rows[:, :, : hold.kv] = hold.rows[:, :, : hold.kv]
        sequence.kv = hold.kv
        self._drop(hold)
        sequence.reserved = need

    async def _wait_admission(self, sequence: _Sequence) -> None:
        while not sequence.admitted.is_set() and not sequence.pause:
            self._check_alive(sequence)
            await asyncio.sleep(self.step_delay_s)
        self._check_alive(sequence)

    async def _compute(self, sequence: _Sequence, spec: RunSpec) -> AsyncGenerator[RunEvent, None]:
        cached = sequence.kv or self._from_cache(sequence, len(spec.token_ids) - 1)
        if not spec.kv_from:
            self._cached_total += cached
            self._prompt_total += len(spec.token_ids)
        while sequence.kv < len(spec.token_ids):
            if sequence.pause:
                yield self._hold(sequence)
                return
            stop = min(sequence.kv + self._chunk, len(spec.token_ids))
            self._write_rows(sequence, stop)
            if spec.prefill_only:
                yield Prefilled(stop, cached)
            await self._step(sequence)
        self._measured = True
        if spec.prefill_only:
            yield self._hold(sequence)
            return
        yield Prefilled(len(spec.token_ids), cached)
        async for event in self._decode(sequence, spec):
            yield event

    async def _decode(self, sequence: _Sequence, spec: RunSpec) -> AsyncGenerator[RunEvent, None]:
        matcher, text = StopMatcher(spec.sampling.stop), FakeTextStream()
        for token_id in spec.token_ids[spec.prompt_tokens :]:
            matcher.push(text.push(token_id))
        eos = frozenset[int]() if spec.sampling.ignore_eos else self._info.eos_token_ids
        while True:
            if sequence.pause:
                yield self._hold(sequence)
                return
            drawn = sample(
                self._logits(sequence), spec.sampling, sequence.ids, spec.prompt_tokens, self._info.eos_token_ids
            )
            sequence.ids.append(drawn.token_id)
            logprobs = () if spec.sampling.logprobs is None else ((drawn.logprob, drawn.top),)
            yield Tokens((drawn.token_id,), logprobs)
            matcher.push(text.push(drawn.token_id))
            done: Finished | None = None
            if matcher.matched is not None:
                done = Finished(FinishReason.STOP, matcher.matched)
            elif drawn.token_id in eos:
                done = Finished(FinishReason.STOP)
            elif len(sequence.ids) >= min(spec.prompt_tokens + spec.sampling.max_tokens, self._info.max_context_tokens):
                done = Finished(FinishReason.LENGTH)
            if done is not None:
                self._keep(sequence)
                self._drop(sequence)
                yield done
                return
            await self._step(sequence)
            if not sequence.pause:  # after a pause the last token has no KV
                self._write_rows(sequence, len(sequence.ids))

    async def _step(self, sequence: _Sequence) -> None:
        await asyncio.sleep(self.step_delay_s)
        if self.gate is not None:
            await self.gate.wait()
        self._check_alive(sequence)

    def _check_alive(self, sequence: _Sequence) -> None:
        if sequence.dead:
            raise Cancelled(f"{sequence.run_id} was released")

    def _hold(self, sequence: _Sequence) -> Held:
        sequence.running = False
        sequence.reserved = max(sequence.kv, 1)
        self._waiting = [w for w in self._waiting if w[2] is not sequence]
        self._admit()
        return Held(sequence.kv)

    async def pause(self, run_id: RunId) -> None:
        sequence = self._sequences.get(run_id)
        if sequence is None or not sequence.running:
            raise NotFound(f"no run {run_id}")
        sequence.pause = True

    async def release(self, run_id: RunId) -> None:
        with contextlib.suppress(KeyError):
            sequence = self._sequences[run_id]
            if not sequence.running and sequence.importing is None:
                self._keep(sequence)
            self._drop(sequence)

    # KV

    async def kv_tokens(self, run_id: RunId) -> int:
        return self._find(run_id).kv

    async def export_kv(self, run_id: RunId, start: int, stop: int) -> KvSlab:
        sequence = self._find(run_id)
        if not 0 <= start < stop <= sequence.kv:
            raise InvalidRequest(f"[{start}, {stop}) is not inside [0, {sequence.kv})")
        k, v = sequence.rows[:, :, start:stop].copy()
        return KvSlab(start=start, dtype=self._info.kv_dtype, k=k, v=v)

    async def open_import(self, spec: ImportSpec) -> int:
        if self._closed:
            raise Cancelled("the engine is closed")
        if spec.run_id in self._sequences:
            raise AlreadyExists(f"{spec.run_id} is in use")
        if spec.max_tokens > self._free():
            raise Overloaded(f"no room for {spec.max_tokens} tokens")
        sequence = self._sequence(spec.run_id, spec.token_ids, spec.salt, spec.max_tokens)
        sequence.importing = sequence.reserved = spec.max_tokens
        self._sequences[spec.run_id] = sequence
        self._evict()
        first = spec.first_position
        if first:
            if first % BLOCK_TOKENS or first >= len(spec.token_ids):
                raise InvalidRequest("first_position", field="first_position")
            sequence.reserved = spec.max_tokens - first
            sequence.tail = (first, first)
            return first
        return self._from_cache(sequence, len(spec.token_ids))

    async def write_kv(self, run_id: RunId, slab: KvSlab) -> None:
        sequence = self._find(run_id)
        if sequence.importing is None:
            raise InvalidRequest(f"{run_id} is not an import")
        slab.check(self._info.geometry)
        if slab.dtype not in (KvDtype.F16, self._info.kv_dtype):
            raise InvalidRequest(f"KV in {slab.dtype}")
        have = sequence.kv if sequence.tail is None else sequence.tail[1]
        if slab.start != have or slab.stop > sequence.importing:
            raise InvalidRequest(f"KV [{slab.start}, {slab.stop}) does not follow {have}")
        slab = convert(slab, self._info.kv_dtype)
        sequence.rows[0, :, slab.start : slab.stop] = slab.k
        sequence.rows[1, :, slab.start : slab.stop] = slab.v
        if sequence.tail is None:
            sequence.kv = slab.stop
        else:
            sequence.tail = (sequence.tail[0], slab.stop)

    async def join_kv(self, run_id: RunId, head: RunId) -> None:
        tail, front = self._find(run_id), self._find(head)
        if tail.tail is None or front.running or front.tail is not None:
            raise InvalidRequest(f"{run_id} is no tail of {head}", field="head")
        first, stop = tail.tail
        if front.kv != first or front.salt != tail.salt or front.ids[:first] != tail.ids[:first]:
            raise InvalidRequest(f"{head} does not fit", field="head")
        tail.rows[:, :, :first] = front.rows[:, :, :first]
        tail.kv, tail.tail = stop, None
        self._drop(front)
        tail.reserved = tail.importing or 0

    async def cached_tokens(self, token_ids: tuple[int, ...], salt: bytes) -> int:
        return sum(BLOCK_TOKENS for _ in self._cached_blocks(token_ids, salt, len(token_ids) - 1))

    # Facts

    async def load(self) -> EngineLoad:
        live = self._sequences.values()
        waiting = [w[2] for w in self._waiting]
        return EngineLoad(
            running=sum(s.running for s in live) - len(waiting),
            waiting=len(waiting),
            waiting_prefill_tokens=sum(len(s.ids) - s.kv for s in waiting),
            kv_used_tokens=sum(s.kv if s.running else s.reserved for s in live),
            kv_capacity_tokens=self._info.kv_capacity_tokens,
            prefill_tokens_per_s=1000.0 if self._measured else 0.0,
            decode_tokens_per_s=50.0 if self._measured else 0.0,
            cached_tokens_total=self._cached_total,
            prompt_tokens_total=self._prompt_total,
        )

    async def self_test(self) -> SelfTest:
        self._measured = True
        return SelfTest(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0)

    async def check_integrity(self) -> None:
        used = sum(s.reserved for s in self._sequences.values()) + len(self._cache) * BLOCK_TOKENS
        assert 0 <= used <= self._info.kv_capacity_tokens, "more KV than there is"
        for run_id, s in self._sequences.items():
            assert s.run_id == run_id
            assert not s.dead
            assert s.kv <= s.rows.shape[2]
        assert all(w[2].run_id in self._sequences for w in self._waiting), "a dead run waits"

    # Memory

    def _sequence(self, run_id: RunId, ids: tuple[int, ...], salt: bytes, room: int) -> _Sequence:
        g = self._info.geometry
        shape = (2, g.n_layers, max(room, len(ids)) + 1, g.n_kv_heads, g.head_dim)
        return _Sequence(run_id, list(ids), salt, np.zeros(shape, dtype=self._info.kv_dtype.storage))

    def _find(self, run_id: RunId) -> _Sequence:
        sequence = self._sequences.get(run_id)
        if sequence is None:
            raise NotFound(f"no run or hold {run_id}")
        return sequence

    def _free(self) -> int:
        """Tokens that are free or only cached."""
        return self._info.kv_capacity_tokens - sum(s.reserved for s in self._sequences.values())

    def _evict(self) -> None:
        while self._cache and len(self._cache) * BLOCK_TOKENS > self._free():
            self._cache.popitem(last=False)

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][3] <= self._free():
            _, _, sequence, need = self._waiting.pop(0)
            sequence.reserved = need
            sequence.admitted.set()
            self._evict()

    def _drop(self, sequence: _Sequence) -> None:
        sequence.dead, sequence.running = True, False
        if self._sequences.get(sequence.run_id) is sequence:
            del self._sequences[sequence.run_id]
        self._waiting = [w for w in self._waiting if w[2] is not sequence]
        self._admit()

    def _keep(self, sequence: _Sequence) -> None:
        """Its full blocks go to the prefix cache, as far as there is room beside what is live."""
        n_tokens = min(sequence.kv, len(sequence.ids))
        hashes = block_hashes(self._info.geometry.layout_hash, sequence.salt, sequence.ids[:n_tokens])
        for i, name in enumerate(hashes):
            self._cache[name] = sequence.rows[:, :, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS].copy()
            self._cache.move_to_end(name)
        self._evict()

    def _cached_blocks(self, ids: tuple[int, ...], salt: bytes, most: int) -> Iterator[NDArray[Any]]:
        for name in block_hashes(self._info.geometry.layout_hash, salt, ids[: max(0, most)]):
            if name not in self._cache:
                return
            yield self._cache[name]

    def _from_cache(self, sequence: _Sequence, most: int) -> int:
        for block in self._cached_blocks(tuple(sequence.ids), sequence.salt, most):
            sequence.rows[:, :, sequence.kv : sequence.kv + BLOCK_TOKENS] = block
            sequence.kv += BLOCK_TOKENS
        return sequence.kv

    # The toy model

    def _write_rows(self, sequence: _Sequence, stop: int) -> None:
        rows = kv_rows(tuple(sequence.ids[sequence.kv : stop]), sequence.kv)
        sequence.rows[:, :, sequence.kv : stop] = from_f32(rows, self._info.kv_dtype)
        sequence.kv = stop

    def _logits(self, sequence: _Sequence) -> NDArray[np.float32]:
        rows = to_f32(sequence.rows[:, :, sequence.digested : sequence.kv], self._info.kv_dtype)
        per_position = (np.rint(rows).astype(np.int64) * _WEIGHTS).sum(axis=(0, 1, 3, 4))
        for value in per_position:
            sequence.state = (sequence.state * 6364136223846793005 + int(value) + 1442695040888963407) % 2**64
        sequence.digested = sequence.kv
        rng = np.random.Generator(np.random.Philox(key=[sequence.state, 0]))
        return (3 * rng.standard_normal(VOCAB)).astype(np.float32)
