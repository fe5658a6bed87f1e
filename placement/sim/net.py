"""Links in virtual time: delays, and cuts. A link is between two sites; cuts come from the faults of a scenario."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from placement.sim.mesh import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing passes between two sites in [start_s, end_s)."""

    a: str
    b: str
    start_s: float
    end_s: float


class Net:
    """Owned by one simulation."""

    def __init__(self, env: simpy.Environment, links: Links, cuts: tuple[Cut, ...] = ()) -> None:
        self._env = env
        self._links = links
        self._cuts: dict[frozenset[str], list[Cut]] = {}
        for cut in cuts:
            self._cuts.setdefault(frozenset((cut.a, cut.b)), []).append(cut)

    def rtt_s(self, a: str, b: str) -> float:
        return self._links.between(a, b)[0]

    def goodput_bytes_per_s(self, a: str, b: str) -> float:
        return self._links.between(a, b)[1]

    def opens_s(self, a: str, b: str) -> float:
        """When something that is sent now gets through: now, or the end of the cut."""
        now_s = self._env.now
        if self._cuts:
            for cut in self._cuts.get(frozenset((a, b)), ()):
                if cut.start_s <= now_s < cut.end_s:
                    return cut.end_s
        return float(now_s)

    def is_cut(self, a: str, b: str, *, since_s: float) -> bool:
        """Whether nothing passes now, and has not for so long."""
        cuts, now_s = self._cuts.get(frozenset((a, b)), ()), self._env.now
        return any(cut.start_s + since_s <= now_s < cut.end_s for cut in cuts)
