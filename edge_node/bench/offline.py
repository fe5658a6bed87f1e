"""`kvmesh bench offline`: a site is cut off under load, its agent killed meanwhile, the link comes back; what was lost?

Real processes: placement, a core node, one edge agent with llama.cpp. All that the site sends to the mesh passes
proxies in this process; the cut lets nothing pass and closes nothing, which is what a dead line looks like from both
ends (a simulation of one: no network namespace). Clients of the site go on asking: for prompts that may stay at the
site, and for prompts that policy lets run at the core only. After the link is back, each request that a client saw
finished must have its receipt in placement's copy of the site's log, once.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mesh.address import HostPort
from mesh.audit.replica import SITE_LOGS_FOLDER
from mesh.audit.verify import LogReport, verify_log
from mesh.bench.link import LinkProxy
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.client import MeshClient
from mesh.client_types import Decision, Finish
from mesh.errors import MeshError
from mesh.local.commands import make_plan
from mesh.local.layout import PLACEMENT_ID
from mesh.local.local_mesh import Entry, LocalMesh, MeshReady
from mesh.model.catalogue import DEMO_MODEL

SITE, AGENT = "paris", "edge-paris"
_KEPT, _AWAY = "confidential", "public"
_POLICY = """\
version: 1
rules:
  public: {tiers: [core]}
  confidential: {sites: [own]}
"""
_PROMPT = "Describe the harbour in one short sentence, please."
_RECONCILE_S = 90.0
_PAUSE_S = 0.5  # of a client that was refused
PHASES = ("connected", "cut", "cut, restarted", "back")


@dataclass(slots=True)
class Asked:
    """One request as its client saw it. `reason`: of the error; empty if it finished."""

    phase: str
    label: str
    request_id: str = ""
    took_s: float = 0.0
    reason: str = ""
    message: str = ""


@dataclass(slots=True)
class Site:
    """The site's entry now: it has other ports after a restart. `phase` is what is happening to it."""

    entry: Entry
    api_key: str
    phase: str = PHASES[0]
    asked: list[Asked] = field(default_factory=list)
    stopping: bool = False
    away_works: asyncio.Event = field(default_factory=asyncio.Event)  # again, after the cut


