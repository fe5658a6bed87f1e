"""What an engine declares beyond the interface holds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from mesh.node.engine import Capability, Engine, ImportSpec, RunId
from tests.conformance.engine_runs import OTHER_SALT, EngineFixtures, greedy, hold_prefix, prompt_of, run, run_spec


def require(engine: Engine, capability: Capability) -> None:
    if capability not in engine.info.capabilities:
        pytest.skip(f"the engine does not declare {capability.value}")


class CapabilityConformance(EngineFixtures):
    """Part of EngineConformance."""

    async def test_exact_in_any_company(self, engine: Engine) -> None:
        require(engine, Capability.EXACT)
        prompt, wanted = prompt_of(engine, 90), greedy(12, logprobs=2)
        alone = await run(engine, run_spec("alone", prompt, wanted))
        others = [run_spec(f"o{i}", prompt_of(engine, 10 + 9 * i, i + 1), greedy(12)) for i in range(5)]
        same = run_spec("same", prompt, wanted, salt=OTHER_SALT)
        outcomes = await asyncio.gather(*(run(engine, spec) for spec in (*others[:3], same, *others[3:])))
        assert outcomes[3].ids == alone.ids
        assert outcomes[3].logprobs == alone.logprobs

    async def test_lossless_kv(self, engine: Engine) -> None:
        require(engine, Capability.LOSSLESS_KV)
        prompt = prompt_of(engine, 70)
        await hold_prefix(engine, "h", prompt)
        slab = await engine.export_kv(RunId("h"), 0, 70)
        assert slab.dtype is engine.info.kv_dtype
        await engine.open_import(ImportSpec(run_id=RunId("i"), token_ids=prompt, max_tokens=70, salt=OTHER_SALT))
        await engine.write_kv(RunId("i"), slab)
        back = await engine.export_kv(RunId("i"), 0, 70)
        assert np.array_equal(slab.k, back.k)
        assert np.array_equal(slab.v, back.v)
