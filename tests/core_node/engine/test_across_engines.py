"""K and V of one model from both engines: what the core exports is what llama.cpp stores, for each architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from core_node.engine.engine import CoreEngine
from edge_node.engine.engine import EdgeEngine
from edge_node.engine.settings import EdgeEngineSettings
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab
from mesh.node.engine import Engine, ImportSpec, RunId
from tests.conformance.engine_runs import greedy, hold_prefix, run, run_spec
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf
from tests.core_node.engine.conftest import tiny_settings

pytestmark = pytest.mark.model
PROMPT = tuple(range(7, 60))
N = len(PROMPT) - 1


async def exported(engine: Engine) -> KvSlab:
    await hold_prefix(engine, "h", PROMPT[:N])
    return await engine.export_kv(RunId("h"), 0, N)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
async def test_kv_is_in_llama_cpps_order(architecture: str, tmp_path: Path) -> None:
    config = TinyConfig(architecture=architecture, head_dim=32, tied=architecture == "llama")
    path = write_gguf(tmp_path / "m.F32.gguf", random_weights(config), config)
    core = CoreEngine(tiny_settings(path, kv_dtype=KvDtype.F16))
    edge = EdgeEngine(
        EdgeEngineSettings(model_path=path, model_id="tiny", n_threads=1, n_ctx_tokens=512, max_sequences=16)
    )
    try:
        await core.start()
        await edge.start()
        assert core.info.geometry.layout_hash == edge.info.geometry.layout_hash
        ours, theirs = await exported(core), await exported(edge)
        for name in ("k", "v"):
            a, b = (np.asarray(getattr(slab, name), np.float32) for slab in (ours, theirs))
            assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b), name
        # And a core goes on from llama.cpp's KV as from its own.
        want = await run(core, run_spec("w", PROMPT, greedy(16), kv_from="h"))
        await core.open_import(ImportSpec(run_id=RunId("i"), token_ids=PROMPT, max_tokens=100, salt=b"other"))
        await core.write_kv(RunId("i"), theirs)
        got = await run(core, run_spec("g", PROMPT, greedy(16), kv_from="i", salt=b"other"))
        assert got.prefilled[0].cached == N
        assert got.ids[:4] == want.ids[:4]
    finally:
        await core.close()
        await edge.close()
