from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from mesh.http.app import create_app
from tests.mesh.http.fake_gateway import KEY, FakeGateway


@pytest.fixture
async def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
async def http(gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(gateway, clock=lambda: 1_700_000_000.5))
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh", headers=headers) as client:
        yield client
