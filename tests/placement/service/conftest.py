"""A registry in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.placement.service.registries import MoodyRegistry


@pytest.fixture
async def registry() -> AsyncIterator[MoodyRegistry]:
    made = MoodyRegistry()
    await made.start()
    yield made
    await made.close()
