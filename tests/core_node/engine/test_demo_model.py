"""The demo model in the core engine: exact in f32, close in bf16, and equal after KV moved."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from core_node.bench.company import random_fate, together
from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from mesh.kv.geometry import KvDtype
from mesh.model.tokenizer import Tokenizer, load_tokenizer
from mesh.node.engine import Finished, FinishReason, ImportSpec, RunId
from tests.conformance.engine_runs import greedy, hold_prefix, run, run_spec
from tests.core_node.engine.demo_model import demo_model_path, demo_prompts, demo_reference
from tests.core_node.engine.reference import Agreement, Reference
from tests.core_node.engine.test_exactness import check, generate

pytestmark = pytest.mark.model

N_TOKENS = 12


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return demo_reference(path)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    return [tuple(tokenizer.encode(text)) for text in demo_prompts()]


def settings(path: Path, **changes: object) -> CoreEngineSettings:
    values: dict[str, object] = {
        "model_path": path,
        "model_id": "smollm2-135m",
        "dtype": "f32",
        "n_threads": 1,
        "kv_pool_tokens": 4096,
        "max_step_tokens": 256,
    }
    return CoreEngineSettings(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", ["alone", "batched", "preempted", "prefix hits"])
async def test_f32_equals_the_reference(
    variant: str, path: Path, reference: Reference, prompts: list[tuple[int, ...]]
) -> None:
    pool = 320 if variant == "preempted" else 4096
    n_tokens = 5 if variant == "alone" else N_TOKENS  # one sequence at a time is slow
    outcomes, load = await generate(settings(path, kv_pool_tokens=pool), prompts, n_tokens, variant)
    agreement = check(reference, prompts, outcomes, n_tokens, variant)
    assert agreement.wrong == 0
    assert (load.preempted_total > 0) == (variant == "preempted")


async def random_schedule(
    path: Path, reference: Reference, tokenizer: Tokenizer, *, n_prompts: int, n_tokens: int, seed: int
) -> None:
    """Many requests over two engines, each to a random fate; every token is held against the reference."""
    texts = [f"{text} {i}." if i >= 50 else text for i in range(n_prompts) for text in [demo_prompts()[i * 7 % 50]]]
    prompts = [tuple(tokenizer.encode(text)) for text in texts]
    rng = random.Random(seed)
    engines = (
        CoreEngine(settings(path, max_step_tokens=rng.choice([48, 100]), kv_pool_tokens=640)),
        CoreEngine(settings(path, kv_pool_tokens=1024)),
    )
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        fates = [random_fate(rng, len(prompt), n_tokens) for prompt in prompts]
        got = await together(engines, prompts, fates, n_tokens)
        for engine in engines:
            await engine.check_integrity()
    finally:
        for engine in engines:
            await engine.close()
    agreement = Agreement()
    with torch.inference_mode():
        for prompt, ids in zip(prompts, got, strict=True):
            assert len(ids) == n_tokens
            agreement.add(reference.logits(prompt + ids), len(prompt), ids)
    print(f"\n{n_prompts} prompts, seed {seed}: {agreement}")
    assert agreement.wrong == 0
    assert agreement.equal > 0.99 * n_prompts * n_tokens


async def test_a_random_schedule_of_20_prompts(path: Path, reference: Reference, tokenizer: Tokenizer) -> None:
    await random_schedule(path, reference, tokenizer, n_prompts=20, n_tokens=8, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [2, 3, 4])
async def test_random_schedules_of_200_prompts(
    seed: int, path: Path, reference: Reference, tokenizer: Tokenizer
) -> None:
    await random_schedule(path, reference, tokenizer, n_prompts=200, n_tokens=16, seed=seed)


async def test_bf16_is_close_to_the_reference(path: Path, reference: Reference, prompts: list[tuple[int, ...]]) -> None:
    outcomes, _ = await generate(settings(path, dtype="bf16"), prompts, N_TOKENS, "batched")
    agreement = check(reference, prompts, outcomes, N_TOKENS, "bf16")
    assert agreement.equal >= 0.95 * N_TOKENS * len(prompts)


async def test_a_known_continuation_and_a_stop_string(path: Path, tokenizer: Tokenizer) -> None:
    engine = CoreEngine(settings(path))
    await engine.start()
    prompt = tokenizer.encode("The capital of France is")
    outcome = await run(engine, run_spec("r", prompt, greedy(12)))
    assert tokenizer.decode(outcome.ids).startswith(" Paris.")
    stopped = await run(engine, run_spec("s", prompt, greedy(12, stop=("is.",))))
    assert stopped.finished == Finished(FinishReason.STOP, "is.")
    assert tokenizer.decode(stopped.ids) == " Paris."
    result = await engine.self_test()
    print(f"\nprefill {result.prefill_tokens_per_s:.0f} tokens/s, decode {result.decode_tokens_per_s:.1f} tokens/s")
    await engine.close()


async def test_kv_moves_between_two_engines(path: Path, prompts: list[tuple[int, ...]]) -> None:
    """As f16 from an f32 pool: the target continues as the source would with the same rounded KV."""
    prompt = prompts[40] + prompts[3]
    source = CoreEngine(settings(path, kv_dtype=KvDtype.F16, kv_pool_tokens=512))
    target = CoreEngine(settings(path, kv_dtype=KvDtype.F32, kv_pool_tokens=512))
    await asyncio.gather(source.start(), target.start())
    await hold_prefix(source, "h", prompt[:-1])
    slab = await source.export_kv(RunId("h"), 0, len(prompt) - 1)
    want = await run(source, run_spec("w", prompt, greedy(24), kv_from="h"))
    await target.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=200, salt=b"tenant-a/public"))
    for start in range(0, slab.n_tokens, 20):
        await target.write_kv(RunId("i"), slab.tokens(start, min(start + 20, slab.n_tokens)))
    got = await run(target, run_spec("g", prompt, greedy(24), kv_from="i"))
    assert got.prefilled[0].cached == len(prompt) - 1
    assert sum(a == b for a, b in zip(got.ids, want.ids, strict=True)) >= 20
    for engine in (source, target):
        await engine.check_integrity()
        await engine.close()
