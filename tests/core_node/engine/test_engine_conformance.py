"""The engine conformance suite on the core engine, in each KV dtype."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core_node.engine.engine import CoreEngine
from mesh.kv.geometry import KvDtype
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import Capability, Engine
from tests.conformance.engine_capability_suite import CapabilityConformance
from tests.conformance.engine_runs import TextStreams
from tests.conformance.engine_suite import EngineConformance
from tests.core_node.engine.conftest import tiny_settings


class TestCoreEngine(EngineConformance):
    kv_dtype = KvDtype.F32

    @pytest.fixture
    async def engine(self, tiny_gguf: Path) -> AsyncIterator[Engine]:
        engine = CoreEngine(tiny_settings(tiny_gguf, kv_dtype=self.kv_dtype))
        await engine.start()
        yield engine
        await engine.close()

    @pytest.fixture
    def text_streams(self, tiny_gguf: Path) -> TextStreams:
        return load_tokenizer(tiny_gguf).stream


class TestCoreEngineWithF16Kv(TestCoreEngine):
    kv_dtype = KvDtype.F16


class TestCoreEngineWithBf16Kv(TestCoreEngine):
    kv_dtype = KvDtype.BF16
    recompute_is_exact = False


class TestExactCoreEngine(CapabilityConformance):
    """Torch in bf16 with `exact`."""

    @pytest.fixture
    async def engine(self, tiny_gguf: Path) -> AsyncIterator[Engine]:
        engine = CoreEngine(tiny_settings(tiny_gguf, dtype="bf16", backend="torch", exact=True))
        await engine.start()
        assert Capability.EXACT in engine.info.capabilities
        yield engine
        await engine.close()
