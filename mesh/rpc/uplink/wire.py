"""How the uplink's values look as protobuf. Pure; the rim's checks of what a peer sends are here.

Raises InvalidRequest for a value that cannot be, RevisionMismatch for a kind or version that this build does not
know. Errors cross as reason word and message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from google.protobuf.message import Message

from mesh.errors import Internal, InvalidRequest, MeshError, RevisionMismatch, by_reason, told_details
from mesh.node import wire as node_wire
from mesh.node import wire_kv
from mesh.node.engine import EngineLoad
from mesh.node.port import KvOrder, KvReport, PortEvent, RunOrder
from mesh.rpc.uplink.types import MAX_MODELS, PROTOCOL, AgentFacts
from mesh.v1 import admin_pb2, node_pb2, uplink_pb2

MAX_ERROR_CHARS = 1024
_NO_DETAILS: Mapping[str, str] = MappingProxyType({})
MESSAGE_OVERHEAD_BYTES = 256
"""What a small message costs in memory beside its encoded size."""


def cost_bytes(message: Message) -> int:
    """What a message that waits is counted as."""
    return message.ByteSize() + MESSAGE_OVERHEAD_BYTES


def hello_to_wire(facts: AgentFacts, load: node_pb2.NodeLoad | None, clock_unix_s: float) -> uplink_pb2.AttachRequest:
    """The agent's first message."""
    hello = uplink_pb2.AgentHello(
        protocol=PROTOCOL,
        build=facts.build,
        models=facts.models,
        load=load,
        clock_unix_s=clock_unix_s,
        snapshot_deltas=facts.snapshot_deltas,
    )
    return uplink_pb2.AttachRequest(hello=hello)


def hello_from_wire(request: uplink_pb2.AttachRequest) -> tuple[AgentFacts, EngineLoad, bool]:
    """Facts, load and draining. Raises RevisionMismatch for another protocol, InvalidRequest for what is no hello."""
    if request.WhichOneof("message") != "hello":
        raise InvalidRequest("a session starts with a hello", field="hello")
    hello = request.hello
    if hello.protocol != PROTOCOL:
        raise RevisionMismatch(
            f"the agent speaks uplink protocol {hello.protocol}, this placement service {PROTOCOL}; "
            f"bring both to one release",
            build=hello.build[:64],
        )
    models = models_from_wire(hello.models)
    if not math.isfinite(hello.clock_unix_s):
        raise InvalidRequest("clock_unix_s must be finite", field="hello.clock_unix_s")
    load, draining = load_from_wire(hello.load)
    facts = AgentFacts(build=hello.build, models=models, snapshot_deltas=hello.snapshot_deltas)
    return facts, load, draining


def models_from_wire(models: Sequence[admin_pb2.NodeModel]) -> tuple[admin_pb2.NodeModel, ...]:
    """What an agent says that it serves. Raises InvalidRequest if it is too much or nameless."""
    if len(models) > MAX_MODELS or not all(model.id for model in models):
        raise InvalidRequest(f"an agent names at most {MAX_MODELS} models, each with an id", field="models")
    return tuple(models)


def lease_from_wire(response: uplink_pb2.AttachResponse) -> uplink_pb2.SessionLease:
    """The hub's first message, checked."""
    if response.WhichOneof("message") != "lease":
        raise RevisionMismatch("the hub did not start with a lease; bring agent and placement to one release")
    lease = response.lease
    if not (lease.session_id and 0.0 < lease.heartbeat_s < lease.lease_s < math.inf):
        raise InvalidRequest(
            f"a lease of {lease.lease_s} s with heartbeats every {lease.heartbeat_s} s cannot be kept", field="lease"
        )
    return lease


def load_to_wire(load: EngineLoad, *, draining: bool) -> node_pb2.NodeLoad:
    """Load of a heartbeat."""
    return node_wire.load_to_wire(load, draining=draining)


def load_from_wire(load: node_pb2.NodeLoad) -> tuple[EngineLoad, bool]:
    """Load and draining."""
    return node_wire.load_from_wire(load), load.draining


