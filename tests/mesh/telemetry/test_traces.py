"""Traces: one tree over all legs of a request, nothing in it that could hold data, and nothing at all by default."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh.errors import InvalidRequest, MeshError, PolicyDenied
from mesh.node.wire import context_from_wire, context_to_wire
from mesh.settings import Traces
from mesh.telemetry import traces
from mesh.telemetry.otel import OtelTracer
from mesh.v1 import inference_pb2 as pb
from tests.fakes.fake_node import context_of
from tests.fakes.mesh import MemoryMesh, ask, request_of

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
SECRET_PROMPT = "qzx the patient's name is Marwood qzx"


class Kept:
    """Spans of one process."""

    def __init__(self, settings: Traces) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(settings, node_id="paris", role="edge", processor=SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans if each.name == f"kvmesh.{name}"]

    def tree(self) -> set[tuple[str, str]]:
        """(span, parent) by name."""
        names = {each.context.span_id: each.name.removeprefix("kvmesh.") for each in self.spans}
        return {
            (names[each.context.span_id], names.get(each.parent.span_id, "outside") if each.parent else "none")
            for each in self.spans
        }


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept(Traces(otlp_endpoint="http://127.0.0.1:4318"))
    traces.use_tracer(made.tracer)
    yield made
    traces.use_tracer(traces.NoTracer())
    made.tracer.close()


async def served(request: pb.GenerateRequest, *nodes: str) -> MemoryMesh:
    mesh = MemoryMesh(*nodes, entry="paris")
    try:
        await ask(mesh.door, request)
    finally:
        await mesh.close()
    return mesh


async def test_a_split_request_is_one_tree_over_entry_and_nodes(kept: Kept) -> None:
    traces.take_incoming(PARENT)
    request = request_of(SECRET_PROMPT * 6, shape=pb.PLAN_SHAPE_SPLIT, max_tokens=5)
    await asyncio.create_task(served(request, "core-1", "paris"))
    traces.take_incoming("")
    assert {
        ("request", "outside"), ("intake", "request"), ("decision", "request"), ("kv_transfer", "request"),
        ("leg", "request"), ("node.kv_move", "kv_transfer"), ("node.run", "leg"), ("node.prefill", "node.run"),
        ("node.decode", "node.run"),
    } <= kept.tree()  # fmt: skip
    assert {f"{each.context.trace_id:032x}" for each in kept.spans} == {"ab" * 16}
    (request_span,) = kept.named("request")
    assert request_span.attributes is not None
    assert request_span.attributes["kvmesh.shape"] == "split"
    assert request_span.attributes["kvmesh.generated_tokens"] == 5
    (transfer,) = kept.named("kv_transfer")
    assert transfer.attributes is not None
    assert transfer.attributes["kvmesh.wire_bytes"]


async def test_no_prompt_no_ids_no_tenant_and_no_label_in_spans(kept: Kept) -> None:
    await served(request_of(SECRET_PROMPT, label="restricted", max_tokens=5), "paris")
    assert kept.spans
    for each in kept.spans:
        told = str(dict(each.attributes or {})) + str(each.events) + str(each.status.description)
        assert "qzx" not in told
        assert "Marwood" not in told
        assert "restricted" not in told
        assert "kvmesh.tenant" not in (each.attributes or {})
        assert not any(isinstance(value, tuple | list) for value in (each.attributes or {}).values())


async def test_tenant_and_label_where_settings_allow_them() -> None:
    made = Kept(Traces(otlp_endpoint="http://127.0.0.1:4318", tell_tenant=True, tell_label=True))
    traces.use_tracer(made.tracer)
    try:
        await served(request_of("hello", label="restricted", max_tokens=2), "paris")
    finally:
        traces.use_tracer(traces.NoTracer())
        made.tracer.close()
    (request_span,) = made.named("request")
    assert request_span.attributes is not None
    assert request_span.attributes["kvmesh.label"] == "restricted"
    assert request_span.attributes["kvmesh.tenant"]


async def test_a_request_that_is_refused_ends_its_span_with_the_reason(kept: Kept) -> None:
    with pytest.raises(MeshError):
        await served(request_of("hello", node_id="nowhere"), "paris")
    (request_span,) = kept.named("request")
    assert not request_span.status.is_ok
    assert "hello" not in str(request_span.status.description)


def test_an_error_is_told_by_its_reason_only(kept: Kept) -> None:
    with pytest.raises(PolicyDenied), traces.span("intake"):
        raise PolicyDenied(f"{SECRET_PROMPT} is not allowed", rule="r")
    assert kept.named("intake")[0].status.description == "POLICY_DENIED"


def test_an_attribute_that_is_not_known_to_be_harmless_is_a_bug(kept: Kept) -> None:
    for tracer in (kept.tracer, traces.NoTracer()):
        with pytest.raises(ValueError, match="harmless"):
            tracer.start("intake", "", {"prompt": "x"})


@pytest.mark.parametrize(
    "bad", ["", "x", PARENT + "x", PARENT.upper(), "ff" + PARENT[2:], "00-" + "0" * 32 + PARENT[35:], "00-" * 4000]
)
def test_a_bad_traceparent_begins_a_new_trace(kept: Kept, bad: str) -> None:
    assert traces.checked_traceparent(bad) == ""
    traces.start_span("request", parent=bad).end()
    assert kept.named("request")[0].parent is None
    message = context_to_wire(context_of())
    message.traceparent = bad
    assert context_from_wire(message).traceparent == ""


def test_without_a_collector_a_traceparent_is_handed_on() -> None:
    tracer = traces.configure_traces(Traces(), node_id="a", role="core")
    assert isinstance(tracer, traces.NoTracer)
    assert traces.start_span("request", parent=PARENT).traceparent == PARENT
    message = context_to_wire(context_of(traceparent=PARENT))
    assert context_from_wire(message).traceparent == PARENT


def test_a_caller_that_does_not_keep_its_trace_is_followed(kept: Kept) -> None:
    traces.start_span("request", parent=PARENT[:-1] + "0").end()
    assert not kept.spans


@pytest.mark.parametrize("bad", ["ftp://x", "http://user:pw@x", "127.0.0.1:4318", "http://x/y?z"])
def test_bad_endpoints_are_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        Traces(otlp_endpoint=bad)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mesh.telemetry.otel", None)
    with pytest.raises(InvalidRequest, match=r"kvmesh\[traces\]"):
        traces.configure_traces(Traces(otlp_endpoint="http://127.0.0.1:4318"), node_id="a", role="core")
