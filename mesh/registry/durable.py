"""The part of the embedded registry that survives a restart: registrations and values, as one immutable state.

Every change makes a new state, so that it can be written first and taken into use after. In the file it is one
JSON object with a digest over its content; what does not match is refused as a whole. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mesh.errors import MeshError, PayloadCorrupt, RevisionMismatch
from mesh.registry.checks import check_key, check_registration, check_value
from mesh.registry.types import Registration, Value

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableState:
    """Registrations by node id, values by key. `last_version` is the newest version that any value had, so that a
    key which is deleted and made again does not get an old version twice."""

    registrations: Mapping[str, Registration] = field(default_factory=lambda: MappingProxyType({}))
    values: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    last_version: int = 0

    def with_registration(self, registration: Registration) -> DurableState:
        """Add or replace."""
        return replace(self, registrations={**self.registrations, registration.node_id: registration})

    def without_node(self, node_id: str) -> DurableState:
        """Unknown nodes are fine."""
        kept = {key: each for key, each in self.registrations.items() if key != node_id}
        return replace(self, registrations=kept)

    def with_value(self, key: str, value: bytes, expected_version: int | None) -> DurableState:
        """Set; the new version is `last_version` of the result. Raises RevisionMismatch."""
        current = self.values[key].version if key in self.values else 0
        if expected_version is not None and expected_version != current:
            raise RevisionMismatch(
                f"{key!r} is at version {current}, not {expected_version}; read it again", key=key, version=str(current)
            )
        version = self.last_version + 1
        stored = Value(key=key, value=value, version=version)
        return replace(self, values={**self.values, key: stored}, last_version=version)

    def without_value(self, key: str) -> DurableState:
        """Unknown keys are fine."""
        return replace(self, values={name: each for name, each in self.values.items() if name != key})

    def under(self, prefix: str) -> tuple[Value, ...]:
        """Values whose key starts with `prefix`, by key."""
        return tuple(self.values[key] for key in sorted(self.values) if key.startswith(prefix))


def to_bytes(state: DurableState) -> bytes:
    """For the file."""
    content = {
        "registrations": [
            {
                "node_id": each.node_id,
                "address": each.address,
                "meta": dict(each.meta),
                "ttl_s": each.ttl_s,
                "health_address": each.health_address,
            }
            for each in state.registrations.values()
        ],
        "values": [
            {"key": each.key, "value": base64.b64encode(each.value).decode(), "version": each.version}
            for each in state.values.values()
        ],
        "last_version": state.last_version,
    }
    return _dump({"format": FORMAT, "sha256": hashlib.sha256(_dump(content)).hexdigest(), "content": content})


def from_bytes(raw: bytes) -> DurableState:
    """Raises PayloadCorrupt on anything that `to_bytes` did not write."""
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise PayloadCorrupt(f"it has format {document['format']!r}; this build reads {FORMAT}")
        content = document["content"]
        if hashlib.sha256(_dump(content)).hexdigest() != document["sha256"]:
            raise PayloadCorrupt("its digest does not match its content")
        registrations = [_registration(item) for item in content["registrations"]]
        values = [_value(item) for item in content["values"]]
        return DurableState(
            registrations={each.node_id: each for each in registrations},
            values={each.key: each for each in values},
            last_version=int(content["last_version"]),
        )
    except PayloadCorrupt:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MeshError) as error:
        # The cause may quote stored values, which can be secrets: its type has to do.
        raise PayloadCorrupt(f"it cannot be read ({type(error).__name__})") from None


def _registration(item: dict[str, Any]) -> Registration:
    registration = Registration(**item)
    check_registration(registration)
    return registration


def _value(item: dict[str, Any]) -> Value:
    value = Value(key=item["key"], value=base64.b64decode(item["value"], validate=True), version=int(item["version"]))
    check_key(value.key)
    check_value(value.key, value.value)
    return value


def _dump(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
