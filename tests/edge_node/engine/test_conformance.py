"""The engine conformance suite on the edge engine, with small batches (exact) and with the usual ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from edge_node.engine.engine import EdgeEngine
from edge_node.engine.settings import EXACT_STEP_TOKENS
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import Engine
from tests.conformance.engine_kv_suite import KvConformance
from tests.conformance.engine_runs import TextStreams
from tests.conformance.engine_suite import EngineConformance
from tests.edge_node.engine.engines import demo_model, edge_settings, started

pytestmark = pytest.mark.model


class TestExactEdgeEngine(EngineConformance):
    """Batches of at most 63 tokens and cells that lie in order: the same bits whatever else is computed or cached."""

    recompute_is_exact: ClassVar[bool] = True

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async with started(
            EdgeEngine(edge_settings(max_step_tokens=EXACT_STEP_TOKENS, max_context_tokens=256))
        ) as engine:
            yield engine

    @pytest.fixture
    def text_streams(self) -> TextStreams:
        return load_tokenizer(demo_model()).stream


class TestFastEdgeEngine(KvConformance):
    """Large batches: attention works in tiles of 64 cells, so a row depends on its place in the cache. KV that is
    moved still continues with the same tokens."""

    recompute_is_exact: ClassVar[bool] = False

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async with started(EdgeEngine(edge_settings(max_step_tokens=256, max_context_tokens=256))) as engine:
            yield engine
