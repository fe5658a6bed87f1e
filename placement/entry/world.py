"""What an entry may ask of the mesh: the snapshot it decides on, and ports to the nodes it can reach."""

from __future__ import annotations

from typing import Protocol

from mesh.node.port import KvReport, NodePort
from placement.decide.types import Snapshot
from placement.entry.notes import Notes

NEVER_S = 1e9
"""Age of a snapshot that was never confirmed."""


class World(Protocol):
    """The placement service's and the edge agent's views implement it."""

    def snapshot(self) -> Snapshot:
        """The mesh now; cheap, taken once per decision."""
        ...

    def snapshot_age_s(self) -> float:
        """How long ago the snapshot's registrations were last confirmed."""
        ...

    def port(self, node_id: str) -> NodePort:
        """Raises NodeUnreachable if there is no way to the node now."""
        ...

    def snapshot_with(self, node_id: str) -> Snapshot:
        """The snapshot, with a node of another site in it that this entry was told of for one move only."""
        ...

    @property
    def relay_node_id(self) -> str:
        """The node that carries sealed bytes between two edges of different sites."""
        ...

    @property
    def notes(self) -> Notes:
        """What this entry knows of nodes beside what they tell; the next snapshot has it."""
        ...

    def saw_transfer(self, source_node_id: str, target_node_id: str, report: KvReport) -> None:
        """A finished transfer, to learn the link's goodput from."""
