"""Registrations as Consul services and back, and Consul's errors as ours. Pure; speaks JSON values, not HTTP.

A node is one service instance: name `<prefix>-node`, id `<prefix>-node-<node_id>`, meta as registered. What meta
has no room for (64 pairs are the caller's) travels in tags. Two checks: `ready` is a TTL check that heartbeats
feed, `alive` a gRPC check against the node's own health listener.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import requests
from consul import exceptions

from mesh.address import HostPort
from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, PolicyDenied
from mesh.registry.types import Health, RegisteredNode, Registration, Value

_TTL_TAG, _HEALTH_TAG = "ttl_s=", "health="
_ALIVE_INTERVAL_S = 2.0
_MIN_PERIOD_S = 0.05
_EARLY_PAUSE_S = 1.0


def service_name(prefix: str) -> str:
    return f"{prefix}-node"


def service_id(prefix: str, node_id: str) -> str:
    return f"{prefix}-node-{node_id}"


def ready_check_id(prefix: str, node_id: str) -> str:
    return f"{service_id(prefix, node_id)}:ready"


def service_arguments(prefix: str, registration: Registration, deregister_after_s: float | None) -> dict[str, Any]:
    """Keyword arguments of py-consul's agent.service.register."""
    own_id = service_id(prefix, registration.node_id)
    # Check.ttl of py-consul takes neither status nor deregister, and Check.grpc sends a key that Consul 1.8
    # refuses: hence plain dicts, with the names of Consul's API.
    ready = {
        "CheckID": ready_check_id(prefix, registration.node_id),
        "Name": "ready",
        "TTL": _go_duration(registration.ttl_s),
        "Status": "critical",
    }
    if deregister_after_s is not None:
        ready["DeregisterCriticalServiceAfter"] = _go_duration(deregister_after_s)
    tags, extra = [f"{_TTL_TAG}{registration.ttl_s!r}"], []
    if registration.health_address:
        tags.append(_HEALTH_TAG + registration.health_address)
        extra.append(
            {
                "CheckID": f"{own_id}:alive",
                "Name": "alive",
                "GRPC": registration.health_address,
                "Interval": _go_duration(_ALIVE_INTERVAL_S),
                "Timeout": _go_duration(_ALIVE_INTERVAL_S),
                "Status": "critical",
            }
        )
    where = HostPort.parse(registration.address) if registration.address else None
    return {
        "name": service_name(prefix),
        "service_id": own_id,
        "address": where.host if where else None,
        "port": where.port if where else None,
        "tags": tags,
        "meta": dict(registration.meta),
        "check": ready,
        "extra_checks": extra,
        "replace_existing_checks": True,
    }


def nodes_from_health(prefix: str, entries: Iterable[dict[str, Any]]) -> tuple[RegisteredNode, ...]:
    """Nodes of a health/service answer, by node id. An instance that this module did not write is left out; of
    two with one node id (on two agents: the node has moved) a passing one counts."""
    nodes: dict[str, RegisteredNode] = {}
    for entry in entries:
        node = _node_from(prefix, entry)
        if node is None:
            continue
        known = nodes.get(node.registration.node_id)
        if known is None or known.health is Health.CRITICAL:
            nodes[node.registration.node_id] = node
    return tuple(nodes[node_id] for node_id in sorted(nodes))


def value_from(entry: dict[str, Any], prefix: str) -> Value:
    """A value of a kv answer; Consul gives an empty one as null."""
    key = entry["Key"].removeprefix(f"{prefix}/")
    return Value(key=key, value=entry["Value"] or b"", version=entry["ModifyIndex"])


def next_index(current: int | None, answered: str) -> int | None:
    """The index for the next blocking query; None: start over, since the index went backwards (a new Consul) or
    is none."""
    index = int(answered)
    return None if index <= 0 or (current is not None and index < current) else index


def pause_s(*, changed: bool, took_s: float, wait_s: float) -> float:
    """How long to wait before the next blocking query, so that a watch never spins, whatever Consul answers: a
    burst of changes is taken at 20 a second, and an answer that came early but brought no new index is suspicious."""
    if not changed and took_s < wait_s / 2:
        return _EARLY_PAUSE_S
    return max(_MIN_PERIOD_S - took_s, 0.0)


def translate(error: Exception) -> MeshError | None:
    """Ours for what a py-consul call raised; None for a bug. A dead agent is a requests exception, not one of
    py-consul's."""
    if isinstance(error, requests.RequestException | exceptions.Timeout):
        return NodeUnreachable(f"Consul does not answer: {_first_line(error)}", node="consul")
    if isinstance(error, exceptions.ACLPermissionDenied | exceptions.ACLDisabled):
        return PolicyDenied(f"Consul refuses: {_first_line(error)}; check the token's policy", rule="consul_acl")
    if isinstance(error, exceptions.ClientError | exceptions.BadRequest):
        return InvalidRequest(f"Consul refuses: {_first_line(error)}")
    if isinstance(error, exceptions.ConsulException):
        return NodeUnreachable(f"Consul cannot answer now: {_first_line(error)}", node="consul")
    return None


def _node_from(prefix: str, entry: dict[str, Any]) -> RegisteredNode | None:
    service: dict[str, Any] = entry["Service"]
    start = service_id(prefix, "")
    ttl = _tagged(service["Tags"] or (), _TTL_TAG)
    if not service["ID"].startswith(start) or ttl is None:
        return None
    try:
        ttl_s = float(ttl)
    except ValueError:
        return None
    registration = Registration(
        node_id=service["ID"].removeprefix(start),
        address=str(HostPort(service["Address"], service["Port"])) if service["Address"] else "",
        meta=service["Meta"] or {},
        ttl_s=ttl_s,
        health_address=_tagged(service["Tags"], _HEALTH_TAG) or "",
    )
    # Checks of the service and of its Consul node: with the agent gone, nothing that it said counts.
    passing = bool(entry["Checks"]) and all(check["Status"] == "passing" for check in entry["Checks"])
    return RegisteredNode(registration=registration, health=Health.PASSING if passing else Health.CRITICAL)


def _tagged(tags: Sequence[str], start: str) -> str | None:
    return next((tag.removeprefix(start) for tag in tags if tag.startswith(start)), None)


def _go_duration(seconds: float) -> str:
    return f"{math.ceil(seconds * 1000)}ms"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
