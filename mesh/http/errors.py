"""The error tree as HTTP: status, headers and OpenAI's error object, in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from mesh.errors import Code, MeshError, Retry

# google.rpc.Code's own mapping to HTTP (google/rpc/code.proto).
STATUS: Final[Mapping[Code, int]] = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_RETRIED: Final = frozenset({Retry.BACK_OFF, Retry.ELSEWHERE, Retry.REPLAN, Retry.RECOMPUTE})
_RETRY_AFTER_S: Final = "retry_after_s"  # the detail that mesh.rpc.errors uses too


def status_of(error: MeshError) -> int:
    """HTTP status."""
    return STATUS[error.code]


def error_body(error: MeshError, status: int | None = None) -> dict[str, Any]:
    """OpenAI's error object; `kvmesh` holds the reason word and details that gRPC callers get."""
    status = status_of(error) if status is None else status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "code": error.reason.lower(),
            "param": error.details.get("field"),
            "kvmesh": {"reason": error.reason, "retry": error.retry.value, "details": error.details},
        }
    }


def error_headers(error: MeshError) -> dict[str, str]:
    """`x-should-retry` tells OpenAI's clients what the error class fixes; `retry-after` in whole seconds."""
    headers = {"x-should-retry": "true" if error.retry in _RETRIED else "false"}
    if error.retry is Retry.BACK_OFF:
        headers["retry-after"] = _whole_seconds(error.details.get(_RETRY_AFTER_S, "1"))
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def _whole_seconds(text: str) -> str:
    try:
        return str(min(3600, max(1, math.ceil(float(text)))))
    except (ValueError, OverflowError):
        return "1"
