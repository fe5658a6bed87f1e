"""/healthz and /metrics of a node that is no entry: for Prometheus and for people. Nothing of a request is here."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mesh.telemetry.metrics import CONTENT_TYPE, Metrics


def status_app(metrics: Metrics, ready: Callable[[], bool]) -> ASGIApp:
    """`ready`: whether the node takes work."""

    async def healthz(_: Request) -> Response:
        is_ready = ready()
        return JSONResponse({"status": "ok" if is_ready else "draining"}, status_code=200 if is_ready else 503)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/healthz", healthz), Route("/metrics", show_metrics)])
