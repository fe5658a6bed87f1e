"""Wire adapters: what goes over comes back equal, and what cannot be is refused by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, KvIncompatible, MeshError, RevisionMismatch
from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import SignedRecord
from mesh.kv.geometry import KvDtype
from mesh.kv.manifest import KvManifest
from mesh.kv.transfer_frames import Abort, Chunk, Commit, Done, Offer, Piece, Want
from mesh.node import wire, wire_kv
from mesh.node.engine import EngineLoad, FinishReason, RunId
from mesh.node.host_frames import KvOpen
from mesh.node.port import (
    KvDirection,
    KvOrder,
    KvReport,
    KvSource,
    Peer,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    RunOrder,
    WorkContext,
)
from mesh.node.sampling import SamplingParams
from mesh.node.wire_bounds import MAX_NAME_CHARS, MAX_TOKENS
from mesh.v1 import common_pb2, node_pb2
from tests.fakes.fake_node import CORE, context_of, greedy, kv_order, prompt, run_order

relaxed = settings(max_examples=60, deadline=None)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
names = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["C", "Z"]), min_size=1, max_size=40
)
hashes = st.binary(min_size=32, max_size=32)
run_ids = names.map(RunId)
token_ids = st.lists(u32, max_size=40).map(tuple)


def f32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_nan=False)


dns = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,20}[a-z0-9])?", fullmatch=True)
places = st.builds(
    Place, mesh=dns, role=st.sampled_from(Role), tier=st.sampled_from(Tier), site=dns, region=dns, jurisdiction=dns,
    node_id=dns,
)  # fmt: skip
contexts = st.builds(
    WorkContext, request_id=names, tenant=names, label=names, model=names, salt=hashes, policy_version=u64,
    deadline_s=st.none() | f32(2**-10, 1e6), entry_site=st.just("") | names,
)  # fmt: skip
samplings = st.builds(
    SamplingParams, max_tokens=st.integers(1, 2**31 - 1), seed=u64, temperature=f32(0, 2),
    top_k=st.integers(0, 2**31 - 1), top_p=f32(2**-20, 1), min_p=f32(0, 1),
    repetition_penalty=f32(2**-10, 10), presence_penalty=f32(-2, 2),
    frequency_penalty=f32(-2, 2), min_tokens=st.just(0), ignore_eos=st.booleans(),
    stop=st.lists(names, max_size=16).map(tuple), logprobs=st.none() | st.integers(0, 20),
)  # fmt: skip
orders = st.builds(
    RunOrder, context=contexts, run_id=run_ids, token_ids=token_ids, prompt_tokens=u32, sampling=samplings,
    priority=st.integers(-(2**31), 2**31 - 1), kv_from=st.none() | run_ids, prefill_only=st.booleans(),
)  # fmt: skip
records = st.builds(SignedRecord, body=st.binary(), signature=st.binary(), certificate=st.binary())
logprob = f32(-1e6, 0)


@st.composite
def new_tokens(draw: st.DrawFn) -> PortTokens:
    ids = draw(st.lists(u32, min_size=1, max_size=8))
    if draw(st.booleans()):
        return PortTokens(tuple(ids))
    tops = st.lists(st.tuples(u32, logprob), max_size=20).map(tuple)
    return PortTokens(tuple(ids), tuple((draw(logprob), draw(tops)) for _ in ids))


events = st.one_of(
    st.builds(PortPrefilled, tokens=u32, cached_tokens=u32),
    new_tokens(),
    st.builds(PortFinished, reason=st.sampled_from(FinishReason), stop_string=st.none() | names, leg=records),
    st.builds(PortHeld, kv_tokens=u32, leg=records),
)
sources = st.builds(KvSource, run_id=run_ids, prefill=st.none() | orders, pause=st.booleans())
kv_fields: dict[str, Any] = {
    "context": contexts, "transfer_id": names, "direction": st.sampled_from(KvDirection), "source": sources,
    "target": run_ids, "token_ids": token_ids, "max_tokens": st.integers(1, MAX_TOKENS), "codec": names,
}  # fmt: skip
opens = st.builds(KvOpen, **kv_fields)
kv_orders = st.builds(KvOrder, peer=st.builds(Peer, address=names, place=places), **kv_fields)
manifests = st.builds(
    KvManifest, format=u32, layout_hash=names, weights_lineage=names, dtype=st.sampled_from(KvDtype), codec=names,
    first_position=u32, count_tokens=u32, block_hashes=st.lists(hashes, max_size=5).map(tuple), label=names,
    tenant=names, expires_unix_s=st.floats(allow_nan=False), producer_build=names,
)  # fmt: skip
frames = st.one_of(
    opens,
    st.builds(Offer, manifests),
    st.builds(
        Want,
        from_position=u32,
        layout_hash=names,
        weights_lineage=names,
        dtype=st.sampled_from(KvDtype),
        window_bytes=u64,
    ),
    st.builds(Chunk, index=u32, start=u32, stop=u32, size_bytes=u64, digest=hashes, prefix_hash=hashes),
    st.builds(Piece, chunk_index=u32, offset_bytes=u64, data=st.binary(), digest=hashes),
    st.builds(Commit, chunks=u32, stop=u32, digest=hashes, leg=st.none() | records),
    st.builds(Done, u32),
    st.builds(Abort, reason=names, message=names),
)
reports = st.builds(
    KvReport, transfer_id=names, tokens=u32, skipped_tokens=u32, wire_bytes=u64, codec=names, duration_s=f32(0, 1e6),
    first_chunk_s=f32(0, 1e6), leg=st.none() | records,
)  # fmt: skip
loads = st.builds(
    EngineLoad, running=u32, waiting=u32, waiting_prefill_tokens=u32, kv_used_tokens=u32, kv_capacity_tokens=u32,
    prefill_tokens_per_s=f32(0, 1e9), decode_tokens_per_s=f32(0, 1e9),
)  # fmt: skip


def over(message: Any) -> Any:
    """As bytes and back, as the wire does it."""
    return type(message).FromString(message.SerializeToString())


@relaxed
@given(places)
def test_places(place: Place) -> None:
    assert wire.place_from_wire(over(wire.place_to_wire(place))) == place


@relaxed
@given(contexts)
def test_contexts(context: WorkContext) -> None:
    assert wire.context_from_wire(over(wire.context_to_wire(context))) == context


@relaxed
@given(orders)
def test_orders(order: RunOrder) -> None:
    assert wire.order_from_wire(over(wire.order_to_wire(order))) == order


@relaxed
@given(events)
def test_events(event: Any) -> None:
    assert wire.event_from_wire(over(wire.event_to_wire(event))) == event


@relaxed
@given(loads, st.booleans())
def test_loads(load: EngineLoad, draining: bool) -> None:
    message = over(wire.load_to_wire(load, draining=draining))
    assert wire.load_from_wire(message) == load
    assert message.draining == draining


@relaxed
@given(frames)
def test_frames(frame: Any) -> None:
    assert wire_kv.frame_from_wire(over(wire_kv.frame_to_wire(frame))) == frame


@relaxed
@given(kv_orders)
def test_kv_orders(order: KvOrder) -> None:
    opening, address, place = wire_kv.kv_order_to_wire(order)
    assert wire_kv.kv_order_from_wire(over(opening), address, over(place)) == order


@relaxed
@given(reports)
def test_reports(report: KvReport) -> None:
    assert wire_kv.report_from_wire(over(wire_kv.report_to_wire(report))) == report


ORDER = wire.order_to_wire(run_order("r", prompt(4), sampling=greedy(8, logprobs=2)))


def change(field: str, value: Any) -> Callable[[Any], None]:
    """Set a (dotted) field of a message."""

    def apply(message: Any) -> None:
        *path, last = field.split(".")
        for part in path:
            message = getattr(message, part)
        setattr(message, last, value)

    return apply


def clear(field: str) -> Callable[[Any], None]:
    return lambda message: message.sampling.ClearField(field)


@pytest.mark.parametrize(
    ("alter", "field"),
    [
        (change("run_id", ""), "run_id"),
        (change("run_id", "a" * (MAX_NAME_CHARS + 1)), "run_id"),
        (change("run_id", "a\nb"), "run_id"),
        (change("kv_from", "\x00"), "kv_from"),
        (change("context.request_id", ""), "request_id"),
        (change("context.tenant", ""), "tenant"),
        (change("context.label", ""), "label"),
        (change("context.model", ""), "model"),
        (change("context.salt", b""), "salt"),
        (change("context.salt", bytes(33)), "salt"),
        (change("context.deadline_s", 0.0), "deadline_s"),
        (change("context.deadline_s", -1.0), "deadline_s"),
        (change("context.deadline_s", float("nan")), "deadline_s"),
        (change("context.deadline_s", float("inf")), "deadline_s"),
        (change("sampling.temperature", float("nan")), "temperature"),
        (change("sampling.temperature", 2.5), "temperature"),
        (change("sampling.top_p", 0.0), "top_p"),
        (change("sampling.logprobs", 21), "logprobs"),
        (change("sampling.max_tokens", 0), "max_tokens"),
        (change("sampling.max_tokens", 2**32 - 1), "max_tokens"),
        (change("sampling.min_tokens", 9), "min_tokens"),
        (change("sampling.n", 2), "sampling.n"),
        (lambda m: m.sampling.stop.extend(["x"] * 17), "stop"),
        (lambda m: m.sampling.stop.append("x" * 257), "stop"),
        *((clear(f), f"sampling.{f}") for f in ("temperature", "seed", "max_tokens", "ignore_eos", "min_p", "top_k")),
    ],
)
def test_orders_that_cannot_be(alter: Callable[[Any], None], field: str) -> None:
    message = node_pb2.RunOrder()
    message.CopyFrom(ORDER)
    alter(message)
    with pytest.raises(InvalidRequest) as caught:
        wire.order_from_wire(message)
    assert caught.value.details["field"] == field


def test_too_many_tokens() -> None:
    message = node_pb2.RunOrder()
    message.CopyFrom(ORDER)
    message.tokens.ids.extend([1] * MAX_TOKENS)
    with pytest.raises(InvalidRequest):
        wire.order_from_wire(message)


def test_a_sample_keeps_its_index() -> None:
    assert wire.sampling_from_wire(wire.sampling_to_wire(greedy(sample_index=3))).sample_index == 3
    older = wire.sampling_to_wire(greedy())
    older.ClearField("sample_index")  # a build that knows only the first sample
    assert wire.sampling_from_wire(older).sample_index == 0


OPEN = wire_kv.open_to_wire(
    KvOpen.of(kv_order(CORE, direction=KvDirection.PUSH, token_ids=prompt(4), source=KvSource(run_id=RunId("h"))))
)


@pytest.mark.parametrize(
    ("alter", "field"),
    [
        (change("direction", 0), "direction"),
        (change("direction", 9), "direction"),
        (change("max_tokens", 0), "max_tokens"),
        (change("max_tokens", MAX_TOKENS + 1), "max_tokens"),
        (change("transfer_id", ""), "transfer_id"),
        (change("source_run_id", ""), "source_run_id"),
        (change("target_run_id", ""), "target_run_id"),
        (change("codec", ""), "codec"),
        (change("context.salt", b"x"), "salt"),
        (lambda m: m.prefill.SetInParent(), "salt"),
    ],
)
def test_opens_that_cannot_be(alter: Callable[[Any], None], field: str) -> None:
    message = node_pb2.KvOpen()
    message.CopyFrom(OPEN)
    alter(message)
    with pytest.raises(InvalidRequest) as caught:
        wire_kv.frame_from_wire(node_pb2.KvFrame(open=message))
    assert caught.value.details["field"] == field


MANIFEST = KvManifest(
    layout_hash="00", weights_lineage="l", dtype=KvDtype.F16, codec="f16", first_position=0, count_tokens=0,
    block_hashes=(), label="a", tenant="b", expires_unix_s=1.0, producer_build="p",
)  # fmt: skip


def test_manifests_that_cannot_be() -> None:
    message = wire_kv.manifest_to_wire(MANIFEST)
    message.dtype = "fp4"
    with pytest.raises(KvIncompatible) as caught:
        wire_kv.manifest_from_wire(message)
    assert caught.value.details["field"] == "dtype"
    for field in ("layout_hash", "weights_lineage", "codec", "label", "tenant"):
        message = wire_kv.manifest_to_wire(replace(MANIFEST, **{field: ""}))
        with pytest.raises(InvalidRequest):
            wire_kv.manifest_from_wire(message)


def new_tokens_of(ids: list[int], *positions: tuple[int, float, int]) -> node_pb2.RunEvent:
    """Positions are (chosen id, logprob, how many alternatives)."""
    logprobs = [
        common_pb2.PositionLogprobs(
            chosen=common_pb2.TokenLogprob(id=i, logprob=p), top=[common_pb2.TokenLogprob(id=1, logprob=-1.0)] * n
        )
        for i, p, n in positions
    ]
    return node_pb2.RunEvent(tokens=node_pb2.NewTokens(ids=ids, logprobs=logprobs))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (node_pb2.RunEvent(), RevisionMismatch),
        (node_pb2.RunEvent(finished=node_pb2.RunFinished()), RevisionMismatch),
        (new_tokens_of([]), InvalidRequest),
        (new_tokens_of([1, 2], (1, -1.0, 0)), InvalidRequest),
        (new_tokens_of([1], (2, -1.0, 0)), InvalidRequest),
        (new_tokens_of([1], (1, 0.5, 0)), InvalidRequest),
        (new_tokens_of([1], (1, float("nan"), 0)), InvalidRequest),
        (new_tokens_of([1], (1, -1.0, 21)), InvalidRequest),
    ],
)
def test_events_that_cannot_be(message: node_pb2.RunEvent, error: type[MeshError]) -> None:
    with pytest.raises(error):
        wire.event_from_wire(message)


def test_impossible_tokens_may_be_alternatives() -> None:
    message = new_tokens_of([1], (1, -1.0, 1))
    message.tokens.logprobs[0].top[0].logprob = float("-inf")
    event = wire.event_from_wire(message)
    assert event == PortTokens((1,), ((-1.0, ((1, float("-inf")),)),))


def test_an_unknown_frame() -> None:
    with pytest.raises(RevisionMismatch):
        wire_kv.frame_from_wire(node_pb2.KvFrame())


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_speeds_and_times_that_cannot_be(value: float) -> None:
    with pytest.raises(InvalidRequest):
        wire.load_from_wire(node_pb2.NodeLoad(prefill_tokens_per_s=value))
    with pytest.raises(InvalidRequest):
        wire_kv.report_from_wire(node_pb2.KvReport(transfer_id="t", codec="f16", duration_s=value))


@pytest.mark.parametrize("field", ["role", "tier", "site", "node_id"])
def test_places_that_cannot_be(field: str) -> None:
    message = wire.place_to_wire(CORE)
    setattr(message, field, "no such thing!")
    with pytest.raises(InvalidRequest):
        wire.place_from_wire(message)


def test_a_context_of_the_tests_is_one_of_the_wire() -> None:
    assert wire.context_from_wire(wire.context_to_wire(context_of())) == context_of()
