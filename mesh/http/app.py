"""The OpenAI-compatible face of an entry, as an ASGI app over a Gateway.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}
    GET /healthz   GET /metrics

Headers and status are sent when the decision is there, so a request that is refused gets its real status; an error
after that ends the stream with an error event and no [DONE]. A client that leaves cancels its request. Nothing of a
prompt or an answer is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mesh.errors import Cancelled, Internal, InvalidRequest, MeshError, NotFound
from mesh.http.errors import error_body, error_headers, status_of
from mesh.http.gateway import Gateway
from mesh.http.responses import Assembler, Endpoint, model_json, models_body, samples_body
from mesh.http.samples import Events, Samples
from mesh.http.schema import MAX_BODY_BYTES, Sampling, parse_chat, parse_completion
from mesh.http.sse import SseResponse, until_disconnect
from mesh.http.translate import chat_request, completion_request, samples_of
from mesh.identity.principal import Principal
from mesh.telemetry.traces import take_incoming
from mesh.v1 import inference_pb2

BODY_TIMEOUT_S = 30.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[ASGIApp]]


def create_app(gateway: Gateway, *, clock: Callable[[], float] = time.time) -> ASGIApp:
    """The app. `clock` gives seconds since the epoch (OpenAI's `created`)."""
    face = _Face(gateway, clock)
    routes = [
        Route("/v1/chat/completions", _guarded(face.chat), methods=["POST"]),
        Route("/v1/completions", _guarded(face.completion), methods=["POST"]),
        Route("/v1/models", _guarded(face.models), methods=["GET"]),
        Route("/v1/models/{model:path}", _guarded(face.model), methods=["GET"]),
        Route("/healthz", _guarded(face.health), methods=["GET"]),
        Route("/metrics", _guarded(face.metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=cast(Any, {HTTPException: _on_http_error}))


class _Face:
    def __init__(self, gateway: Gateway, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._clock = clock

    async def chat(self, request: Request) -> ASGIApp:
        principal = await self._authenticate(request)
        body = parse_chat(await _read_body(request))
        return await self._answer(request, principal, Endpoint.CHAT, body, chat_request(body))

    async def completion(self, request: Request) -> ASGIApp:
        principal = await self._authenticate(request)
        body = parse_completion(await _read_body(request))
        return await self._answer(request, principal, Endpoint.COMPLETION, body, completion_request(body))

    async def models(self, request: Request) -> Response:
        principal = await self._authenticate(request)
        return JSONResponse(models_body(await self._gateway.models(principal)))

    async def model(self, request: Request) -> Response:
        principal = await self._authenticate(request)
        name = request.path_params["model"]
        for model in await self._gateway.models(principal):
            if model.id == name:
                return JSONResponse(model_json(model))
        raise NotFound(f"no model {name[:100]!r} here", field="model")

    async def health(self, _: Request) -> Response:
        ready = self._gateway.ready()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._gateway.metrics(), media_type=METRICS_TYPE)

    async def _authenticate(self, request: Request) -> Principal:
        take_incoming(request.headers.get("traceparent", ""))
        return await self._gateway.authenticate(request.headers.get("authorization"))

    async def _answer(
        self,
        request: Request,
        principal: Principal,
        endpoint: Endpoint,
        body: Sampling,
        generate: inference_pb2.GenerateRequest,
    ) -> ASGIApp:
        options = body.stream_options
        make = partial(
            Assembler,
            endpoint=endpoint,
            created_unix_s=int(self._clock()),
            include_usage=bool(body.stream and options is not None and options.include_usage),
            token_bytes=self._gateway.token_bytes,
        )
        requests = samples_of(generate, body.n or 1)
        first = make()
        samples = Samples(
            events=[_own(self._gateway.generate(principal, sample)) for sample in requests],
            assemblers=[first, *(make(index=i, first=first) for i in range(1, len(requests)))],
        )
        if not body.stream:
            await _unless_disconnected(request, samples.collect())
            return JSONResponse(samples_body(samples.assemblers), headers=first.headers())
        begun = await _unless_disconnected(request, samples.begin())
        return SseResponse(_stream(begun, samples), first.headers(), on_close=samples.close)


async def _own(events: AsyncIterator[inference_pb2.GenerateResponse]) -> Events:
    """A generator whose closing closes the gateway's iterator at once, and not when it is collected."""
    try:
        async for event in events:
            yield event
    finally:
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


async def _stream(begun: list[dict[str, Any]], samples: Samples) -> AsyncGenerator[bytes, None]:
    try:
        for chunk in begun:
            yield _event(chunk)
        async with aclosing(samples.chunks()) as chunks:
            async for chunk in chunks:
                yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except MeshError as error:
        yield _event(error_body(error))
    except Exception:
        yield _event(error_body(_bug()))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the work is cancelled when the client leaves first (Cancelled) or we are cancelled."""
    working = asyncio.create_task(work, name="http:work")
    leaving = asyncio.create_task(until_disconnect(request.receive), name="http:leave")
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client closed the connection")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _read_body(request: Request) -> bytes:
    """The whole body. Raises HTTPException 413 over MAX_BODY_BYTES and 408 after BODY_TIMEOUT_S without reading on."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise HTTPException(413)
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408) from None
    except ClientDisconnect:
        raise Cancelled("the client closed the connection") from None
    return b"".join(parts)


def _guarded(endpoint: Handler) -> Handler:
    """The endpoint with every error as a response. (Starlette's own handler for Exception raises it again.)"""

    async def guarded(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except HTTPException:
            raise
        except MeshError as error:
            return _error_response(error)
        except Exception:
            return _error_response(_bug())

    return guarded


def _error_response(error: MeshError) -> Response:
    return JSONResponse(error_body(error), status_of(error), error_headers(error))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Errors that Starlette or the size limit made: the same shape, their own status."""
    known: dict[int, MeshError] = {
        404: NotFound(f"no endpoint {request.url.path[:200]!r} here"),
        405: InvalidRequest(f"{request.method} is not possible on {request.url.path[:200]!r}"),
        408: InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", field="body"),
        413: InvalidRequest(f"the body has more than {MAX_BODY_BYTES} bytes", field="body"),
    }
    mesh_error = known.get(error.status_code, InvalidRequest(str(error.detail)))
    headers = dict(error.headers or {}) | error_headers(mesh_error)
    if error.status_code in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error_body(mesh_error, error.status_code), error.status_code, headers)


def _bug() -> Internal:
    """Log the exception that is being handled; the caller learns its id only."""
    error_id = uuid.uuid4().hex[:12]
    log.exception("http request failed by a bug: error_id=%s", error_id)
    return Internal(f"internal error; the node's log has it as error_id {error_id}", error_id=error_id)
