"""A whole run: a trace over a mesh under a router and faults, to one record for each request.

Virtual time (simpy), one thread, no clock: the same scenario and seed give the same records.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import simpy

from mesh.errors import InvalidRequest
from mesh.identity.place import Tier
from placement.decide.types import Refusal
from placement.entry import runner_types as rt
from placement.predict.measured import Measured
from placement.sim.board import Board
from placement.sim.flight import Flight, Outcome, Record
from placement.sim.mesh import SimNodeSpec
from placement.sim.net import Cut, Net
from placement.sim.node import SimNode
from placement.sim.own_router import OwnRouter
from placement.sim.routers import BASELINES, Baseline, Fleet, Router
from placement.sim.scenario import OWN, Scenario
from placement.sim.traces import TraceRequest


def simulate(scenario: Scenario, progress: Callable[[int], None] = lambda done: None) -> list[Record]:
    """One record for each request, in the order of the trace. Raises InvalidRequest (an unknown router, a router that
    has no node to choose, a fault of a node that is not there)."""
    return Simulation(scenario, progress).run()


class Simulation:
    """One run; see `simulate`. It is the World of its flights."""

    def __init__(self, scenario: Scenario, progress: Callable[[int], None]) -> None:
        if scenario.router != OWN and scenario.router not in BASELINES:
            names = ", ".join((OWN, *BASELINES))
            raise InvalidRequest(f"no router {scenario.router[:64]!r}; there are {names}", field="router")
        self._scenario = scenario
        self._progress = progress
        self._rng = random.Random(scenario.seed)
        self.env = simpy.Environment()
        self.net = Net(self.env, scenario.mesh.links, scenario.faults.cuts)
        self._specs = {spec.place.node_id: spec for spec in scenario.mesh.nodes}
        self._nodes = {
            spec.place.node_id: SimNode(
                self.env,
                spec.place.node_id,
                spec.profile,
                rng=random.Random(self._rng.getrandbits(64)),
                factor=spec.factor,
                noise=scenario.noise,
            )
            for spec in scenario.mesh.nodes
        }
        self.fleet = Fleet([(spec, self._nodes[spec.place.node_id]) for spec in scenario.mesh.nodes])
        self._core = [s for s in scenario.mesh.nodes if s.place.tier is Tier.CORE]
        self._at_site: dict[str, list[SimNodeSpec]] = {}
        for spec in scenario.mesh.nodes:
            if spec.place.tier is Tier.EDGE:
                self._at_site.setdefault(spec.place.site, []).append(spec)
        self._check_faults()
        self._entries: dict[str, Router] = {}
        self._records: list[Record | None] = [None] * len(scenario.trace)
        self._flights: dict[int, Flight] = {}
        self._board = Board(self.env, self.net, scenario, self._nodes) if scenario.router == OWN else None
        self._n_done = 0

    def run(self) -> list[Record]:
        """To the last outcome."""
        self._plan_faults()
        self.env.process(self._arrivals())
        self.env.run()
        missing = [i for i, record in enumerate(self._records) if record is None]
        if missing:
            raise AssertionError(f"{len(missing)} requests have no outcome, the first is number {missing[0]}")
        return [record for record in self._records if record is not None]

    # World of flights

    def node(self, node_id: str) -> SimNode:
        return self._nodes[node_id]

    def site_of(self, node_id: str) -> str:
        return self._specs[node_id].place.site

    def detect_s(self) -> float:
        return self._scenario.detect_s

    # Requests

    def _arrivals(self) -> simpy.events.ProcessGenerator:
        for number, request in enumerate(self._scenario.trace):
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._arrive(number, request)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        site = self._scenario.mesh.entry_of(request.session)
        router = self._entries.get(site)
        if router is None:
            router = self._entries[site] = self._router(site, request)
        plan = router.plan(request, self.env.now)
        if isinstance(plan, Refusal):
            self._done(number, Record(request=request, outcome=Outcome.REFUSED, reason=plan.message))
            return
        flight = Flight(
            self,
            request,
            plan,
            site=site,
            router=router,
            max_tokens=self._scenario.own.most_output_tokens,
            on_done=lambda flight, end: self._ended(number, flight, end),
        )
        self._flights[number] = flight
        flight.begin()

    def _ended(self, number: int, flight: Flight, end: rt.Finish | rt.Fail) -> None:
        self._flights.pop(number, None)
        request, choice = flight.request, flight.plan.choice
        record = Record(
            request=request,
            outcome=Outcome.FAILED,
            node_id=flight.node_id,
            shape=choice.shape.name.lower(),
            cached_tokens=flight.cached_tokens,
            fallbacks=flight.fallbacks,
            predicted_ttft_s=choice.ttft_s,
        )
        measured = None
        if isinstance(end, rt.Finish):
            measured = self._measured(flight, end)
            record.ttft_s, record.total_s = end.ttft_s, end.total_s
            record.tpot_s = (end.total_s - end.ttft_s) / max(1, end.usage.completion_tokens - 1)
            met = self._scenario.slo.met(request.prompt_tokens, record.ttft_s, record.tpot_s)
            record.outcome = Outcome.WITHIN_SLO if met else Outcome.LATE
        else:
            record.reason = end.error.reason
        flight.router.finished(request, flight.plan, measured, self.env.now)
        self._done(number, record)

    def _measured(self, flight: Flight, end: rt.Finish) -> Measured | None:
        moved = flight.moves - (flight.plan.choice.prefill != flight.plan.choice.decode)
        if flight.fallbacks or moved:
            return None
        return Measured(
            ttft_s=end.ttft_s,
            total_s=end.total_s,
            tokens=end.usage.completion_tokens,
            prompt_tokens=flight.request.prompt_tokens,
            cached_tokens=flight.cached_tokens,
        )

    def _done(self, number: int, record: Record) -> None:
        assert self._records[number] is None, "a request has two outcomes"
        self._records[number] = record
        self._n_done += 1
        self._progress(self._n_done)

    # Entries

    def _router(self, site: str, request: TraceRequest) -> Router:
        seed = random.Random(self._rng.getrandbits(64))
        reach = [*self._core, *self._at_site.get(site, ())]
        if self._board is not None:
            view = self._board.view_for(site, reach)
            own = self._scenario.own
            return OwnRouter(own, view, entry_site=site, block_tokens=request.block_tokens, rng=seed)
        baseline = BASELINES[self._scenario.router]
        near = [s.place.node_id for s in reach if s.place.tier in baseline.tiers]
        if not near:
            message = f"{self._scenario.router} has no node to choose from at {site} in mesh {self._scenario.mesh.name}"
            raise InvalidRequest(message, field="router")

        def reachable(node_id: str) -> bool:
            there, detect_s = self.site_of(node_id), self._scenario.detect_s
            return self.node(node_id).up and not self.net.is_cut(site, there, since_s=detect_s)

        return Baseline(baseline.rank(), self.fleet, near, reachable, seed)

    # Faults

    def _check_faults(self) -> None:
        faults = self._scenario.faults
        for node_id in [*(f.node_id for f in faults.down), *(f.node_id for f in faults.stale)]:
            if node_id not in self._nodes:
                raise InvalidRequest(f"a fault of a node that is not there: {node_id[:64]!r}", field="faults")
        for site in [site for cut in faults.cuts for site in (cut.a, cut.b)]:
            if site not in self._scenario.mesh.links.sites:
                raise InvalidRequest(f"a cut at a site that is not there: {site[:64]!r}", field="faults")

    def _plan_faults(self) -> None:
        faults = self._scenario.faults
        for down in faults.down:
            self._at(down.start_s, self._nodes[down.node_id].crash)
            self._at(down.end_s, self._nodes[down.node_id].restart)
        for cut in faults.cuts:
            if cut.end_s - cut.start_s > self._scenario.detect_s:
                self._at(cut.start_s + self._scenario.detect_s, partial(self._cut, cut))

    def _cut(self, cut: Cut) -> None:
        for flight in list(self._flights.values()):
            if flight.site in (cut.a, cut.b):
                flight.link_lost(cut.b if flight.site == cut.a else cut.a)

    def _at(self, time_s: float, then: Callable[[], None]) -> None:
        event = self.env.timeout(max(0.0, time_s - self.env.now))
        event.callbacks.append(lambda _: then())
