"""Errors on the wire: one mapping from mesh.errors to gRPC status and back.

Outbound: a MeshError becomes its code plus a google.rpc.Status in the trailers (ErrorInfo with the reason word
and the details; RetryInfo where the caller should back off). Anything else becomes INTERNAL with an error id,
and its traceback is logged here; grpc's own default, UNKNOWN, never leaves a kvmesh server. CancelledError
passes. Inbound: the reason word decides the class; a bare code from a proxy or from grpc itself decides less
precisely.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from mesh.errors import Internal, InvalidRequest, MeshError, Retry, by_code, by_reason
from mesh.rpc.around import AroundInterceptor
from mesh.telemetry.log import get_logger

DOMAIN = "kvmesh"
DETAILS_KEY = "grpc-status-details-bin"
RETRY_AFTER = "retry_after_s"
"""Detail of a back-off error: seconds after which to try again. Travels as RetryInfo."""

# A peer's trailers are refused beyond about 8 KiB, and the message travels twice (percent-encoded and in the
# details). What does not fit is cut, since an error that can't be delivered arrives as a broken connection.
_MAX_MESSAGE_BYTES = 1024
_MAX_DETAILS_BYTES = 2048
_DEFAULT_RETRY_AFTER_S = 1.0

log = get_logger(__name__)


def to_status(error: MeshError) -> status_pb2.Status:
    """The google.rpc.Status of an error, cut to what trailers carry."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    room_bytes = _MAX_DETAILS_BYTES
    for key, value in error.details.items():
        size_bytes = len(key.encode()) + len(value.encode())
        if size_bytes <= room_bytes:
            info.metadata[key] = value
            room_bytes -= size_bytes
    status = status_pb2.Status(code=error.code.value, message=message)
    status.details.add().Pack(info)
    if error.retry is Retry.BACK_OFF:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(_retry_after_s(error) * 1000))
        status.details.add().Pack(retry)
    return status


async def abort_with(context: grpc.aio.ServicerContext, error: MeshError) -> None:
    """End the RPC with this error. Never returns: raises grpc.aio.AbortError, which must not be caught."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


class ErrorInterceptor(AroundInterceptor):
    """The outermost interceptor of every kvmesh server: turns what a handler raises into the right status."""

    @asynccontextmanager
    async def around(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise  # already on its way to the caller
        except MeshError as error:
            await abort_with(context, error)
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            log.exception("rpc_failed_by_bug", method=method, error_id=error_id)
            await abort_with(
                context,
                Internal(f"internal error; the node's log has it as error_id {error_id}", error_id=error_id),
            )


def from_rpc_error(error: grpc.aio.AioRpcError, *, node: str = "") -> MeshError:
    """The MeshError behind a failed call. `node` names who was called, for errors that grpc made by itself."""
    code: int = error.code().value[0]
    message = error.details() or error.code().name
    sent = _from_details(error, code, message)
    if sent is not None:
        return sent
    details = {"node": node} if node else {}
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return InvalidRequest(f"the message is too large for the peer or for us: {message}", **details)
    if error.code() is grpc.StatusCode.OUT_OF_RANGE:
        return InvalidRequest(message, **details)
    prefix = f"node {node}: " if node else ""
    return by_code(code)(prefix + message, **details)


@contextmanager
def translate_rpc_errors(node: str = "") -> Iterator[None]:
    """Around client calls: AioRpcError leaves as MeshError, its cause kept."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, node=node) from error


def _from_details(error: grpc.aio.AioRpcError, code: int, message: str) -> MeshError | None:
    """What a kvmesh peer said in the trailers; None if there is nothing (readable) of ours."""
    blobs = [value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY]
    if not blobs:
        return None
    try:
        status = status_pb2.Status.FromString(blobs[0])
    except DecodeError:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        # Unpack is a no-op on another type.
        if not detail.Unpack(info):
            detail.Unpack(retry)
    if info.domain != DOMAIN:
        return None
    cls = by_reason(info.reason)
    if cls.code.value != code:
        cls = by_code(code)  # a newer peer's word: its code still tells what to do
    details = dict(info.metadata)
    details.pop("message", None)  # would collide with the constructor's own argument
    if retry.HasField("retry_delay"):
        details[RETRY_AFTER] = f"{retry.retry_delay.ToMilliseconds() / 1000:g}"
    return cls(message, **details)


def _retry_after_s(error: MeshError) -> float:
    """The wait that the error names; a wait that is no sensible number is replaced by the default."""
    try:
        wait_s = float(error.details.get(RETRY_AFTER, _DEFAULT_RETRY_AFTER_S))
    except ValueError:
        return _DEFAULT_RETRY_AFTER_S
    return wait_s if 0 <= wait_s <= 3600 else _DEFAULT_RETRY_AFTER_S


def _cut(text: str, limit_bytes: int) -> str:
    """`text` in at most so many UTF-8 bytes. Line breaks become spaces: a status message is one line."""
    raw = " ".join(text.splitlines()).encode(errors="replace")
    if len(raw) <= limit_bytes:
        return raw.decode()
    return raw[: limit_bytes - 4].decode(errors="ignore") + " ..."
