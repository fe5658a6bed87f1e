"""How news of nodes gets to our entries in a simulation: reports at a pace to the placement service (at the first hub),
snapshots of the core pushed on to remote entries at another pace, a site's own node seen at once.

A remote entry has rows for the core and its own site only; other sites' nodes are not reachable from it, so that they
would change nothing but the counts of refused nodes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import simpy

from mesh.identity.place import Tier
from mesh.node.engine import EngineLoad
from placement.entry.mesh_view import NodeState
from placement.sim.mesh import SimNodeSpec
from placement.sim.net import Cut, Net
from placement.sim.node import SimNode
from placement.sim.scenario import NodeDown, Scenario, StaleMetrics
from placement.sim.view import News, SeenNode, View


class Board:
    """Owned by one simulation of our own router."""

    def __init__(self, env: simpy.Environment, net: Net, scenario: Scenario, nodes: Mapping[str, SimNode]) -> None:
        self._env = env
        self._net = net
        self._scenario = scenario
        self._nodes = nodes
        self._specs = {s.place.node_id: s for s in scenario.mesh.nodes}
        self._home = scenario.mesh.links.hubs[0]
        self._core = [s for s in scenario.mesh.nodes if s.place.tier is Tier.CORE]
        self._published: dict[str, News] = {}  # what it pushed last
        self._placement = self._view(self._core, self._home)  # what the placement service knows
        self._published = {s.place.node_id: self._placement.news(s.place.node_id) for s in self._core}
        self._version = 0
        self._pushing = False
        self._views: dict[str, View] = {self._home: self._placement}
        self._taken: dict[str, int] = {}  # entry's site -> version that it has
        self._due: set[str] = set()
        self._quiet: set[str] = set()  # nodes of which no reports arrive
        for node in nodes.values():
            node.on_change = self._changed
        self._plan_faults()

    def view_for(self, site: str, nodes: Sequence[SimNodeSpec]) -> View:
        """The view of an entry that sees these nodes; made when it is first asked for."""
        view = self._views.get(site)
        if view is None:
            view = self._views[site] = self._view(nodes, site)
            self._taken[site] = -1
            view.on_read = lambda now_s: self._take(site, view, now_s)
            away = [s.place.node_id for s in nodes if self._net.opens_s(site, s.place.site) > self._env.now]
            view.reachable(away, False)
        return view

    def _view(self, nodes: Sequence[SimNodeSpec], site: str) -> View:
        own = next((s.place.node_id for s in nodes if s.place.site == site and s.place.tier is Tier.EDGE), "")
        seen = [
            SeenNode(
                place=s.place,
                profile=s.profile,
                load=self._load_of(s),
                rtt_s=self._net.rtt_s(site, s.place.site),
                goodput_bytes_per_s=self._net.goodput_bytes_per_s(site, s.place.site),
            )
            for s in nodes
        ]
        return View(seen, entry_node_id=own, heartbeat_s=self._scenario.report_s)

    def _load_of(self, spec: SimNodeSpec) -> EngineLoad:
        """What an entry that is new hears first: of the core what was pushed last."""
        known = self._published.get(spec.place.node_id)
        return known.load if known is not None else self._nodes[spec.place.node_id].load()

    # Reports

    def _changed(self, node: SimNode) -> None:
        spec = self._specs[node.node_id]
        if spec.place.tier is Tier.EDGE:
            view = self._views.get(spec.place.site)
            if view is not None:
                state = NodeState.READY if node.up else NodeState.DISCONNECTED
                view.hear(node.node_id, News(load=node.load(), heard_s=self._env.now, state=state))
        elif node.node_id not in self._due:
            self._due.add(node.node_id)
            pace_s, now_s = self._scenario.report_s, self._env.now
            # Nodes do not report in step: each has a phase of its own.
            phase_s = pace_s * (zlib.crc32(node.node_id.encode()) / 2**32)
            next_s = (math.floor((now_s - phase_s) / pace_s) + 1) * pace_s + phase_s
            self._after(next_s - now_s, lambda: self._report(node))

    def _report(self, node: SimNode) -> None:
        self._due.discard(node.node_id)
        if node.node_id in self._quiet or not node.up:
            return
        load = node.load()
        late_s = self._net.rtt_s(self._specs[node.node_id].place.site, self._home) / 2
        self._after(late_s, lambda: self._hear_load(node.node_id, load))

    def _hear_load(self, node_id: str, load: EngineLoad) -> None:
        self._hear(node_id, load=load, heard_s=self._env.now)

    def _hear(self, node_id: str, **changes: Any) -> None:
        """News of a core node at the placement service, and soon at the entries."""
        self._placement.hear(node_id, replace(self._placement.news(node_id), **changes))
        if not self._pushing and len(self._views) > 1:
            self._pushing = True
            pace_s = self._scenario.push_s
            self._after(pace_s - self._env.now % pace_s, self._publish)

    def _publish(self) -> None:
        self._pushing = False
        self._published = {node_id: self._placement.news(node_id) for node_id in self._published}
        self._version += 1

    def _take(self, site: str, view: View, now_s: float) -> None:
        if self._taken[site] != self._version and self._net.opens_s(site, self._home) <= now_s:
            self._taken[site] = self._version
            for node_id, news in self._published.items():
                view.hear(node_id, news)

    def _after(self, delay_s: float, then: Callable[[], None]) -> None:
        event = self._env.timeout(max(0.0, delay_s))
        event.callbacks.append(lambda _: then())

    # Faults

    def _plan_faults(self) -> None:
        faults = self._scenario.faults
        for down in faults.down:
            self._plan_down(down)
        for stale in faults.stale:
            self._plan_stale(stale)
        for cut in faults.cuts:
            self._plan_cut(cut)

    def _plan_down(self, down: NodeDown) -> None:
        """A node that is down is known to be after a while, and known to be up again at once: it registers."""
        if self._specs[down.node_id].place.tier is Tier.EDGE:
            return  # its own site sees it at once
        detect_s, node_id = self._scenario.detect_s, down.node_id
        if down.end_s - down.start_s > detect_s:
            self._after(down.start_s + detect_s, lambda: self._ready(node_id, False))
        self._after(down.end_s, lambda: self._ready(node_id, True))

    def _ready(self, node_id: str, ready: bool) -> None:
        self._hear(node_id, state=NodeState.READY if ready else NodeState.DISCONNECTED)

    def _plan_stale(self, stale: StaleMetrics) -> None:
        if self._specs[stale.node_id].place.tier is Tier.EDGE:
            return
        self._after(stale.start_s, lambda: self._silence(stale.node_id, True))
        self._after(stale.end_s, lambda: self._silence(stale.node_id, False))

    def _silence(self, node_id: str, silent: bool) -> None:
        (self._quiet.add if silent else self._quiet.discard)(node_id)
        self._hear(node_id, silent=silent)
        if not silent:
            self._report(self._nodes[node_id])

    def _plan_cut(self, cut: Cut) -> None:
        for site, other in ((cut.a, cut.b), (cut.b, cut.a)):
            away = [s.place.node_id for s in self._scenario.mesh.nodes if s.place.site == other]
            if cut.end_s - cut.start_s > self._scenario.detect_s:
                start_s = cut.start_s + self._scenario.detect_s
                self._after(start_s, partial(self._reach, site, away, False))
                self._after(cut.end_s, partial(self._reach, site, away, True))
            if site == self._home:
                for node_id in away:
                    if self._specs[node_id].place.tier is Tier.CORE:
                        self._plan_stale(StaleMetrics(node_id=node_id, start_s=cut.start_s, end_s=cut.end_s))

    def _reach(self, site: str, node_ids: Sequence[str], reachable: bool) -> None:
        view = self._views.get(site)
        if view is not None:
            view.reachable(node_ids, reachable)
