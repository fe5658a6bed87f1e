"""The OpenTelemetry tracer behind mesh.telemetry.traces: batches, sent to a collector over OTLP/HTTP.

Imported only when traces are on. Nothing is read from the environment but what the SDK itself insists on.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mesh import __version__
from mesh.errors import MeshError
from mesh.settings import Traces
from mesh.telemetry.traces import Span, Value, check_attributes, checked_traceparent, shortened, withheld

_EXPORT_TIMEOUT_S = 5
_PREFIX = "kvmesh."
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTracer:
    """Owns the provider of this process; not OpenTelemetry's global one, which a host program may use for itself."""

    def __init__(self, settings: Traces, *, node_id: str, role: str, processor: SpanProcessor | None = None) -> None:
        self._settings = settings
        self._provider = TracerProvider(
            resource=Resource(
                {
                    "service.name": "kvmesh",
                    "service.instance.id": node_id,
                    "service.version": __version__,
                    "kvmesh.role": role,
                }
            ),
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor or BatchSpanProcessor(_exporter(settings)))
        self._tracer = self._provider.get_tracer("kvmesh", __version__)

    def start(self, name: str, parent: str, attributes: Mapping[str, Value]) -> Span:
        """See mesh.telemetry.traces.Tracer."""
        carrier = {"traceparent": parent} if checked_traceparent(parent) else {}
        started = self._tracer.start_span(_PREFIX + name, context=_PROPAGATOR.extract(carrier))
        made = _OtelSpan(started, self._settings)
        made.set(**attributes)
        return made

    def close(self) -> None:
        """See mesh.telemetry.traces.Tracer."""
        self._provider.shutdown()


class _OtelSpan:
    def __init__(self, started: trace.Span, settings: Traces) -> None:
        self._span = started
        self._settings = settings
        self._ended = False

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def set(self, **attributes: Value) -> None:
        check_attributes(attributes)
        for name, value in attributes.items():
            if not withheld(name, value, self._settings):
                self._span.set_attribute(_PREFIX + name, shortened(value))

    def end(self, error: MeshError | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if error is not None:  # its reason word: a message may quote what the caller sent
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error.reason))
        self._span.end()


def _exporter(settings: Traces) -> SpanExporter:
    return OTLPSpanExporter(endpoint=f"{str(settings.otlp_endpoint).rstrip('/')}/v1/traces", timeout=_EXPORT_TIMEOUT_S)