def rtt_from_wire(rtt_s: float) -> float | None:
    """Round trip of a heartbeat; 0 is "not measured"."""
    if not 0.0 <= rtt_s < math.inf:
        raise InvalidRequest(f"rtt_s must be finite and not negative, got {rtt_s}", field="heartbeat.rtt_s")
    return rtt_s or None


def run_to_wire(work_id: int, order: RunOrder) -> uplink_pb2.AttachResponse:
    """Order to run a leg."""
    run = uplink_pb2.WorkRun(work_id=work_id, order=node_wire.order_to_wire(order))
    return uplink_pb2.AttachResponse(run=run)


def order_from_wire(order: node_pb2.RunOrder) -> RunOrder:
    """What a WorkRun asks for."""
    return node_wire.order_from_wire(order)


def move_to_wire(work_id: int, order: KvOrder) -> uplink_pb2.AttachResponse:
    """Order to move KV."""
    opening, address, place = wire_kv.kv_order_to_wire(order)
    move = uplink_pb2.WorkMoveKv(work_id=work_id, open=opening, peer_address=address, peer_place=place)
    return uplink_pb2.AttachResponse(move_kv=move)


def move_from_wire(move: uplink_pb2.WorkMoveKv) -> KvOrder:
    """What a WorkMoveKv asks for."""
    return wire_kv.kv_order_from_wire(move.open, move.peer_address, move.peer_place)


def event_to_wire(work_id: int, event: PortEvent) -> uplink_pb2.AttachRequest:
    """An event of a run."""
    work_event = uplink_pb2.WorkEvent(work_id=work_id, event=node_wire.event_to_wire(event))
    return uplink_pb2.AttachRequest(work_event=work_event)


def event_from_wire(event: node_pb2.RunEvent) -> PortEvent:
    """What a WorkEvent tells."""
    return node_wire.event_from_wire(event)


def moved_to_wire(work_id: int, report: KvReport) -> uplink_pb2.AttachRequest:
    """The good end of a move."""
    result = uplink_pb2.WorkResult(work_id=work_id, kv_report=wire_kv.report_to_wire(report))
    return uplink_pb2.AttachRequest(work_result=result)


def failed_to_wire(work_id: int, error: MeshError) -> uplink_pb2.AttachRequest:
    """The bad end of an order."""
    result = uplink_pb2.WorkResult(work_id=work_id, error_reason=error.reason, error_message=_cut(error.message))
    result.error_details.update(told_details(error.details))
    return uplink_pb2.AttachRequest(work_result=result)


def result_from_wire(result: uplink_pb2.WorkResult, node_id: str) -> KvReport | None:
    """What a move did; None if the result says nothing but that the order ended. Raises the order's error."""
    raise_error(result.error_reason, result.error_message, node_id, result.error_details)
    return wire_kv.report_from_wire(result.kv_report) if result.HasField("kv_report") else None


def answer_to_wire(
    command_id: int, result: uplink_pb2.CommandResult | None, error: MeshError | None
) -> uplink_pb2.AttachRequest:
    """The answer to a command, or its error."""
    answer = uplink_pb2.CommandResult()
    if error is not None:
        answer.error_reason, answer.error_message = error.reason, _cut(error.message)
        answer.error_details.update(told_details(error.details))
    elif result is not None:
        answer.CopyFrom(result)
    answer.command_id = command_id
    return uplink_pb2.AttachRequest(command_result=answer)


def raise_error(reason: str, message: str, node_id: str, details: Mapping[str, str] = _NO_DETAILS) -> None:
    """Raise the error that a peer told; nothing if `reason` is empty. A newer peer's word becomes Internal."""
    if not reason:
        return
    cls = by_reason(reason)
    told = _cut(message) if cls is not Internal or reason == Internal.reason else f"{reason}: {_cut(message)}"
    raise cls(told or f"node {node_id} gave no message", **{"node": node_id, **told_details(details)})


def _cut(message: str) -> str:
    return message if len(message) <= MAX_ERROR_CHARS else message[: MAX_ERROR_CHARS - 4] + " ..."
