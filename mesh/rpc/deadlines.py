"""Deadlines travel with a request: grpc for Python does not forward them by itself."""

from __future__ import annotations

import grpc.aio

from mesh.errors import Expired


def remaining_s(context: grpc.aio.ServicerContext, *, cap_s: float) -> float:
    """Time that is left for the RPC in `context`, at most `cap_s`; the `timeout` for calls made on its behalf.
    Raises Expired if none is left."""
    left_s: float | None = context.time_remaining()
    if left_s is None:
        return cap_s
    if left_s <= 0:
        raise Expired("the request's deadline has passed")
    return min(left_s, cap_s)
