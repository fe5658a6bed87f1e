"""The columnar snapshot of an entry, kept up to date: a decision must not pay for reading every node of the mesh.

Whoever feeds it says which nodes changed (`stale`); the next `snapshot` reads those again and patches their rows.
Columns that were handed out are never written to: a patch makes new ones of those that change. Ages stay true
without any work, since a snapshot knows when it was made. Pure: clock and facts come in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from placement.decide.types import AnyArray, Snapshot
from placement.entry.mesh_view import FIT_COLUMNS, LIVE_COLUMNS, Column, NodeFacts, build_snapshot
from placement.entry.notes import Notes

_LIVE = {name: column for name, column in LIVE_COLUMNS.items() if name != "age_s"}
ReadNode = Callable[[str], NodeFacts | None]
"""Facts of a node by id; None if it is not in the mesh any more."""


class SnapshotTable:
    """Owned by an entry's World; on one thread. `read` is asked for nodes that were told to be stale only."""

    def __init__(self, read: ReadNode, *, entry_node_id: str) -> None:
        self._read = read
        self._entry_node_id = entry_node_id
        self._facts: dict[str, NodeFacts] = {}
        self._stale: set[str] = set()
        self._snapshot: Snapshot | None = None
        self._row: dict[str, int] = {}
        self.notes = Notes(self.stale)

    def _noted(self, node_id: str, now_s: float) -> NodeFacts | None:
        facts = self._read(node_id)
        return None if facts is None else self.notes.applied(facts, now_s)

    def stale(self, node_id: str) -> None:
        """Something about this node changed, or it is new, or gone."""
        self._stale.add(node_id)

    def snapshot(self, *, version: int, now_s: float) -> Snapshot:
        """The snapshot at `now_s`, which is on the clock of decisions."""
        known = self._snapshot
        if known is not None and not self._stale and known.version == version:
            return known
        changed = {node_id: self._noted(node_id, now_s) for node_id in self._stale}
        self._stale.clear()
        if known is not None and all(self._is_same_node(node_id, facts) for node_id, facts in changed.items()):
            rows = {self._row[node_id]: facts for node_id, facts in changed.items() if facts is not None}
            before = [self._facts[facts.place.node_id] for facts in rows.values()]
            made = _patched(known, rows, before, version=version, now_s=now_s)
        else:
            self._adopt(changed, known, now_s)
            made = build_snapshot(
                tuple(self._facts.values()), entry_node_id=self._entry_node_id, version=version, made_s=now_s
            )
            self._row = {place.node_id: i for i, place in enumerate(made.places)}
        for node_id, facts in changed.items():
            if facts is not None:
                self._facts[node_id] = facts
        self._snapshot = made
        return made

    def _is_same_node(self, node_id: str, facts: NodeFacts | None) -> bool:
        """Whether only live figures can have changed."""
        before = self._facts.get(node_id)
        if before is None or facts is None:
            return before is facts  # never there
        return before.place == facts.place and before.models == facts.models

    def _adopt(self, changed: dict[str, NodeFacts | None], known: Snapshot | None, now_s: float) -> None:
        """All facts as of now: those that did not change have aged."""
        if known is not None:
            passed_s = now_s - known.made_s
            for node_id, row in self._row.items():
                self._facts[node_id] = replace(self._facts[node_id], age_s=float(known.age_s[row]) + passed_s)
        for node_id, facts in changed.items():
            if facts is None:
                self._facts.pop(node_id, None)
            else:
                self._facts[node_id] = facts


def _patched(
    known: Snapshot, rows: dict[int, NodeFacts], before: list[NodeFacts], *, version: int, now_s: float
) -> Snapshot:
    """`before`: the facts that are in `known` at these rows."""
    aged = known.age_s + (now_s - known.made_s)
    at, nodes = np.fromiter(rows, dtype=np.int64, count=len(rows)), list(rows.values())
    aged[at] = [node.age_s for node in nodes]
    same_fit = all(_fit_of(a) == _fit_of(b) for a, b in zip(before, nodes, strict=True))
    live, fit = _changes(_LIVE, before, nodes), {} if same_fit else _changes(FIT_COLUMNS, before, nodes)
    return known.patched(at, live, fit, version=version, made_s=now_s, age_s=aged)


def _fit_of(node: NodeFacts) -> tuple[object, ...]:
    """All that FIT_COLUMNS read."""
    load = node.load
    return load.curve, node.scale, load.context_tokens, load.step_tokens, load.most_running


def _changes(columns: Mapping[str, Column], before: list[NodeFacts], now: list[NodeFacts]) -> dict[str, AnyArray]:
    """New values of the columns that change."""
    changes = {}
    for name, column in columns.items():
        new = [column.of(node) for node in now]
        if new != [column.of(node) for node in before]:
            changes[name] = np.array(new, dtype=column.dtype)
    return changes
