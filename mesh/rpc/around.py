"""Server interceptors that run code around a handler, of whatever kind the RPC is.

grpc.aio gives an interceptor the handler before it runs; to see what the handler raises it has to be wrapped.
Streaming handlers are wrapped as coroutines that write by themselves, so that a handler which is an async
generator is closed at the moment its RPC is cancelled, not when the garbage collector finds it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc
import grpc.aio


class AroundInterceptor(grpc.aio.ServerInterceptor, ABC):  # type: ignore[misc]  # grpc is untyped
    """Base: `around` is entered before the handler runs and left after its last response, or by what it raised.

    It runs in the task of the RPC, so context variables set in it are seen by the handler."""

    @abstractmethod
    def around(self, method: str, context: grpc.aio.ServicerContext) -> AbstractAsyncContextManager[None]:
        """`method` is the full name, e.g. "/mesh.v1.Inference/Generate"."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such RPC: grpc answers UNIMPLEMENTED
        return self._wrap(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            run = self._streaming(method, inner)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            run = self._unary(method, inner)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(run, handler.request_deserializer, handler.response_serializer)

    def _unary(self, method: str, inner: Any) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
        _require(inspect.iscoroutinefunction(inner), method)

        async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self.around(method, context):
                return await inner(request, context)

        return run

    def _streaming(self, method: str, inner: Any) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]:
        if inspect.isasyncgenfunction(inner):

            async def run(request: Any, context: grpc.aio.ServicerContext) -> None:
                async with self.around(method, context), aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

            return run

        _require(inspect.iscoroutinefunction(inner), method)

        async def run_writer(request: Any, context: grpc.aio.ServicerContext) -> None:
            async with self.around(method, context):
                await inner(request, context)

        return run_writer


def _require(is_async: bool, method: str) -> None:
    if not is_async:
        raise TypeError(f"the handler of {method} must be an async def: a blocking one would escape the interceptors")
