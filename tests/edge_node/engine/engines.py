"""Real edge engines for tests: one thread, small context, the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_node.engine.engine import EdgeEngine
from edge_node.engine.settings import EdgeEngineSettings
from mesh.errors import UnknownModel
from mesh.model.catalogue import DEMO_MODEL, demo_model_path


def demo_model() -> Path:
    """The demo model, or a skip that says how to get it."""
    try:
        return demo_model_path()
    except UnknownModel as error:
        pytest.skip(error.message)


def edge_settings(**changes: Any) -> EdgeEngineSettings:
    """Settings for the demo model, small and single-threaded."""
    settings = EdgeEngineSettings(
        model_path=demo_model(),
        model_id=DEMO_MODEL,
        n_threads=1,
        n_ctx_tokens=1024,
        max_sequences=16,
        restart_backoff_s=(0.01, 0.1),
    )
    return replace(settings, **changes)


@asynccontextmanager
async def started(engine: EdgeEngine) -> AsyncIterator[EdgeEngine]:
    """The engine, started, and closed afterwards."""
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
