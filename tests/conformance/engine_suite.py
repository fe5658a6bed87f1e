"""What every engine must do, sentence by sentence of mesh.node.engine. Run on the core, the edge and a fake engine.

A subclass overrides two fixtures:

- `engine`: a started, idle, empty engine of its own for each test, with 256 <= max_context_tokens <= 1024 and
  kv_capacity_tokens >= 512. It may be slow; the suite never asks for more than a few hundred tokens a test.
- `text_streams`: makes a fresh TextStream of the engine's tokenizer, to know what a stop string should meet.

and, where it must, one flag:

- `recompute_is_exact`: False if KV of the same tokens computed in another batch shape may differ by enough to
  change a greedy token (llama.cpp rounds activations to 8 bits). KV that is moved, not recomputed, must always
  continue with the same tokens.

After each test `check_integrity` must pass. Nothing here looks at a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mesh.errors import AlreadyExists, Cancelled, InvalidRequest, MeshError, NotFound, Overloaded
from mesh.node.engine import (
    Engine,
    Finished,
    FinishReason,
    ImportSpec,
    Prefilled,
    RunId,
    Tokens,
)
from mesh.node.stop import StopMatcher
from tests.conformance.engine_capability_suite import CapabilityConformance
from tests.conformance.engine_kv_suite import KvConformance
from tests.conformance.engine_runs import (
    OTHER_SALT,
    SALT,
    THIRD_SALT,
    Outcome,
    TextStreams,
    collect,
    greedy,
    hold_prefix,
    prompt_of,
    run,
    run_spec,
    until,
)


class EngineConformance(KvConformance, CapabilityConformance):
    """Subclass as `class TestXyz(EngineConformance)` and override the fixtures."""

    # --- facts and load ---------------------------------------------------------------------------------------

    async def test_info_is_sensible_and_stable(self, engine: Engine) -> None:
        info = engine.info
        assert 256 <= info.max_context_tokens <= 1024
        assert info.kv_capacity_tokens >= 512
        assert info.vocab_size > 0
        assert all(0 <= i < info.vocab_size for i in info.eos_token_ids)
        assert info.geometry.n_layers > 0
        assert info.model_id
        assert info.weights_lineage
        assert info.build
        assert engine.info == info

    async def test_load_is_zero_when_idle(self, engine: Engine) -> None:
        load = await engine.load()
        assert (load.running, load.waiting, load.waiting_prefill_tokens, load.kv_used_tokens) == (0, 0, 0, 0)
        assert load.kv_capacity_tokens == engine.info.kv_capacity_tokens

    async def test_load_counts_a_run_and_measures_speeds(self, engine: Engine) -> None:
        seen = Outcome()
        task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt_of(engine, 40), greedy(120))), seen))
        await until(lambda: len(seen.ids) > 1)
        load = await engine.load()
        assert load.running + load.waiting == 1
        assert load.kv_used_tokens >= 40
        await task
        load = await engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.prefill_tokens_per_s > 0
        assert load.decode_tokens_per_s > 0
        assert load.prompt_tokens_total == 40

    async def test_kept_prefixes_do_not_count_as_used(self, engine: Engine) -> None:
        await run(engine, run_spec("r", prompt_of(engine, 48)))
        assert (await engine.load()).kv_used_tokens == 0

    async def test_self_test_measures_and_leaves_nothing(self, engine: Engine) -> None:
        result = await engine.self_test()
        assert result.prefill_tokens_per_s > 0
        assert result.decode_tokens_per_s > 0
        load = await engine.load()
        assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)

    # --- a run and its events ---------------------------------------------------------------------------------

    async def test_events_come_in_order(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 33)
        outcome = await run(engine, run_spec("r", prompt, greedy(12)))
        kinds = [type(e) for e in outcome.events]
        assert kinds[0] is Prefilled
        assert kinds[-1] is Finished
        assert set(kinds[1:-1]) == {Tokens}
        assert outcome.prefilled == [Prefilled(33, 0)]
        assert len(outcome.ids) == 12
        assert all(0 <= i < engine.info.vocab_size for i in outcome.ids)
        assert outcome.finished == Finished(FinishReason.LENGTH, None)

    async def test_a_prompt_of_one_token(self, engine: Engine) -> None:
        outcome = await run(engine, run_spec("r", prompt_of(engine, 1), greedy(3)))
        assert outcome.prefilled == [Prefilled(1, 0)]
        assert len(outcome.ids) == 3

    async def test_max_tokens_of_one(self, engine: Engine) -> None:
        outcome = await run(engine, run_spec("r", prompt_of(engine, 20), greedy(1)))
        assert len(outcome.ids) == 1
        assert outcome.finished.reason is FinishReason.LENGTH

    async def test_max_tokens_counts_tokens_generated_elsewhere(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        outcome = await run(engine, run_spec("r", prompt, greedy(8), prompt_tokens=15))
        assert len(outcome.ids) == 3

    async def test_a_full_context_ends_the_run(self, engine: Engine) -> None:
        limit = engine.info.max_context_tokens
        prompt = prompt_of(engine, limit - 5)
        outcome = await run(engine, run_spec("r", prompt, greedy(100)))
        assert outcome.finished.reason is FinishReason.LENGTH
        # All positions are used; the last token needs no KV, so an engine may give one more.
        assert len(prompt) + len(outcome.ids) in (limit, limit + 1)

    async def test_greedy_is_deterministic(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 37)
        first = await run(engine, run_spec("a", prompt, greedy(16)))
        second = await run(engine, run_spec("b", prompt, greedy(16), salt=OTHER_SALT))
        assert first.ids == second.ids

    async def test_runs_side_by_side_give_what_they_give_alone(self, engine: Engine) -> None:
        prompts = [prompt_of(engine, 10 + 17 * i, seed=i) for i in range(4)]
        alone = [await run(engine, run_spec(f"a{i}", p, greedy(12))) for i, p in enumerate(prompts)]
        together = await asyncio.gather(
            *(run(engine, run_spec(f"t{i}", p, greedy(12), salt=OTHER_SALT)) for i, p in enumerate(prompts))
        )
        for one, other in zip(alone, together, strict=True):
            assert len(other.ids) == 12
            if self.recompute_is_exact:
                assert one.ids == other.ids

    # --- names ------------------------------------------------------------------------------------------------

    async def test_a_run_id_in_use_is_refused_and_its_run_goes_on(self, engine: Engine) -> None:
        seen = Outcome()
        prompt = prompt_of(engine, 20)
        task = asyncio.create_task(collect(engine.generate(run_spec("same", prompt, greedy(120))), seen))
        await until(lambda: len(seen.ids) > 0)
        with pytest.raises(AlreadyExists):
            await run(engine, run_spec("same", prompt))
        with pytest.raises(AlreadyExists):
            await engine.open_import(ImportSpec(run_id=RunId("same"), token_ids=prompt, max_tokens=40, salt=SALT))
        assert len((await task).ids) == 120

    async def test_a_hold_keeps_its_name(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        await hold_prefix(engine, "h", prompt)
        with pytest.raises(AlreadyExists):
            await run(engine, run_spec("h", prompt))
        with pytest.raises(AlreadyExists):
            await engine.open_import(ImportSpec(run_id=RunId("h"), token_ids=prompt, max_tokens=40, salt=SALT))
        assert await engine.kv_tokens(RunId("h")) == 20
        await engine.release(RunId("h"))

    async def test_a_finished_run_leaves_its_name_free(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        await run(engine, run_spec("r", prompt))
        with pytest.raises(NotFound):
            await engine.kv_tokens(RunId("r"))
        await run(engine, run_spec("r", prompt))

    async def test_unknown_ids(self, engine: Engine) -> None:
        ghost = RunId("ghost")
        with pytest.raises(NotFound):
            await engine.pause(ghost)
        with pytest.raises(NotFound):
            await engine.kv_tokens(ghost)
        with pytest.raises(NotFound):
            await engine.export_kv(ghost, 0, 1)
        with pytest.raises(NotFound):
            await engine.write_kv(ghost, self.zeros(engine, 0, 4))
        with pytest.raises(NotFound):
            await run(engine, run_spec("r", prompt_of(engine, 8), kv_from="ghost"))
        with pytest.raises(NotFound):  # and the refused run left no trace
            await engine.kv_tokens(RunId("r"))
        await engine.release(ghost)

    # --- cancellation -----------------------------------------------------------------------------------------

    async def test_closing_the_iterator_frees_at_once(self, engine: Engine) -> None:
        events = engine.generate(run_spec("r", prompt_of(engine, 30), greedy(200)))
        async for event in events:
            if isinstance(event, Tokens):
                break
        await events.aclose()  # type: ignore[attr-defined]
        with pytest.raises(NotFound):
            await engine.kv_tokens(RunId("r"))
        load = await engine.load()
        assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)

    async def test_cancelling_the_task_frees(self, engine: Engine) -> None:
        seen = Outcome()
        prompt = prompt_of(engine, 30)
        task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt, greedy(200))), seen))
        await until(lambda: len(seen.events) > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        load = await engine.load()
        assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
        await run(engine, run_spec("r", prompt))  # the name is free again

    async def test_release_cancels_a_run_and_is_idempotent(self, engine: Engine) -> None:
        seen = Outcome()
        task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt_of(engine, 30), greedy(200))), seen))
        await until(lambda: len(seen.events) > 0)
        await engine.release(RunId("r"))
        await engine.release(RunId("r"))
        with pytest.raises(Cancelled):
            await task
        assert (await engine.load()).kv_used_tokens == 0

    async def test_release_frees_a_hold(self, engine: Engine) -> None:
        await hold_prefix(engine, "h", prompt_of(engine, 40))
        assert (await engine.load()).kv_used_tokens >= 40
        await engine.release(RunId("h"))
        await engine.release(RunId("h"))
        assert (await engine.load()).kv_used_tokens == 0
        with pytest.raises(NotFound):
            await engine.kv_tokens(RunId("h"))

    async def test_close_cancels_open_runs_and_is_idempotent(self, engine: Engine) -> None:
        seen = Outcome()
        task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt_of(engine, 30), greedy(200))), seen))
        await until(lambda: len(seen.events) > 0)
        self.closed = True
        await engine.close()
        await engine.close()
        with pytest.raises(Cancelled):
            await task
        with pytest.raises(MeshError):
            await run(engine, run_spec("late", prompt_of(engine, 8)))

    # --- limits -----------------------------------------------------------------------------------------------

    async def test_what_could_never_fit_is_refused(self, engine: Engine) -> None:
        too_long = prompt_of(engine, max(engine.info.kv_capacity_tokens, engine.info.max_context_tokens) + 1)
        with pytest.raises((Overloaded, InvalidRequest)):
            await run(engine, run_spec("r", too_long))
        with pytest.raises(Overloaded):
            await engine.open_import(
                ImportSpec(
                    run_id=RunId("i"),
                    token_ids=prompt_of(engine, 4),
                    max_tokens=engine.info.kv_capacity_tokens + 1,
                    salt=SALT,
                )
            )
        for name in ("r", "i"):
            with pytest.raises(NotFound):
                await engine.kv_tokens(RunId(name))

    # --- sampling ---------------------------------------------------------------------------------------------

    async def test_a_seed_gives_the_same_tokens(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        sampling = greedy(16, temperature=1.0, top_p=0.95)
        first = await run(engine, run_spec("a", prompt, sampling))
        second = await run(engine, run_spec("b", prompt, sampling, salt=OTHER_SALT))
        assert first.ids == second.ids

    async def test_a_moved_run_draws_what_it_would_have_drawn(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        sampling = greedy(16, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
        whole = await run(engine, run_spec("a", prompt, sampling))
        rest = await run(engine, run_spec("b", prompt + whole.ids[:6], sampling, prompt_tokens=20, salt=OTHER_SALT))
        assert len(rest.ids) == 10
        assert rest.ids == whole.ids[6:] or not self.recompute_is_exact

    async def test_logprobs(self, engine: Engine) -> None:
        outcome = await run(engine, run_spec("r", prompt_of(engine, 20), greedy(6, logprobs=3)))
        assert len(outcome.logprobs) == len(outcome.ids) == 6
        for token_id, (chosen, top) in zip(outcome.ids, outcome.logprobs, strict=True):
            assert chosen <= 0.0
            assert len(top) == 3
            assert top[0] == (token_id, chosen)
            assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)

    async def test_no_logprobs_unless_asked(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 20)
        assert (await run(engine, run_spec("a", prompt, greedy(3)))).logprobs == []
        only_chosen = await run(engine, run_spec("b", prompt, greedy(3, logprobs=0)))
        assert [top for _, top in only_chosen.logprobs] == [(), (), ()]

    async def test_end_of_sequence_is_the_last_token_given(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 12)
        for seed in range(6):
            sampling = greedy(24, temperature=2.0, seed=seed, ignore_eos=False)
            outcome = await run(engine, run_spec(f"r{seed}", prompt, sampling))
            ended = outcome.ids[-1] in engine.info.eos_token_ids
            assert not any(i in engine.info.eos_token_ids for i in outcome.ids[:-1])
            assert ended or len(outcome.ids) == 24
            if ended:
                assert outcome.finished == Finished(FinishReason.STOP, None)

    async def test_min_tokens_keeps_the_end_away(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 12)
        for seed in range(6):
            sampling = greedy(24, temperature=2.0, seed=seed, ignore_eos=False, min_tokens=24)
            outcome = await run(engine, run_spec(f"r{seed}", prompt, sampling))
            assert len(outcome.ids) == 24
            assert not any(i in engine.info.eos_token_ids for i in outcome.ids)

    # --- stop strings -----------------------------------------------------------------------------------------

    @staticmethod
    def first_match(ids: Sequence[int], stop: str, text_streams: TextStreams) -> int | None:
        """How many of `ids` it takes until their text holds `stop`."""
        matcher, stream = StopMatcher((stop,)), text_streams()
        for n, token_id in enumerate(ids, start=1):
            matcher.push(stream.push(token_id))
            if matcher.matched is not None:
                return n
        return None

    async def free_text(
        self, engine: Engine, text_streams: TextStreams, prompt: tuple[int, ...]
    ) -> tuple[tuple[int, ...], str, int]:
        """Tokens of an unstopped run, a stop string that its text meets over two tokens, and after how many."""
        for seed in range(50):
            sampling = greedy(24, temperature=1.5, seed=seed)
            ids = (await run(engine, run_spec(f"free{seed}", prompt, sampling, salt=THIRD_SALT))).ids
            stream = text_streams()
            pieces = [stream.push(i) for i in ids]
            for at in range(4, 20):
                stop = pieces[at - 1][-1:] + pieces[at][:1]
                if len(stop) == 2 and "\ufffd" not in stop and self.first_match(ids, stop, text_streams) == at + 1:
                    return ids, stop, seed
        pytest.fail("no run gave a text to cut a stop string from")

    async def test_a_stop_string_ends_the_run_with_its_token(self, engine: Engine, text_streams: TextStreams) -> None:
        prompt = prompt_of(engine, 20)
        ids, stop, seed = await self.free_text(engine, text_streams, prompt)
        n = self.first_match(ids, stop, text_streams)
        assert n is not None
        sampling = greedy(24, temperature=1.5, seed=seed, stop=("no such text \x00", stop))
        outcome = await run(engine, run_spec("r", prompt, sampling, salt=OTHER_SALT))
        assert outcome.ids == ids[:n]
        assert outcome.finished == Finished(FinishReason.STOP, stop)

    async def test_a_stop_string_over_the_seam_of_a_move(self, engine: Engine, text_streams: TextStreams) -> None:
        prompt = prompt_of(engine, 20)
        ids, stop, seed = await self.free_text(engine, text_streams, prompt)
        n = self.first_match(ids, stop, text_streams)
        assert n is not None
        sampling = greedy(24, temperature=1.5, seed=seed, stop=(stop,))
        moved = run_spec("r", prompt + ids[: n - 1], sampling, prompt_tokens=20, salt=OTHER_SALT)
        outcome = await run(engine, moved)
        if self.recompute_is_exact:
            assert outcome.ids == ids[n - 1 : n]
            assert outcome.finished == Finished(FinishReason.STOP, stop)
        assert outcome.ids
