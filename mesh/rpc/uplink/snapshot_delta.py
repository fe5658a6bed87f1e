"""The mesh as a site was told it, and what of it changed since: models and nodes that stay as they are travel once.

Both ends keep the last whole snapshot. Deltas are counted, so that a missing one shows; one says which nodes changed or
came, and which are gone; a node whose models are those told before leaves them out. A node that is not in it is as
before, and its figures have aged by the time that has passed. Pure; clocks come in.
"""

from __future__ import annotations

from mesh.errors import RevisionMismatch
from mesh.v1 import admin_pb2

_AGE_TOLERANCE_S = 0.25
"""An age that is off by less than this from what passing time makes of it is no news."""


class ToldSnapshot:
    """The hub's side: what one session was last told."""

    def __init__(self) -> None:
        self._nodes: dict[str, admin_pb2.NodeView] = {}
        self._sequence = 0
        self._told_s = 0.0

    def next(self, now: admin_pb2.Snapshot, now_s: float) -> admin_pb2.Snapshot:
        """What to send so that the other side has `now`, which is this object's from then on: all of it the first
        time."""
        first, passed_s = not self._sequence, now_s - self._told_s
        self._sequence += 1
        made = admin_pb2.Snapshot(
            version=now.version,
            registry_age_s=now.registry_age_s,
            made_unix_s=now.made_unix_s,
            sequence=self._sequence,
            is_delta=not first,
        )
        nodes: dict[str, admin_pb2.NodeView] = {}  # what the other side has after it
        for node in now.nodes:
            before = self._nodes.get(node.node_id)
            if before is not None and not first and _is_as_before(before, node, passed_s):
                before.age_s += passed_s
                nodes[node.node_id] = before
                continue
            made.nodes.append(node if before is None or first else _without_known_models(before, node))
            nodes[node.node_id] = node
        made.gone.extend(sorted(self._nodes.keys() - nodes.keys()))
        self._nodes, self._told_s = nodes, now_s
        return made


class HeardSnapshot:
    """The agent's side."""

    def __init__(self) -> None:
        self._nodes: dict[str, admin_pb2.NodeView] = {}
        self._sequence = 0
        self._heard_s = 0.0

    def take(self, told: admin_pb2.Snapshot, now_s: float) -> admin_pb2.Snapshot:
        """The whole snapshot after what came. Raises RevisionMismatch if something before it is missing: the session
        has to begin anew."""
        if told.is_delta and told.sequence != self._sequence + 1:
            raise RevisionMismatch(f"snapshot {told.sequence} came after {self._sequence}: one is missing")
        passed_s = now_s - self._heard_s
        if told.is_delta:
            for node in self._nodes.values():
                node.age_s += passed_s
            for node_id in told.gone:
                self._nodes.pop(node_id, None)
        else:
            self._nodes = {}
        for node in told.nodes:
            taken = admin_pb2.NodeView()
            taken.CopyFrom(node)
            if node.models_as_before:
                known = self._nodes.get(node.node_id)
                if known is None:
                    raise RevisionMismatch(f"models of {node.node_id} were never told")
                taken.models.extend(known.models)
                taken.models_as_before = False
            self._nodes[node.node_id] = taken
        self._sequence, self._heard_s = told.sequence, now_s
        return admin_pb2.Snapshot(
            version=told.version,
            registry_age_s=told.registry_age_s,
            made_unix_s=told.made_unix_s,
            nodes=[self._nodes[node_id] for node_id in sorted(self._nodes)],
        )


def _is_as_before(before: admin_pb2.NodeView, now: admin_pb2.NodeView, passed_s: float) -> bool:
    if abs(before.age_s + passed_s - now.age_s) > _AGE_TOLERANCE_S:
        return False
    aged = admin_pb2.NodeView()
    aged.CopyFrom(before)
    aged.age_s = now.age_s
    return aged == now


def _without_known_models(before: admin_pb2.NodeView, now: admin_pb2.NodeView) -> admin_pb2.NodeView:
    if not now.models or list(before.models) != list(now.models):
        return now
    made = admin_pb2.NodeView()
    made.CopyFrom(now)
    made.ClearField("models")
    made.models_as_before = True
    return made
