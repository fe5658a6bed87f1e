"""/healthz and /metrics of a node that is no entry."""

from __future__ import annotations

import httpx

from mesh.http.status_app import status_app
from mesh.telemetry.metrics import Metrics


async def test_health_and_metrics() -> None:
    ready = [True]
    app = status_app(Metrics(node_id="core-1", role="core"), lambda: ready[0])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        told = await client.get("/healthz")
        assert (told.status_code, told.json()) == (200, {"status": "ok"})
        ready[0] = False
        told = await client.get("/healthz")
        assert (told.status_code, told.json()) == (503, {"status": "draining"})
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert 'node_id="core-1"' in metrics.text
        assert (await client.get("/v1/models")).status_code == 404
        assert (await client.post("/healthz")).status_code == 405
