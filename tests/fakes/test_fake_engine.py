"""The fake engine keeps the Engine contract, so that tests over it mean something."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mesh.kv.geometry import KvDtype
from mesh.node.engine import Engine, RunId
from tests.conformance.engine_runs import TextStreams, greedy, hold_prefix, prompt_of, run, run_spec
from tests.conformance.engine_suite import EngineConformance
from tests.fakes.fake_engine import FakeEngine, FakeTextStream, tokens_of


class TestFakeEngine(EngineConformance):
    @pytest.fixture(params=list(KvDtype), ids=lambda d: d.value)
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        engine = FakeEngine(capacity_tokens=1024, kv_dtype=request.param)
        await engine.start()
        yield engine
        await engine.close()

    @pytest.fixture
    def text_streams(self) -> TextStreams:
        return FakeTextStream


async def test_a_slab_tells_its_tokens() -> None:
    engine = FakeEngine()
    prompt = prompt_of(engine, 30)
    await hold_prefix(engine, "h", prompt)
    assert tokens_of(await engine.export_kv(RunId("h"), 7, 21)) == prompt[7:21]


async def test_one_changed_element_gives_other_tokens() -> None:
    engine = FakeEngine()
    prompt = prompt_of(engine, 30)
    want = await run(engine, run_spec("w", prompt, greedy(8), salt=b"x"))
    await hold_prefix(engine, "h", prompt[:-1])
    engine._sequences[RunId("h")].rows[1, 1, 13, 1, 31] += 1
    got = await run(engine, run_spec("r", prompt, greedy(8), kv_from="h"))
    assert got.ids != want.ids
