from __future__ import annotations

import pytest

from mesh.errors import (
    Expired,
    Internal,
    InvalidRequest,
    MeshError,
    NodeUnreachable,
    NotFound,
    PolicyDenied,
    RevisionMismatch,
    walk,
)
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.types import PROTOCOL, AgentFacts
from mesh.v1 import admin_pb2, node_pb2, uplink_pb2
from tests.mesh.rpc.uplink.harness import MODEL, REPORT, kv_order, load, run_order


def test_hello_round_trip() -> None:
    facts = AgentFacts(build="b", models=(MODEL, admin_pb2.NodeModel(id="other")))
    request = wire.hello_to_wire(facts, wire.load_to_wire(load(3), draining=True), 5.0)
    assert request.hello.protocol == PROTOCOL
    assert wire.hello_from_wire(request) == (facts, load(3), True)


def test_orders_round_trip() -> None:
    run = wire.run_to_wire(7, run_order()).run
    assert (run.work_id, wire.order_from_wire(run.order)) == (7, run_order())
    move = wire.move_to_wire(8, kv_order()).move_kv
    assert (move.work_id, wire.move_from_wire(move)) == (8, kv_order())


def test_results_round_trip() -> None:
    result = wire.moved_to_wire(7, REPORT).work_result
    assert (result.work_id, wire.result_from_wire(result, "edge-1")) == (7, REPORT)
    assert wire.result_from_wire(uplink_pb2.WorkResult(work_id=7), "edge-1") is None


@pytest.mark.parametrize("error", [cls for cls in walk() if cls is not MeshError and cls.__module__ == "mesh.errors"])
def test_every_error_crosses_as_itself(error: type[MeshError]) -> None:
    result = wire.failed_to_wire(7, error("why")).work_result
    with pytest.raises(error, match="why") as caught:
        wire.result_from_wire(result, "edge-1")
    assert type(caught.value) is error
    assert caught.value.details == {"node": "edge-1"}


def test_a_newer_peers_reason_stays_readable() -> None:
    with pytest.raises(Internal, match=r"QUOTA: too much"):
        wire.raise_error("QUOTA", "too much", "edge-1")


def test_messages_are_cut() -> None:
    result = wire.failed_to_wire(7, Expired("x" * 100_000)).work_result
    assert len(result.error_message) == wire.MAX_ERROR_CHARS
    with pytest.raises(Expired) as caught:
        wire.raise_error("EXPIRED", "x" * 100_000, "edge-1")
    assert len(caught.value.message) == wire.MAX_ERROR_CHARS


def test_answers_carry_their_commands_id_whatever_the_callback_set() -> None:
    result = uplink_pb2.CommandResult(command_id=99, migrate=admin_pb2.MigrateResponse(to_node_id="core-1"))
    answer = wire.answer_to_wire(4, result, None).command_result
    assert (answer.command_id, answer.migrate.to_node_id, answer.error_reason) == (4, "core-1", "")
    answer = wire.answer_to_wire(5, None, NodeUnreachable("gone")).command_result
    assert (answer.command_id, answer.error_reason, answer.error_message) == (5, "NODE_UNREACHABLE", "gone")


def test_what_waits_costs_more_than_its_bytes() -> None:
    event = node_pb2.RunEvent(tokens=node_pb2.NewTokens(ids=[1]))
    assert wire.cost_bytes(event) == event.ByteSize() + wire.MESSAGE_OVERHEAD_BYTES


@pytest.mark.parametrize("protocol", [0, 2, 2**32 - 1])
def test_other_protocols_are_refused(protocol: int) -> None:
    request = uplink_pb2.AttachRequest(hello=uplink_pb2.AgentHello(protocol=protocol))
    with pytest.raises(RevisionMismatch, match=str(protocol)):
        wire.hello_from_wire(request)


@pytest.mark.parametrize("rtt_s", [-1.0, float("nan"), float("inf")])
def test_round_trips_that_cannot_be_are_refused(rtt_s: float) -> None:
    with pytest.raises(InvalidRequest, match="rtt_s"):
        wire.rtt_from_wire(rtt_s)


def test_a_round_trip_of_zero_was_not_measured() -> None:
    assert wire.rtt_from_wire(0.0) is None
    assert wire.rtt_from_wire(0.25) == 0.25


def test_an_error_keeps_its_details() -> None:
    error = PolicyDenied("no", rule="rules.internal", node="edge-2")
    for raise_it in (
        lambda: wire.result_from_wire(wire.failed_to_wire(1, error).work_result, "edge-1"),
        lambda: _raise_answer(wire.answer_to_wire(1, None, error).command_result),
    ):
        with pytest.raises(PolicyDenied) as caught:
            raise_it()
        assert caught.value.details == {"rule": "rules.internal", "node": "edge-2"}


def _raise_answer(result: uplink_pb2.CommandResult) -> None:
    wire.raise_error(result.error_reason, result.error_message, "edge-1", result.error_details)


def test_details_of_a_peer_are_few_and_short() -> None:
    many = {f"key{i}": "v" * 5000 for i in range(100)} | {"message": "no", "k" * 200: "v"}
    with pytest.raises(NotFound) as caught:
        wire.raise_error("NOT_FOUND", "gone", "edge-1", many)
    assert caught.value.message == "gone"
    assert len(caught.value.details) <= 9
    assert all(len(v) <= 256 for v in caught.value.details.values())
