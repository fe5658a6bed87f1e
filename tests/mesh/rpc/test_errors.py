"""Errors over the wire, both ways, for every class of the tree and every kind of RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from structlog.testing import capture_logs

from mesh.errors import (
    Internal,
    InvalidRequest,
    MeshError,
    NodeUnreachable,
    NotImplementedHere,
    Overloaded,
    PolicyDenied,
    Retry,
    walk,
)
from mesh.rpc.errors import ErrorInterceptor, from_rpc_error, to_status, translate_rpc_errors
from tests.mesh.rpc.conftest import Serve

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "unary_writer")


def handlers_raising(error: BaseException) -> dict[str, Any]:
    async def unary(request: Any, context: Any) -> bytes:
        raise error

    async def generator(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    async def writer(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.write(b"first")
        raise error

    return {
        "unary_unary": grpc.unary_unary_rpc_method_handler(unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(generator),
        "stream_unary": grpc.stream_unary_rpc_method_handler(unary),
        "stream_stream": grpc.stream_stream_rpc_method_handler(generator),
        "unary_writer": grpc.unary_stream_rpc_method_handler(writer),
    }


async def call(channel: grpc.aio.Channel, kind: str) -> list[bytes]:
    """Call the method of a kind; responses so far stay with the error as `responses`."""
    method = f"/test.Service/{kind}"
    streams_in, streams_out = kind.startswith("stream"), not kind.endswith("_unary")
    request: Any = iter([b"a", b"b"]) if streams_in else b"a"
    if not streams_out:
        stub = channel.stream_unary(method) if streams_in else channel.unary_unary(method)
        return [await stub(request, timeout=10)]
    stub = channel.stream_stream(method) if streams_in else channel.unary_stream(method)
    responses = []
    try:
        async for response in stub(request, timeout=10):
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        assert responses == [b"first"]
        raise error
    return responses


@pytest.mark.parametrize("kind", KINDS)
async def test_every_class_keeps_its_identity_on_every_kind_of_rpc(serve: Serve, kind: str) -> None:
    for cls in walk():
        sent = cls("What was wrong, in façade ✓", rule="labels.restricted", node="core-1")
        channel = await serve(handlers_raising(sent), [ErrorInterceptor()])
        with pytest.raises(MeshError) as caught, translate_rpc_errors():
            await call(channel, kind)
        received = caught.value
        assert type(received) is (Internal if cls is MeshError else cls)
        assert received.message == sent.message
        assert received.details.items() >= sent.details.items()
        assert ("retry_after_s" in received.details) == (cls.retry is Retry.BACK_OFF)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_logged_and_not_told(serve: Serve, kind: str) -> None:
    bug = ZeroDivisionError("a secret")
    channel = await serve(handlers_raising(bug), [ErrorInterceptor()])
    with capture_logs() as lines, pytest.raises(Internal) as caught, translate_rpc_errors():
        await call(channel, kind)
    assert "a secret" not in caught.value.message
    (line,) = lines
    assert (line["event"], line["log_level"], line["exc_info"]) == ("rpc_failed_by_bug", "error", True)
    assert line["error_id"] == caught.value.details["error_id"]
    assert line["method"] == f"/test.Service/{kind}"


async def test_a_handlers_own_abort_is_left_alone(serve: Serve) -> None:
    async def handler(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")

    channel = await serve({"unary_unary": grpc.unary_unary_rpc_method_handler(handler)}, [ErrorInterceptor()])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "unary_unary")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ALREADY_EXISTS, "mine")


async def test_cancelling_the_call_closes_a_generator_at_once(serve: Serve) -> None:
    closed = asyncio.Event()

    async def handler(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"token"
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    channel = await serve({"unary_stream": grpc.unary_stream_rpc_method_handler(handler)}, [ErrorInterceptor()])
    stream = channel.unary_stream("/test.Service/unary_stream")(b"")
    assert await stream.read() == b"token"
    stream.cancel()
    async with asyncio.timeout(10):
        await closed.wait()


async def test_an_unknown_method_is_unimplemented(serve: Serve) -> None:
    channel = await serve({}, [ErrorInterceptor()])
    with pytest.raises(NotImplementedHere), translate_rpc_errors():
        await call(channel, "unary_unary")


async def test_an_oversized_message_is_an_invalid_request(serve: Serve) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    handlers = {"unary_unary": grpc.unary_unary_rpc_method_handler(echo)}
    channel = await serve(handlers, [ErrorInterceptor()], [("grpc.max_receive_message_length", 1000)])
    with pytest.raises(InvalidRequest, match="too large"), translate_rpc_errors():
        await channel.unary_unary("/test.Service/unary_unary")(b"x" * 2000, timeout=10)
    assert await channel.unary_unary("/test.Service/unary_unary")(b"x" * 500, timeout=10) == b"x" * 500


async def test_a_dead_address_is_node_unreachable_and_named() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(NodeUnreachable, match="core-1") as caught, translate_rpc_errors("core-1"):
            await channel.unary_unary("/test.Service/unary_unary")(b"", timeout=10)
    assert caught.value.details == {"node": "core-1"}
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)


async def test_long_messages_and_details_are_cut_not_lost(serve: Serve) -> None:
    sent = PolicyDenied("línea\n" * 2000, rule="labels.restricted", why="y" * 5000)
    channel = await serve(handlers_raising(sent), [ErrorInterceptor()])
    with pytest.raises(PolicyDenied) as caught, translate_rpc_errors():
        await call(channel, "unary_unary")
    assert caught.value.message.startswith("línea línea")
    assert caught.value.message.endswith(" ...")
    assert caught.value.details == {"rule": "labels.restricted"}


@pytest.mark.parametrize(("said", "sent"), [("2.5", 2500), ("soon", 1000), ("nan", 1000), ("-1", 1000), (None, 1000)])
def test_retry_info(said: str | None, sent: int) -> None:
    details = {} if said is None else {"retry_after_s": said}
    status = to_status(Overloaded("no room", **details))
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == sent


def rpc_error(code: grpc.StatusCode, *trailers: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details="said")


def test_every_bare_code_has_a_class() -> None:
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        error = from_rpc_error(rpc_error(code))
        assert error.message == "said"
        if code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.OUT_OF_RANGE):
            assert error.code.value == code.value[0]


def test_details_that_are_garbage_or_foreign_or_contradict_fall_back_to_the_code() -> None:
    garbage = rpc_error(grpc.StatusCode.UNAVAILABLE, ("grpc-status-details-bin", b"\xff\xff\xff"))
    assert type(from_rpc_error(garbage)) is NodeUnreachable
    lying = to_status(InvalidRequest("no")).SerializeToString()
    assert type(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, ("grpc-status-details-bin", lying)))) is (
        NodeUnreachable
    )


async def test_a_blocking_handler_is_refused() -> None:
    def blocking(request: Any, context: Any) -> bytes:
        return b""

    with pytest.raises(TypeError, match="async def"):
        ErrorInterceptor()._wrap("/test.Service/X", grpc.unary_unary_rpc_method_handler(blocking))
