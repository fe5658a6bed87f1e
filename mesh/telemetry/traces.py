"""Traces of requests over all their legs (OpenTelemetry), off unless settings name a collector.

A span's parent travels as a W3C traceparent: from a client in gRPC metadata or an HTTP header, from an entry to nodes
inside the context of each order, so that it passes uplinks too. Where no traces are kept, a traceparent is handed on as
it came. Attributes are counts, times, node ids and words of enums: never text, token ids or secrets; a tenant or label
only where settings allow it. A name that is not in ATTRIBUTES is a bug and raises.

The SDK is an optional extra (kvmesh[traces]) and is imported only when traces are on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from mesh.errors import InvalidRequest, MeshError
from mesh.settings import Traces

ATTRIBUTES = frozenset(
    {
        "request_id", "model", "shape", "outcome", "node", "source", "target", "codec", "cause", "kind",
        "prompt_tokens", "generated_tokens", "cached_tokens", "kv_tokens", "wire_bytes", "own_tokens", "candidates",
        "policy_version", "raised", "tenant", "label",
    }
)  # fmt: skip
_WITHHELD_UNLESS_ALLOWED = {"tenant": "tell_tenant", "label": "tell_label"}
_MOST_CHARS = 256
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool


def checked_traceparent(text: str) -> str:
    """The text if it is a W3C traceparent, else nothing: a bad one starts a new trace and is no error. Pure."""
    return text if _TRACEPARENT.fullmatch(text) else ""


class Span(Protocol):
    """One span. `end` must be called, once; more than once is fine."""

    @property
    def traceparent(self) -> str:
        """For its children, here or elsewhere."""
        ...

    def set(self, **attributes: Value) -> None: ...

    def end(self, error: MeshError | None = None) -> None: ...


class _NoSpan:
    """Where no traces are kept: hands its parent on."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, **attributes: Value) -> None:
        _check(attributes)

    def end(self, error: MeshError | None = None) -> None:
        return


class Tracer(Protocol):
    """Starts spans."""

    def start(self, name: str, parent: str, attributes: Mapping[str, Value]) -> Span: ...

    def close(self) -> None:
        """Send what is left. Blocks for a few seconds at most."""


class NoTracer:
    """Traces are off."""

    def start(self, name: str, parent: str, attributes: Mapping[str, Value]) -> Span:
        _check(attributes)
        return _NoSpan(parent)

    def close(self) -> None:
        return


_tracer: Tracer = NoTracer()
_incoming: ContextVar[str] = ContextVar("kvmesh_traceparent", default="")


def configure_traces(settings: Traces, *, node_id: str, role: str) -> Tracer:
    """Use a tracer in this process from now on; the caller closes it. Raises InvalidRequest if the extra is missing."""
    global _tracer
    if settings.otlp_endpoint is None:
        _tracer = NoTracer()
        return _tracer
    try:
        from mesh.telemetry.otel import OtelTracer
    except ImportError as error:
        raise InvalidRequest(
            f"traces need the package {error.name}: pip install 'kvmesh[traces]'", field="traces.otlp_endpoint"
        ) from error
    _tracer = OtelTracer(settings, node_id=node_id, role=role)
    return _tracer


def use_tracer(tracer: Tracer) -> None:
    """For tests."""
    global _tracer
    _tracer = tracer


def start_span(name: str, *, parent: str = "", **attributes: Value) -> Span:
    """A span below `parent`, or the beginning of a trace."""
    return _tracer.start(name, parent, attributes)


@contextmanager
def span(name: str, *, parent: str = "", **attributes: Value) -> Iterator[Span]:
    """The same around a block; an error that leaves it is noted by its reason."""
    started = start_span(name, parent=parent, **attributes)
    try:
        yield started
    except MeshError as error:
        started.end(error)
        raise
    finally:
        started.end()


def incoming() -> str:
    """The traceparent that came with the call that runs in this task; empty: none."""
    return _incoming.get()


def take_incoming(traceparent: str) -> None:
    """A call came with this; what is no traceparent is ignored."""
    _incoming.set(checked_traceparent(traceparent))


def withheld(name: str, value: Any, settings: Traces) -> bool:
    """Whether an attribute must not leave this process."""
    allowed_by = _WITHHELD_UNLESS_ALLOWED.get(name)
    return allowed_by is not None and not getattr(settings, allowed_by)


def shortened(value: Value) -> Value:
    """Text bounded."""
    return value[:_MOST_CHARS] if isinstance(value, str) else value


def _check(attributes: Mapping[str, Value]) -> None:
    unknown = attributes.keys() - ATTRIBUTES
    if unknown:
        raise ValueError(f"span attributes that are not known to be harmless: {sorted(unknown)}")


check_attributes = _check
