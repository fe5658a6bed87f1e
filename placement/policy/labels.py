"""The lattice of privacy labels: a finite join-semilattice with a top. Pure.

Two labels join to the lowest label that is above both, so that what is made of both may go only where either may
go. A chain is the common case; a lattice has labels of which neither is above the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mesh.errors import InvalidRequest

MAX_LABELS = 32
DEFAULT_ORDER = ("public", "internal", "confidential", "restricted")


class LatticeProblem(ValueError):
    """Why labels are no lattice, for people; never leaves placement.policy."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """`above[a]` holds every label at or above a; `names` in the order of the document."""

    names: tuple[str, ...]
    above: Mapping[str, frozenset[str]]

    @classmethod
    def chain(cls, order: Iterable[str]) -> Lattice:
        """Each label below the next. Raises LatticeProblem."""
        names = tuple(order)
        following = dict(itertools.pairwise(names))
        if len(set(names)) != len(names):
            raise LatticeProblem("a label is listed twice")
        return cls.raises({name: [following[name]] if name in following else [] for name in names})

    @classmethod
    def raises(cls, direct: Mapping[str, Iterable[str]]) -> Lattice:
        """`direct[a]` are the labels right above a. Raises LatticeProblem on an unknown label, a cycle, or two
        labels without one least label above both."""
        names = tuple(direct)
        if not 1 <= len(names) <= MAX_LABELS:
            raise LatticeProblem(f"{len(names)} labels, must be 1 to {MAX_LABELS}")
        edges = {name: tuple(up) for name, up in direct.items()}
        for name, up in edges.items():
            if unknown := [label for label in up if label not in edges]:
                raise LatticeProblem(f"{name} raises to {unknown[0]}, which is not listed as a label itself")
        above = {name: _reach(name, edges) for name in names}
        for name, up in edges.items():
            if looping := [label for label in up if name in above[label]]:
                raise LatticeProblem(f"{name} and {looping[0]} are each above the other")
        lattice = cls(names, above)
        for a, b in itertools.combinations(names, 2):
            least = lattice._least_above(a, b)
            if not least:
                raise LatticeProblem(f"no label is above both {a} and {b}: add one that both raise to")
            if len(least) > 1:
                raise LatticeProblem(
                    f"{a} and {b} have no single least label above both: {' and '.join(least)} both would do"
                )
        return lattice

    @property
    def top(self) -> str:
        """The label above all others."""
        return next(name for name in self.names if all(name in up for up in self.above.values()))

    def check(self, label: str) -> str:
        """The label. Raises InvalidRequest if it is unknown."""
        if label not in self.above:
            raise InvalidRequest(f"unknown label {label[:64]!r}: one of {', '.join(self.names)}", field="label")
        return label

    def join(self, a: str, b: str) -> str:
        """The lowest label above both. Raises InvalidRequest on an unknown label."""
        return self._least_above(self.check(a), self.check(b))[0]

    def at_most(self, a: str, b: str) -> bool:
        """Whether b is at or above a. Raises InvalidRequest on an unknown label."""
        return self.check(b) in self.above[self.check(a)]

    def _least_above(self, a: str, b: str) -> list[str]:
        common = self.above[a] & self.above[b]
        return sorted(c for c in common if not any(c != d and c in self.above[d] for d in common))


def _reach(start: str, edges: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    seen, todo = {start}, [start]
    while todo:
        new = [up for up in edges[todo.pop()] if up not in seen]
        seen.update(new)
        todo.extend(new)
    return frozenset(seen)
