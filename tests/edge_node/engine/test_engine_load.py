"""Many runs at once on a real engine with too few cells: shared, preempted, cancelled, and still right.

Under pressure cells are taken out of order, so llama.cpp's tokens may differ from those of a run alone where two
logits are close. So each run is judged by what a fresh run says of its tokens: they must be its best, or close.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from edge_node.engine.engine import EdgeEngine
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import RunId
from tests.conformance.engine_runs import OTHER_SALT, Outcome, collect, greedy, run, run_spec
from tests.edge_node.engine.engines import demo_model, edge_settings, started
from tests.fakes.mesh import until_true

pytestmark = pytest.mark.model

HEAD = "Here is a list of the seasons and of the months that belong to each of them. "
TAILS = [
    "Winter: December,", "Spring: March, April,", "Summer: June,", "Autumn: September,", "The first month is",
    "After Monday comes", "One, two, three, four,", "A, B, C, D,", "The capital of France is", "The sun rises in the",
]  # fmt: skip
CLOSE_NATS = 2.0  # twice the difference that rounding makes


async def test_under_pressure_runs_say_what_the_model_says() -> None:
    text = load_tokenizer(demo_model())
    prompts = [tuple(text.encode(HEAD + tail)) for tail in TAILS]
    settings = edge_settings(n_ctx_tokens=192, max_running=4, max_sequences=8)
    async with started(EdgeEngine(settings)) as engine:
        seen = [Outcome() for _ in prompts]
        tasks = [
            asyncio.create_task(collect(engine.generate(run_spec(f"t{i}", p, greedy(60), priority=i % 2)), seen[i]))
            for i, p in enumerate(prompts)
        ]
        gone = random.Random(0).sample(range(len(prompts)), 3)

        async def is_under_pressure() -> bool:
            return (await engine.load()).preempted_total > 0

        await until_true(is_under_pressure, timeout_s=120.0)
        tasks[gone[0]].cancel()
        await engine.release(RunId(f"t{gone[1]}"))
        tasks[gone[2]].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        load = await engine.load()
        assert load.preempted_total > 0
        assert load.cached_tokens_total > 0
        assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
        await engine.check_integrity()
        for i, (prompt, outcome) in enumerate(zip(prompts, seen, strict=True)):
            assert len(outcome.ids) == 60 or i in gone
            for at in range(3, len(outcome.ids), 19):
                before = prompt + outcome.ids[:at]
                judge = await run(engine, run_spec("judge", before, greedy(1, logprobs=20), salt=OTHER_SALT))
                ranked = judge.logprobs[0][1]
                said = dict(ranked).get(outcome.ids[at])
                assert said is not None, f"run {i} said at {at} what is not among the model's 20 best"
                assert ranked[0][1] - said < CLOSE_NATS