class OfflineBench:
    """See the module's docstring."""

    name = "offline"
    question = "A site cut off under load, its agent killed meanwhile: does it serve, and is a receipt lost or doubled?"
    defaults: Mapping[str, Cell] = {
        "model": DEMO_MODEL,
        "cut_s": 60.0,
        "kill": True,
        "clients": 3,
        "output_tokens": 12,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about two minutes and a half with the defaults."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
            ports = _free_ports(2)
            links = [await stack.enter_async_context(LinkProxy("127.0.0.1", port)) for port in ports]
            plan = replace(
                make_plan(core=1, edge=SITE, state=folder, model=context.text("model"), device="cpu"),
                placement_node=HostPort("127.0.0.1", ports[0]),
                edge_placement=HostPort.parse(links[0].address),
                core_node=HostPort("127.0.0.1", ports[1]),
                core_advertise=HostPort.parse(links[1].address),
            )
            context.progress(0, len(PHASES), "starting a mesh")
            mesh, ready = await stack.enter_async_context(LocalMesh.running(plan, lambda line: None))
            site, reconciled_s = await _story(context, mesh, ready, links)
            logs = plan.folder_of(PLACEMENT_ID) / "state" / SITE_LOGS_FOLDER / AGENT
            receipts, problems = await _merged(site, logs, (plan.folder / "ca.pem").read_bytes())
        return report(site.asked, receipts, problems, reconciled_s)


async def _story(
    context: BenchContext, mesh: LocalMesh, ready: MeshReady, links: Sequence[LinkProxy]
) -> tuple[Site, float]:
    """Connected, cut, killed and started again, back. Returns what clients saw, and how long the way back took."""
    async with MeshClient(ready.core.grpc, ready.admin_key) as admin:
        await admin.put_policy("dev", _POLICY)
    site = Site(ready.edges[SITE], ready.api_key)
    tokens = context.count("output_tokens")
    clients = [asyncio.create_task(_client(site, _KEPT, tokens)) for _ in range(context.count("clients"))]
    clients.append(asyncio.create_task(_client(site, _AWAY, tokens)))
    try:
        third_s = context.number("cut_s") / 3
        context.progress(1, len(PHASES), PHASES[0])
        await asyncio.sleep(max(5.0, third_s))
        for link in links:
            link.stall()
        site.phase = PHASES[1]
        context.progress(2, len(PHASES), PHASES[1])
        await asyncio.sleep(2 * third_s if context.settings["kill"] else 3 * third_s)
        if context.settings["kill"]:
            await mesh.kill(AGENT)
            site.phase = PHASES[2]
            site.entry = Entry.of(await mesh.start_again(AGENT))
            context.progress(3, len(PHASES), PHASES[2])
            await asyncio.sleep(third_s)
        for link in links:
            await link.cut()  # what had been held is stale by now: a line that comes back has lost it
            link.resume()
            link.mend()
        site.phase = PHASES[3]
        context.progress(4, len(PHASES), PHASES[3])
        back_s = time.monotonic()
        await _until_away_works(site)
        reconciled_s = time.monotonic() - back_s
        await asyncio.sleep(third_s / 2)
    finally:
        site.stopping = True
        _, late = await asyncio.wait(clients, timeout=30.0)
        for task in late:
            task.cancel()
    return site, reconciled_s


async def _client(site: Site, label: str, tokens: int) -> None:
    """Ask, one request after the other."""
    n = 0
    while not site.stopping:
        n += 1
        asked = Asked(phase=site.phase, label=label)
        started_s = time.monotonic()
        try:
            async with MeshClient(site.entry.grpc, site.api_key) as client:
                prompt = f"{_PROMPT} {n}"
                async for event in client.generate(prompt, resume=False, label=label, max_tokens=tokens):
                    if isinstance(event, Decision):
                        asked.request_id = event.request_id
            if not isinstance(event, Finish):
                asked.reason = "NO_FINISH"
        except MeshError as error:
            asked.reason, asked.message = error.reason, error.message
        asked.took_s = time.monotonic() - started_s
        site.asked.append(asked)
        if asked.phase == PHASES[3] and label == _AWAY and not asked.reason:
            site.away_works.set()
        if asked.reason:
            await asyncio.sleep(_PAUSE_S)


async def _until_away_works(site: Site) -> None:
    """Until a request that needs the core finishes again."""
    with suppress(TimeoutError):
        await asyncio.wait_for(site.away_works.wait(), _RECONCILE_S)


async def _merged(site: Site, logs: Path, ca_pem: bytes) -> tuple[Counter[str], list[str]]:
    """Receipts by request id in placement's copy, once it has all that clients saw finished (or time is up)."""
    wanted = {a.request_id for a in site.asked if not a.reason}
    receipts, problems = Counter[str](), list[str]()
    with suppress(TimeoutError):
        async with asyncio.timeout(_RECONCILE_S):
            while not wanted <= set(receipts):
                await asyncio.sleep(1.0)
                reports = await asyncio.to_thread(_reports, logs, ca_pem)
                receipts = Counter(str(r.body["request_id"]) for report in reports for _, r in report.receipts)
                problems = [problem for report in reports for problem in report.problems]
    return receipts, problems


def _reports(logs: Path, ca_pem: bytes) -> list[LogReport]:
    return [verify_log(chain, ca_pem) for chain in sorted(logs.glob("*")) if any(chain.iterdir())]


def report(
    asked: Sequence[Asked], receipts: Mapping[str, int], problems: Sequence[str], reconciled_s: float
) -> BenchResult:
    """What it comes to."""
    rows: list[Mapping[str, Cell]] = []
    for phase in PHASES:
        for label in (_KEPT, _AWAY):
            each = [a for a in asked if (a.phase, a.label) == (phase, label)]
            reasons = Counter(a.reason for a in each if a.reason)
            refused_s = [a.took_s for a in each if a.reason]
            rows.append(
                {
                    "phase": phase,
                    "prompts": "stay at the site" if label == _KEPT else "need the core",
                    "asked": len(each),
                    "finished": sum(not a.reason for a in each),
                    "refused_p50_s": statistics.median(refused_s) if refused_s else None,
                    "refused_worst_s": max(refused_s, default=None),
                    "reasons": ", ".join(f"{reason} {n}" for reason, n in reasons.most_common()),
                }
            )
    finished = [a.request_id for a in asked if not a.reason]
    served = sum(not a.reason for a in asked if a.label == _KEPT and a.phase in PHASES[1:3])
    goals = (
        Goal(name="served while cut off", value=served, goal=1, direction=Direction.AT_LEAST),
        Goal(name="receipts missing", value=sum(receipts.get(r, 0) == 0 for r in finished), goal=0),
        Goal(name="receipts doubled", value=sum(n > 1 for n in receipts.values()), goal=0),
        Goal(name="problems in the merged log", value=len(problems), goal=0),
    )
    words = next((a.message for a in asked if a.reason.startswith("NO_") and a.phase in PHASES[1:3]), "")
    notes = (
        f"a request that needs the core finished {reconciled_s:.1f} s after the link was back; "
        f"{len(finished)} requests finished, {sum(receipts.values())} receipts merged",
        *([f"refusal while cut off: {words}"] if words else []),
        *problems,
    )
    return BenchResult(rows=tuple(rows), goals=goals, notes=notes)


def _free_ports(n: int) -> list[int]:
    probes = [socket.socket() for _ in range(n)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


BENCH = OfflineBench()
