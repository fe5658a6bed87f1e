"""What the core engine adds to the interface: refusals with their arithmetic, failures that stay small, priorities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core_node.engine import loading, scheduler
from core_node.engine.core import EngineCore
from core_node.engine.engine import CoreEngine
from core_node.engine.runner import Runner
from core_node.engine.scheduler import Scheduler
from core_node.engine.settings import CoreEngineSettings
from mesh.errors import Cancelled, Internal, InvalidRequest, NotFound, Overloaded
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab
from mesh.node.engine import Finished, FinishReason, ImportSpec, Prefilled, RunId
from tests.conformance.engine_runs import (
    OTHER_SALT,
    SALT,
    Outcome,
    collect,
    greedy,
    hold_prefix,
    prompt_of,
    run,
    run_spec,
    until,
)
from tests.core_node.engine.conftest import tiny_settings


@pytest.fixture
async def engine(tiny_gguf: Path) -> AsyncIterator[CoreEngine]:
    engine = CoreEngine(tiny_settings(tiny_gguf, kv_pool_tokens=512, max_running=2, max_waiting=2))
    await engine.start()
    yield engine
    await engine.check_integrity()
    await engine.close()


def import_spec(run_id: str, token_ids: tuple[int, ...], max_tokens: int, salt: bytes = SALT) -> ImportSpec:
    return ImportSpec(run_id=RunId(run_id), token_ids=token_ids, max_tokens=max_tokens, salt=salt)


# --- refusals -------------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_overloaded(engine: CoreEngine) -> None:
    seen = [Outcome() for _ in range(4)]
    prompt = prompt_of(engine, 10)
    tasks = [
        asyncio.create_task(collect(engine.generate(run_spec(f"r{i}", prompt, greedy(200))), seen[i])) for i in range(2)
    ]
    await until(lambda: all(s.ids for s in seen[:2]))
    tasks += [asyncio.create_task(run(engine, run_spec(f"w{i}", prompt, greedy(2)))) for i in range(2)]
    await asyncio.sleep(0)
    assert (await engine.load()).waiting == 2
    with pytest.raises(Overloaded, match="2 requests are waiting, at most 2 may"):
        await run(engine, run_spec("late", prompt))
    for i in range(2):
        await engine.release(RunId(f"r{i}"))
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(e) for e in ended] == [Cancelled, Cancelled, Outcome, Outcome]


async def test_a_small_pool_says_what_can_never_fit(tiny_gguf: Path) -> None:
    engine = CoreEngine(tiny_settings(tiny_gguf, kv_pool_tokens=64))
    await engine.start()
    assert engine.info.max_context_tokens == 64  # nothing longer could be served
    with pytest.raises(Overloaded, match="70 tokens can never fit the KV pool of 64 tokens"):
        await run(engine, run_spec("r", prompt_of(engine, 70)))
    await engine.close()


async def test_a_prompt_as_long_as_the_context_is_refused(engine: CoreEngine) -> None:
    with pytest.raises(InvalidRequest, match="leave no room"):
        await run(engine, run_spec("r", prompt_of(engine, engine.info.max_context_tokens)))
    await hold_prefix(engine, "h", prompt_of(engine, engine.info.max_context_tokens))  # but it can be prefilled
    await engine.release(RunId("h"))


@pytest.mark.parametrize("ids", [(), (-1,), (1, 10**6)])
async def test_tokens_that_would_fail_the_step_are_refused(engine: CoreEngine, ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        await run(engine, run_spec("r", ids, prompt_tokens=1))
    with pytest.raises(InvalidRequest):
        await engine.open_import(import_spec("i", ids, 20))


@pytest.mark.parametrize("prompt_tokens", [0, 11])
async def test_a_wrong_prompt_length_is_refused(engine: CoreEngine, prompt_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="prompt_tokens"):
        await run(engine, run_spec("r", prompt_of(engine, 10), prompt_tokens=prompt_tokens))


async def test_a_hold_stays_in_its_namespace(engine: CoreEngine) -> None:
    prompt = prompt_of(engine, 20)
    await hold_prefix(engine, "h", prompt[:-1])
    with pytest.raises(InvalidRequest, match="another cache namespace"):
        await run(engine, run_spec("r", prompt, kv_from="h", salt=OTHER_SALT))
    assert await engine.kv_tokens(RunId("h")) == 19  # a refused run does not cost the hold
    await engine.release(RunId("h"))


async def test_a_hold_that_is_longer_than_the_run_is_refused(engine: CoreEngine) -> None:
    prompt = prompt_of(engine, 20)
    await hold_prefix(engine, "h", prompt)
    with pytest.raises(InvalidRequest, match="not of a prefix"):
        await run(engine, run_spec("r", prompt[:10], kv_from="h"))
    await engine.release(RunId("h"))


async def test_a_hold_of_all_tokens_recomputes_its_last_block(engine: CoreEngine) -> None:
    prompt = prompt_of(engine, 40)
    want = await run(engine, run_spec("w", prompt, greedy(5), salt=OTHER_SALT))
    await hold_prefix(engine, "h", prompt)
    got = await run(engine, run_spec("r", prompt, greedy(5), kv_from="h"))
    assert got.prefilled == [Prefilled(40, 32)]
    assert got.ids == want.ids


async def test_only_imports_are_written_to(engine: CoreEngine) -> None:
    await hold_prefix(engine, "h", prompt_of(engine, 20))
    slab = await engine.export_kv(RunId("h"), 0, 4)
    moved = KvSlab(start=20, dtype=slab.dtype, k=slab.k, v=slab.v)
    with pytest.raises(InvalidRequest):
        await engine.write_kv(RunId("h"), moved)
    await engine.release(RunId("h"))


async def test_a_pool_that_holds_have_filled_refuses_an_import(engine: CoreEngine) -> None:
    await engine.open_import(import_spec("a", prompt_of(engine, 400), 500))
    with pytest.raises(Overloaded, match="needs 13 KV blocks, 7 of 32 are free"):
        await engine.open_import(import_spec("b", prompt_of(engine, 200), 300))
    with pytest.raises(NotFound):
        await engine.kv_tokens(RunId("b"))
    await engine.release(RunId("a"))


async def test_max_tokens_of_an_import_is_checked(engine: CoreEngine) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        await engine.open_import(import_spec("a", prompt_of(engine, 40), 39))


# --- imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(KvDtype))
async def test_an_import_takes_every_dtype(engine: CoreEngine, dtype: KvDtype) -> None:
    prompt = prompt_of(engine, 33)
    await hold_prefix(engine, "h", prompt[:-1])
    slab = await engine.export_kv(RunId("h"), 0, 32)
    want = await run(engine, run_spec("w", prompt, greedy(6), kv_from="h"))

    def convert(x: np.ndarray) -> np.ndarray:
        if dtype is KvDtype.BF16:
            return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return x.astype(dtype.storage)

    other = KvSlab(start=0, dtype=dtype, k=convert(slab.k), v=convert(slab.v))
    other.k.flags.writeable = False  # as it comes from the wire
    await engine.open_import(import_spec("i", prompt, 50, OTHER_SALT))
    await engine.write_kv(RunId("i"), other)
    got = await run(engine, run_spec("g", prompt, greedy(6), salt=OTHER_SALT, kv_from="i"))
    assert got.ids == want.ids or dtype is KvDtype.BF16
    assert len(got.ids) == 6


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_kv_that_is_not_finite_is_refused(engine: CoreEngine, value: float) -> None:
    """It would outlive its owner: masked positions are multiplied by zero, and zero times NaN is NaN."""
    g = engine.info.geometry
    k = np.zeros((g.n_layers, 8, g.n_kv_heads, g.head_dim), np.float32)
    v = k.copy()
    v[1, 3] = value
    await engine.open_import(import_spec("i", prompt_of(engine, 20), 40))
    with pytest.raises(InvalidRequest, match="not finite"):
        await engine.write_kv(RunId("i"), KvSlab(start=0, dtype=KvDtype.F32, k=k, v=v))
    assert await engine.kv_tokens(RunId("i")) == 0
    await engine.release(RunId("i"))


async def test_a_slab_that_overflows_the_pool_is_refused(tiny_gguf: Path) -> None:
    engine = CoreEngine(tiny_settings(tiny_gguf, kv_dtype=KvDtype.F16))
    await engine.start()
    g = engine.info.geometry
    big = np.full((g.n_layers, 8, g.n_kv_heads, g.head_dim), 1e6, np.float32)
    await engine.open_import(import_spec("i", prompt_of(engine, 20), 40))
    with pytest.raises(InvalidRequest, match="not finite in f16"):
        await engine.write_kv(RunId("i"), KvSlab(start=0, dtype=KvDtype.F32, k=big, v=big))
    await engine.close()


async def test_an_import_is_cached_only_once_a_run_took_it(engine: CoreEngine) -> None:
    prompt = prompt_of(engine, 40)
    await hold_prefix(engine, "h", prompt[:-1], salt=OTHER_SALT)
    slab = await engine.export_kv(RunId("h"), 0, 39)
    await engine.open_import(import_spec("dropped", prompt, 60))
    await engine.write_kv(RunId("dropped"), slab)
    await engine.release(RunId("dropped"))
    assert await engine.cached_tokens(prompt, SALT) == 0
    await engine.open_import(import_spec("taken", prompt, 60))
    await engine.write_kv(RunId("taken"), slab)
    await run(engine, run_spec("r", prompt, greedy(2), kv_from="taken"))
    assert await engine.cached_tokens(prompt, SALT) == 32
    await engine.release(RunId("h"))


# --- runs that came with their end ----------------------------------------------------------------------------------


async def test_a_run_that_had_all_its_tokens_ends_at_once(engine: CoreEngine) -> None:
    prompt = prompt_of(engine, 20)
    await hold_prefix(engine, "h", prompt)
    outcome = await run(engine, run_spec("r", prompt, greedy(5), prompt_tokens=15, kv_from="h"))
    assert outcome.events == [Finished(FinishReason.LENGTH)]
    with pytest.raises(NotFound):
        await engine.kv_tokens(RunId("h"))


# --- order ----------------------------------------------------------------------------------------------------------


async def test_the_better_priority_is_admitted_first(tiny_gguf: Path) -> None:
    engine = CoreEngine(tiny_settings(tiny_gguf, max_running=1))
    await engine.start()
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        await run(engine, run_spec(name, prompt_of(engine, 10), greedy(20), priority=priority))
        order.append(name)

    first = asyncio.create_task(one("first", 0))
    await until_running(engine)
    await asyncio.gather(first, one("low", 5), one("high", 1))
    assert order == ["first", "high", "low"]
    await engine.close()


async def until_running(engine: CoreEngine) -> None:
    while (await engine.load()).running == 0:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0)


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_failed_step_fails_its_runs_and_no_more(engine: CoreEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(engine, 20)
    want = await run(engine, run_spec("w", prompt, greedy(5)))
    await hold_prefix(engine, "h", prompt)
    original = Runner.run
    monkeypatch.setattr(Runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(Internal, match="the engine step failed: RuntimeError"):
        await run(engine, run_spec("r", prompt, greedy(5)))
    monkeypatch.setattr(Runner, "run", original)
    assert await engine.kv_tokens(RunId("h")) == 20
    assert (await run(engine, run_spec("r", prompt, greedy(5), kv_from="h"))).ids == want.ids


async def test_broken_books_fail_everybody_and_start_afresh(
    engine: CoreEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(engine, 20)
    await hold_prefix(engine, "h", prompt)
    original = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda *_: (_ for _ in ()).throw(IndexError("books")))
    with pytest.raises(Internal, match="the engine failed: IndexError"):
        await run(engine, run_spec("r", prompt))
    monkeypatch.setattr(Scheduler, "schedule", original)
    with pytest.raises(NotFound):
        await engine.kv_tokens(RunId("h"))
    assert len((await run(engine, run_spec("r", prompt, greedy(5)))).ids) == 5


async def test_logits_that_are_not_finite_fail_one_run(engine: CoreEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, chunks, rows: [None for _ in rows])
    with pytest.raises(Internal, match="not finite"):
        await run(engine, run_spec("r", prompt_of(engine, 20)))
    monkeypatch.setattr(Runner, "run", original)
    assert (await engine.load()).kv_used_tokens == 0


async def test_a_closed_or_never_started_engine_does_not_hang(tiny_gguf: Path, tmp_path: Path) -> None:
    never = CoreEngine(tiny_settings(tiny_gguf))
    with pytest.raises(Cancelled):
        await never.load()
    await never.close()
    failed = CoreEngine(tiny_settings(tmp_path / "none.gguf"))
    with pytest.raises(InvalidRequest):
        await failed.start()
    with pytest.raises(Cancelled):
        await failed.load()
    await failed.close()


async def test_a_consumer_that_is_cancelled_while_it_is_being_queued(engine: CoreEngine) -> None:
    for _ in range(20):
        task = asyncio.create_task(run(engine, run_spec("r", prompt_of(engine, 50), greedy(50))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    load = await engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)


async def test_a_refused_run_does_not_cancel_the_one_that_has_its_name(engine: CoreEngine) -> None:
    seen = Outcome()
    prompt = prompt_of(engine, 10)
    task = asyncio.create_task(collect(engine.generate(run_spec("same", prompt, greedy(200))), seen))
    await until(lambda: bool(seen.ids))
    other = asyncio.create_task(run(engine, run_spec("same", prompt)))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.wait([other])
    assert len((await task).ids) == 200


# --- start-up -------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_sum(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"weights [\d.]+ MiB in f32 \+ KV pool [\d,]+ MiB .* free; kv_pool_tokens=2048 fits"
    with pytest.raises(Overloaded, match=words):
        loading.load_engine(tiny_settings(tiny_gguf, kv_pool_tokens=10**10))
    monkeypatch.setattr(loading, "_free_bytes", lambda _: 1000)
    with pytest.raises(Overloaded, match="does not fit on cpu"):
        loading.load_engine(tiny_settings(tiny_gguf, kv_pool_tokens=0))


def test_the_size_of_the_pool(tiny_gguf: Path) -> None:
    def capacity(**changes: int) -> int:
        core: EngineCore = loading.load_engine(tiny_settings(tiny_gguf, **{"kv_pool_tokens": 0, **changes}))
        return core.info.kv_capacity_tokens

    bytes_per_token = 3 * 2 * 16 * 2 * 4
    assert capacity() == 4 * 512
    assert capacity(max_context_tokens=100) == 4 * 112
    assert capacity(kv_pool_tokens=100) == 96
    assert capacity(kv_pool_bytes=bytes_per_token * 16 * 3) == 48


def test_a_device_that_is_not_there(tiny_gguf: Path) -> None:
    with pytest.raises(InvalidRequest, match="device 'cuda:77' cannot be used"):
        loading.load_engine(tiny_settings(tiny_gguf, device="cuda:77"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "f64"}, "dtype"),
        ({"n_threads": -1}, "n_threads"),
        ({"kv_pool_tokens": 8}, "kv_pool_tokens"),
        ({"kv_pool_tokens": 64, "kv_pool_bytes": 64}, "kv_pool_bytes"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"max_running": 0}, "max_running"),
        ({"max_running": 65}, "max_running"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"tpot_target_s": -0.1}, "tpot_target_s"),
        ({"ageing_s": float("nan")}, "ageing_s"),
        ({"starvation_s": float("inf")}, "starvation_s"),
        ({"swap_bytes": -1}, "swap_bytes"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny_settings(Path("m.gguf"), **changes)
    assert caught.value.details["field"] == field


def test_defaults_are_valid() -> None:
    CoreEngineSettings(model_path=Path("m.gguf"), model_id="m")


# --- samples of one prompt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [10, 32, 45])
async def test_samples_together_are_what_each_is_alone(n_tokens: int, tiny_gguf: Path) -> None:
    """They share the prompt's blocks, and the block that they write into is copied."""

    async def samples(engine: CoreEngine, together: bool) -> list[tuple[int, ...]]:
        prompt = prompt_of(engine, n_tokens)
        specs = [run_spec(f"s{i}", prompt, greedy(12, temperature=1.0, sample_index=i)) for i in range(5)]
        if together:
            return [o.ids for o in await asyncio.gather(*(run(engine, spec) for spec in specs))]
        return [(await run(engine, replace(spec, salt=spec.run_id.encode()))).ids for spec in specs]

    engine = CoreEngine(tiny_settings(tiny_gguf))
    await engine.start()
    alone = await samples(engine, together=False)
    before = await engine.load()
    assert await samples(engine, together=True) == alone
    assert len(set(alone)) > 2
    load = await engine.load()
    await engine.check_integrity()
    await engine.close()
    if n_tokens > 16:  # the first computes everything, the others one position each
        assert load.cached_tokens_total - before.cached_tokens_total == 4 * (n_tokens - 1)


async def test_an_unknown_policy_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    engine = CoreEngine(tiny_settings(tmp_path / "none.gguf", policy="best"))
    with pytest.raises(InvalidRequest, match="no scheduling policy 'best'"):
        await engine.start()
    await engine.close()


async def test_a_small_pool_swaps_and_gives_the_same_tokens(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "swap_is_cheaper", lambda *_: True)  # this model is too small for it to be

    async def tokens(pool_tokens: int) -> tuple[list[tuple[int, ...]], int]:
        engine = CoreEngine(tiny_settings(tiny_gguf, kv_pool_tokens=pool_tokens))
        await engine.start()
        specs = [run_spec(f"r{i}", prompt_of(engine, 40, seed=i), greedy(60)) for i in range(4)]
        ids = [o.ids for o in await asyncio.gather(*(run(engine, spec) for spec in specs))]
        await engine.check_integrity()
        swapped: int = await engine._thread.call(lambda core: core._scheduler.swapped_total)
        await engine.close()
        return ids, swapped

    roomy, none = await tokens(1024)
    tight, some = await tokens(256)
    assert (none, some > 0) == (0, True)
    assert tight == roomy
