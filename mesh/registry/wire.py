"""Registry types to and from mesh.v1. The only module of the registry that knows the messages' fields. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mesh.errors import Internal
from mesh.registry.types import Health, NodesView, RegisteredNode, Registration, Value
from mesh.v1 import registry_pb2 as pb


def registration_to_pb(registration: Registration) -> pb.Registration:
    return pb.Registration(
        node_id=registration.node_id,
        address=registration.address,
        meta=dict(registration.meta),
        ttl_s=registration.ttl_s,
        health_address=registration.health_address,
    )


def registration_from_pb(message: pb.Registration) -> Registration:
    """Not checked: see mesh.registry.checks."""
    return Registration(
        node_id=message.node_id,
        address=message.address,
        meta=dict(message.meta),
        # The wire has a 32-bit float; 7 digits give back what was meant.
        ttl_s=float(f"{message.ttl_s:.7g}"),
        health_address=message.health_address,
    )


def view_to_pb(view: NodesView) -> pb.WatchNodesResponse:
    response = pb.WatchNodesResponse(index=view.index)
    for node in view.nodes:
        message = registration_to_pb(node.registration)
        message.health = node.health.value
        message.ready = node.health is Health.PASSING
        response.registrations.append(message)
    return response


def view_from_pb(response: pb.WatchNodesResponse, heard_monotonic_s: float) -> NodesView:
    """Raises Internal on a health word that is none."""
    return NodesView(
        index=response.index,
        nodes=tuple(
            RegisteredNode(registration=registration_from_pb(message), health=_health(message.health))
            for message in response.registrations
        ),
        heard_monotonic_s=heard_monotonic_s,
    )


def values_to_pb(values: Iterable[Value]) -> list[pb.StoredValue]:
    return [pb.StoredValue(key=each.key, value=each.value, version=each.version) for each in values]


def values_from_pb(messages: Iterable[pb.StoredValue]) -> tuple[Value, ...]:
    return tuple(Value(key=each.key, value=each.value, version=each.version) for each in messages)


def _health(word: str) -> Health:
    try:
        return Health(word)
    except ValueError as error:
        raise Internal(f"the registry says a node is {word!r}, which this build does not know") from error
