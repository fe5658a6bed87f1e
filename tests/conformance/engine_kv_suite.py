"""The part of the engine conformance suite about holds, export, import and the prefix cache."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from mesh.errors import InvalidRequest, NotFound, Overloaded
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.kv.slab import KvSlab
from mesh.node.engine import (
    Engine,
    Finished,
    Held,
    ImportSpec,
    Prefilled,
    RunId,
)
from tests.conformance.engine_runs import (
    OTHER_SALT,
    SALT,
    THIRD_SALT,
    EngineFixtures,
    Outcome,
    collect,
    greedy,
    hold_prefix,
    pause_run,
    prompt_of,
    run,
    run_spec,
    run_until_paused,
    until,
)


class KvConformance(EngineFixtures):
    """Part of EngineConformance."""

    # --- holds: prefill only, pause, continue -----------------------------------------------------------------

    async def test_prefill_only_ends_in_a_hold(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 100)
        outcome = await run(engine, run_spec("h", prompt, prefill_only=True))
        assert all(isinstance(e, Prefilled) for e in outcome.events[:-1])
        progress = [e.tokens for e in outcome.prefilled]
        assert progress == sorted(progress)
        assert progress[-1] == 100
        assert outcome.held == Held(100)
        assert await engine.kv_tokens(RunId("h")) == 100
        await engine.release(RunId("h"))

    async def test_a_run_consumes_its_hold(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 50)
        want = await run(engine, run_spec("w", prompt, greedy(10), salt=OTHER_SALT))
        await hold_prefix(engine, "h", prompt[:-1])
        outcome = await run(engine, run_spec("r", prompt, greedy(10), kv_from="h"))
        assert outcome.prefilled == [Prefilled(50, 49)]
        assert outcome.ids == want.ids or not self.recompute_is_exact
        with pytest.raises(NotFound):
            await engine.kv_tokens(RunId("h"))
        assert (await engine.load()).kv_used_tokens == 0

    async def test_a_hold_of_a_shorter_prefix_is_continued(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 50)
        want = await run(engine, run_spec("w", prompt, greedy(10), salt=OTHER_SALT))
        await hold_prefix(engine, "h", prompt[:21])
        outcome = await run(engine, run_spec("r", prompt, greedy(10), kv_from="h"))
        assert outcome.prefilled[0].cached >= 21
        assert outcome.ids == want.ids or not self.recompute_is_exact

    async def test_a_hold_can_be_continued_under_its_own_name(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 30)
        await hold_prefix(engine, "h", prompt[:-1])
        outcome = await run(engine, run_spec("h", prompt, greedy(4), kv_from="h"))
        assert len(outcome.ids) == 4

    async def test_a_hold_of_other_tokens_is_refused(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 30, seed=1)
        other = prompt_of(engine, 30, seed=2)
        await hold_prefix(engine, "h", prompt)
        with pytest.raises(InvalidRequest):
            await run(engine, run_spec("r", other, kv_from="h"))
        await engine.release(RunId("h"))

    async def test_pause_and_continue_lose_no_token(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 40)
        want = await run(engine, run_spec("w", prompt, greedy(120), salt=OTHER_SALT))
        first = await run_until_paused(engine, "r", prompt, greedy(120), after_tokens=3)
        n = len(first.ids)
        assert 3 <= n < 120
        assert first.held == Held(40 + n - 1)  # the last token has no KV yet
        assert await engine.kv_tokens(RunId("r")) == 40 + n - 1
        rest = await run(
            engine, run_spec("r2", prompt + first.ids, greedy(120), prompt_tokens=len(prompt), kv_from="r")
        )
        assert len(rest.ids) == 120 - n
        assert first.ids + rest.ids == want.ids or not self.recompute_is_exact

    async def test_pause_before_the_first_token(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 200)
        want = await run(engine, run_spec("w", prompt, greedy(6), salt=OTHER_SALT))
        task = asyncio.create_task(run(engine, run_spec("r", prompt, greedy(6))))
        await pause_run(engine, "r")
        first = await task
        if isinstance(first.last, Finished):  # it was faster
            assert first.ids == want.ids or not self.recompute_is_exact
            return
        assert first.held.kv_tokens == await engine.kv_tokens(RunId("r"))
        assert first.held.kv_tokens <= len(prompt) + max(0, len(first.ids) - 1)
        rest = await run(engine, run_spec("r2", prompt + first.ids, greedy(6), prompt_tokens=200, kv_from="r"))
        assert first.ids + rest.ids == want.ids or not self.recompute_is_exact

    # --- export and import ------------------------------------------------------------------------------------

    def zeros(self, engine: Engine, start: int, n_tokens: int, *, heads: int | None = None) -> KvSlab:
        """A slab of zeros; with `heads` one of a wrong shape."""
        g, dtype = engine.info.geometry, engine.info.kv_dtype
        shape = (g.n_layers, n_tokens, heads or g.n_kv_heads, g.head_dim)
        return KvSlab(start=start, dtype=dtype, k=np.zeros(shape, dtype.storage), v=np.zeros(shape, dtype.storage))

    async def test_export_gives_canonical_slabs(self, engine: Engine) -> None:
        await hold_prefix(engine, "h", prompt_of(engine, 50))
        slab = await engine.export_kv(RunId("h"), 0, 50)
        slab.check(engine.info.geometry)
        assert (slab.start, slab.n_tokens, slab.dtype) == (0, 50, engine.info.kv_dtype)
        assert np.any(slab.k != 0)
        assert np.any(slab.v != 0)
        part = await engine.export_kv(RunId("h"), 13, 37)
        part.check(engine.info.geometry)
        assert part.start == 13
        assert np.array_equal(part.k, slab.k[:, 13:37])
        assert np.array_equal(part.v, slab.v[:, 13:37])
        await engine.release(RunId("h"))

    async def test_export_outside_what_is_there_is_refused(self, engine: Engine) -> None:
        await hold_prefix(engine, "h", prompt_of(engine, 20))
        for start, stop in ((0, 21), (-1, 4), (5, 5), (9, 3)):
            with pytest.raises(InvalidRequest):
                await engine.export_kv(RunId("h"), start, stop)
        assert await engine.kv_tokens(RunId("h")) == 20
        await engine.release(RunId("h"))

    async def test_export_while_it_runs(self, engine: Engine) -> None:
        seen = Outcome()
        prompt = prompt_of(engine, 30)
        task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt, greedy(220))), seen))
        await until(lambda: len(seen.ids) >= 2)
        now = await engine.kv_tokens(RunId("r"))
        early = await engine.export_kv(RunId("r"), 0, now)
        await engine.pause(RunId("r"))
        held = (await task).held
        late = await engine.export_kv(RunId("r"), 0, held.kv_tokens)
        assert 30 <= now <= held.kv_tokens
        assert np.array_equal(early.k, late.k[:, :now])
        assert np.array_equal(early.v, late.v[:, :now])
        await engine.release(RunId("r"))

    async def test_round_trip_continues_with_the_same_tokens(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 60)
        await hold_prefix(engine, "h", prompt[:-1])
        slab = await engine.export_kv(RunId("h"), 0, 59)
        want = await run(engine, run_spec("w", prompt, greedy(16), kv_from="h"))
        given = await engine.open_import(
            ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=80, salt=OTHER_SALT)
        )
        assert given == 0
        assert await engine.kv_tokens(RunId("i")) == 0
        for start, stop in ((0, 16), (16, 17), (17, 50), (50, 59)):  # chunks need no alignment
            await engine.write_kv(RunId("i"), slab.tokens(start, stop))
            assert await engine.kv_tokens(RunId("i")) == stop
        again = await engine.export_kv(RunId("i"), 0, 59)
        assert np.array_equal(again.k, slab.k)
        assert np.array_equal(again.v, slab.v)
        got = await run(engine, run_spec("g", prompt, greedy(16), salt=OTHER_SALT, kv_from="i"))
        assert got.prefilled == [Prefilled(60, 59)]
        assert got.ids == want.ids

    async def test_a_moved_run_may_write_beyond_the_tokens_known_at_first(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 30)
        first = await run_until_paused(engine, "r", prompt, greedy(150), after_tokens=3)
        kv = first.held.kv_tokens
        slab = await engine.export_kv(RunId("r"), 0, kv)
        ids = prompt + first.ids
        sampling = greedy(len(first.ids) + 10)
        want = await run(engine, run_spec("w", ids, sampling, prompt_tokens=30, kv_from="r"))
        await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=kv + 20, salt=OTHER_SALT))
        await engine.write_kv(RunId("i"), slab)
        got = await run(engine, run_spec("g", ids, sampling, prompt_tokens=30, salt=OTHER_SALT, kv_from="i"))
        assert got.ids == want.ids
        assert len(got.ids) == 10

    async def test_an_import_takes_f16(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        g = engine.info.geometry
        shape = (g.n_layers, 19, g.n_kv_heads, g.head_dim)
        rng = np.random.default_rng(0)
        slab = KvSlab(
            start=0,
            dtype=KvDtype.F16,
            k=rng.standard_normal(shape).astype(np.float16),
            v=rng.standard_normal(shape).astype(np.float16),
        )
        await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=40, salt=SALT))
        await engine.write_kv(RunId("i"), slab)
        assert await engine.kv_tokens(RunId("i")) == 19
        assert len((await run(engine, run_spec("r", prompt, greedy(4), kv_from="i"))).ids) == 4

    async def test_a_gap_or_overlap_is_refused(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 40)
        await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=60, salt=SALT))
        await engine.write_kv(RunId("i"), self.zeros(engine, 0, 10))
        for start in (11, 0, 9):
            with pytest.raises(InvalidRequest):
                await engine.write_kv(RunId("i"), self.zeros(engine, start, 4))
            await self.as_it_was_or_gone(engine, "i", 10)
        await engine.release(RunId("i"))

    async def test_a_wrong_shape_is_refused(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 40)
        await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=60, salt=SALT))
        with pytest.raises(InvalidRequest):
            await engine.write_kv(RunId("i"), self.zeros(engine, 0, 4, heads=engine.info.geometry.n_kv_heads + 1))
        await self.as_it_was_or_gone(engine, "i", 0)
        await engine.release(RunId("i"))

    async def test_more_than_announced_is_refused(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 10)
        await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=20, salt=SALT))
        with pytest.raises((InvalidRequest, Overloaded)):
            await engine.write_kv(RunId("i"), self.zeros(engine, 0, 21))
        await self.as_it_was_or_gone(engine, "i", 0)
        await engine.release(RunId("i"))

    @staticmethod
    async def as_it_was_or_gone(engine: Engine, run_id: str, kv_tokens: int) -> None:
        try:
            assert await engine.kv_tokens(RunId(run_id)) == kv_tokens
        except NotFound:
            return

    async def test_an_open_import_can_be_dropped(self, engine: Engine) -> None:
        await engine.open_import(
            ImportSpec(run_id=RunId("i"), token_ids=prompt_of(engine, 40), max_tokens=60, salt=SALT)
        )
        await engine.write_kv(RunId("i"), self.zeros(engine, 0, 33))
        await engine.release(RunId("i"))
        assert (await engine.load()).kv_used_tokens == 0
        with pytest.raises(NotFound):
            await engine.write_kv(RunId("i"), self.zeros(engine, 33, 1))

    async def test_an_import_starts_from_the_prefix_cache(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 70)
        await hold_prefix(engine, "h", prompt[:-1], salt=THIRD_SALT)
        slab = await engine.export_kv(RunId("h"), 0, 69)
        want = await run(engine, run_spec("w", prompt, greedy(8), kv_from="h", salt=THIRD_SALT))
        await run(engine, run_spec("warm", prompt[:40], greedy(1)))
        given = await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=90, salt=SALT))
        assert given % BLOCK_TOKENS == 0
        assert 0 <= given <= 69
        assert await engine.kv_tokens(RunId("i")) == given
        await engine.write_kv(RunId("i"), slab.tokens(given, 69))
        got = await run(engine, run_spec("g", prompt, greedy(8), kv_from="i"))
        assert got.ids == want.ids or not self.recompute_is_exact

    # --- a tail that comes while the head is computed ----------------------------------------------------------

    async def _tail_of(self, engine: Engine, prompt: tuple[int, ...], first: int) -> tuple[KvSlab, tuple[int, ...]]:
        """KV of all but the last token, and how the engine goes on from it; then an open import of its tail."""
        await hold_prefix(engine, "h", prompt[:-1])
        slab = await engine.export_kv(RunId("h"), 0, len(prompt) - 1)
        want = await run(engine, run_spec("w", prompt, greedy(12), kv_from="h"))
        spec = ImportSpec(
            run_id=RunId("i"), token_ids=prompt[:-1], max_tokens=len(prompt) + 12, salt=OTHER_SALT, first_position=first
        )
        assert await engine.open_import(spec) == first
        return slab, want.ids

    async def test_a_tail_joins_a_head_that_was_computed_meanwhile(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 100)
        slab, want = await self._tail_of(engine, prompt, 48)
        head = run_spec("head", prompt[:48], salt=OTHER_SALT, prefill_only=True)
        computing = asyncio.create_task(run(engine, head))
        for start, stop in ((48, 64), (64, 65), (65, 99)):
            await engine.write_kv(RunId("i"), slab.tokens(start, stop))
            assert await engine.kv_tokens(RunId("i")) == 0  # nothing leads yet
        assert (await computing).held.kv_tokens == 48
        await engine.join_kv(RunId("i"), RunId("head"))
        assert await engine.kv_tokens(RunId("i")) == 99
        with pytest.raises(NotFound):
            await engine.kv_tokens(RunId("head"))
        await engine.check_integrity()
        joined = await engine.export_kv(RunId("i"), 48, 99)
        assert np.array_equal(joined.k, slab.k[:, 48:])
        assert np.array_equal(joined.v, slab.v[:, 48:])
        got = await run(engine, run_spec("g", prompt, greedy(12), salt=OTHER_SALT, kv_from="i"))
        assert got.prefilled == [Prefilled(100, 99)]
        assert got.ids == want or not self.recompute_is_exact
        assert (await engine.load()).kv_used_tokens == 0

    async def test_a_tail_without_its_head_is_of_no_use(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 60)
        slab, _ = await self._tail_of(engine, prompt, 32)
        await engine.write_kv(RunId("i"), slab.tokens(32, 59))
        with pytest.raises(InvalidRequest):
            await engine.export_kv(RunId("i"), 32, 40)
        with pytest.raises(InvalidRequest):
            await run(engine, run_spec("g", prompt, greedy(4), salt=OTHER_SALT, kv_from="i"))
        with pytest.raises(InvalidRequest):  # KV below it is not its own
            await engine.write_kv(RunId("i"), slab.tokens(0, 16))
        assert await engine.cached_tokens(prompt, OTHER_SALT) == 0
        await engine.release(RunId("i"))
        assert (await engine.load()).kv_used_tokens == 0

    async def test_only_its_own_head_joins_a_tail(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 60)
        slab, want = await self._tail_of(engine, prompt, 32)
        await engine.write_kv(RunId("i"), slab.tokens(32, 59))
        await hold_prefix(engine, "short", prompt[:16], salt=OTHER_SALT)
        await hold_prefix(engine, "other", prompt_of(engine, 32, seed=5), salt=OTHER_SALT)
        await hold_prefix(engine, "elsewhere", prompt[:32], salt=THIRD_SALT)
        for head in ("short", "other", "elsewhere", "i"):
            with pytest.raises(InvalidRequest):
                await engine.join_kv(RunId("i"), RunId(head))
        with pytest.raises(NotFound):
            await engine.join_kv(RunId("i"), RunId("nobody"))
        await hold_prefix(engine, "head", prompt[:32], salt=OTHER_SALT)
        await engine.join_kv(RunId("i"), RunId("head"))
        got = await run(engine, run_spec("g", prompt, greedy(12), salt=OTHER_SALT, kv_from="i"))
        assert got.ids == want or not self.recompute_is_exact
        for hold in ("short", "other", "elsewhere"):
            await engine.release(RunId(hold))

    @pytest.mark.parametrize("first", [17, 59, 64, 1 << 20])
    async def test_a_tail_begins_at_a_block_below_the_known_tokens(self, engine: Engine, first: int) -> None:
        prompt = prompt_of(engine, 60)
        spec = ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=90, salt=SALT, first_position=first)
        with pytest.raises(InvalidRequest):
            await engine.open_import(spec)
        await engine.release(RunId("i"))

    # --- prefix cache -----------------------------------------------------------------------------------------

    async def test_a_prefix_is_found_again_under_the_same_salt_only(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 48)
        assert await engine.cached_tokens(prompt, SALT) == 0
        first = await run(engine, run_spec("a", prompt, greedy(8)))
        cached = await engine.cached_tokens(prompt, SALT)
        assert 32 <= cached <= 47  # one position is always computed, for its logits
        assert await engine.cached_tokens(prompt, SALT) == cached
        assert await engine.cached_tokens(prompt, OTHER_SALT) == 0
        other = await run(engine, run_spec("b", prompt, greedy(8), salt=OTHER_SALT))
        assert other.prefilled == [Prefilled(48, 0)]
        again = await run(engine, run_spec("c", prompt, greedy(8)))
        assert 32 <= again.prefilled[0].cached <= 47
        assert again.ids == first.ids or not self.recompute_is_exact
        assert (await engine.load()).cached_tokens_total >= 32

    async def test_generated_tokens_are_cached_too(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        first = await run(engine, run_spec("a", prompt, greedy(44)))
        assert await engine.cached_tokens(prompt + first.ids + (prompt[0],), SALT) >= 48

    async def test_a_prompt_that_parts_early_shares_only_its_head(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 64)
        await run(engine, run_spec("a", prompt, greedy(1)))
        parted = prompt[:40] + prompt_of(engine, 24, seed=9)
        assert await engine.cached_tokens(parted, SALT) <= 40 + 1  # one id may be equal by chance
