"""`kvmesh bench agents`: what do N attached sites cost one placement process, and what when all come back at once?

The placement service is the real one, in a process of its own, without models; the agents are the real uplink agent
with a host that computes nothing, all in this process, each with a certificate, a connection and a session of its own
(mutual TLS). Three parts: they attach; they stay for `hold_s` (memory and CPU of the placement process over it); the
placement process is killed and started again at the same address, and all come back (the storm). A lease that is lost
after an agent was attached, and not by the kill, is counted.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from mesh.address import HostPort
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.configfile import to_yaml
from mesh.errors import MeshError
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.certificates import load_certificate
from mesh.identity.files import make_private_folder, write_private
from mesh.identity.place import Place, Role, Tier
from mesh.identity.requests import certified_key
from mesh.local.process import NodeProcess
from mesh.process import raise_descriptor_limit
from mesh.rpc.channel import node_channel
from mesh.rpc.uplink.agent import UplinkAgent
from mesh.rpc.uplink.backoff import FullJitter
from mesh.rpc.uplink.types import AgentFacts
from mesh.settings import Identity, PlacementListeners, PlacementSettings, Uplink
from mesh.v1 import admin_pb2, uplink_pb2
from placement.bench.idle_host import IdleHost

_MESH, _PLACEMENT = "bench", "placement-1"
_LOOPBACK = HostPort("127.0.0.1", 0)
_ATTACH_TIMEOUT_S = 300.0
_TICKS_PER_S = 100  # of /proc on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a process: resident memory now, CPU time since its start, and when that was read (monotonic)."""

    resident_bytes: int
    cpu_s: float
    at_s: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """From /proc."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(resident_bytes=pages * 4096, cpu_s=ticks / _TICKS_PER_S, at_s=time.monotonic())


class Fleet:
    """The agents. `lost` counts sessions that ended though nobody killed anything."""

    def __init__(self, address: str, credentials: list[NodeCredentials], rng: random.Random, cap_s: float) -> None:
        self.lost = 0
        self.counting = False
        self.agents = [self._agent(address, own, random.Random(rng.random()), cap_s) for own in credentials]

    @property
    def connected(self) -> int:
        """How many have a session now."""
        return sum(agent.state.connected for agent in self.agents)

    async def start(self) -> None:
        """Start all; returns at once."""
        await asyncio.gather(*(agent.start() for agent in self.agents))

    async def until_connected(self, context: BenchContext, what: str) -> float:
        """Seconds until all have a session, or NaN if that took longer than _ATTACH_TIMEOUT_S."""
        began_s, total = time.monotonic(), len(self.agents)
        while (now := self.connected) < total:
            if time.monotonic() - began_s > _ATTACH_TIMEOUT_S:
                return float("nan")
            context.progress(now, total, what)
            await asyncio.sleep(0.1)
        return time.monotonic() - began_s

    async def stop(self) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents))

    def _ended(self, error: MeshError) -> None:
        self.lost += self.counting

    def _agent(self, address: str, own: NodeCredentials, rng: random.Random, cap_s: float) -> UplinkAgent:
        def dial() -> grpc.aio.Channel:
            return node_channel(address, own, _PLACEMENT)

        return UplinkAgent(
            dial=dial,
            host=IdleHost(),
            facts=AgentFacts(build="bench", models=()),
            on_config=_ignore_config,
            on_snapshot=_ignore_snapshot,
            on_command=_no_command,
            on_refusal=self._ended,
            backoff=FullJitter(rng, cap_s=cap_s),
        )


@dataclass(frozen=True, slots=True)
class _Agents:
    name: str = "agents"
    question: str = "What do N attached sites cost one placement process, and does a storm of reconnects settle?"

    @property
    def defaults(self) -> Mapping[str, Cell]:
        return {"agents": 2000, "hold_s": 60.0, "lease_s": 15.0, "heartbeat_s": 5.0, "reconnect_max_s": 10.0, "seed": 1}

    async def run(self, context: BenchContext) -> BenchResult:
        raise_descriptor_limit()
        with tempfile.TemporaryDirectory(prefix="kvmesh-agents-") as name:
            return await _measure(context, Path(name))


async def _measure(context: BenchContext, folder: Path) -> BenchResult:
    count, hold_s = context.count("agents"), context.number("hold_s")
    credentials = await asyncio.to_thread(_credentials, folder, count)
    settings = _settings(context, folder)
    placement = await _start_placement(folder, settings, 0)
    empty = Usage.of(placement.pid or 0)
    fleet = Fleet(
        str(settings.listeners.node), credentials, random.Random(context.count("seed")),
        context.number("reconnect_max_s"),
    )  # fmt: skip
    try:
        await fleet.start()
        attach_s = await fleet.until_connected(context, "attach")
        held, lost_holding = await _hold(context, fleet, placement.pid or 0, hold_s)
        await placement.kill()
        began_s = time.monotonic()
        placement = await _start_placement(folder, settings, 1)
        started_s = time.monotonic() - began_s
        storm_s = await fleet.until_connected(context, "storm")
        storm_cpu_s = Usage.of(placement.pid or 0).cpu_s
        settled, lost_after = await _hold(context, fleet, placement.pid or 0, 3 * context.number("lease_s"))
    finally:
        await fleet.stop()
        await placement.drain(30.0)
    first, last = held[0], held[-1]
    cpu_ratio = (last.cpu_s - first.cpu_s) / (last.at_s - first.at_s)
    after, growth = settled[-1], last.resident_bytes / first.resident_bytes
    rows: tuple[Mapping[str, Cell], ...] = (
        {
            "agents": count,
            "attach_s": round(attach_s, 2),
            "empty_mib": _mib(empty.resident_bytes),
            "attached_mib": _mib(first.resident_bytes),
            "after_hold_mib": _mib(last.resident_bytes),
            "kib_per_agent": round((first.resident_bytes - empty.resident_bytes) / count / 1024, 1),
            "cpu_ratio": round(cpu_ratio, 4),
            "restart_s": round(started_s, 2),
            "storm_s": round(storm_s, 2),
            "storm_cpu_s": round(storm_cpu_s, 2),
            "after_storm_mib": _mib(after.resident_bytes),
            "lost_holding": lost_holding,
            "lost_after_storm": lost_after,
        },
    )
    return BenchResult(
        rows=rows,
        goals=(
            Goal(name="leases lost while nothing was killed", value=float(lost_holding + lost_after), goal=0.0),
            Goal(name="memory growth while attached, ratio", value=growth, goal=1.05),
        ),
        notes=(
            "cpu_ratio: CPU seconds of the placement process per second while all are attached",
            "the agents share this machine's cores with the placement process",
        ),
    )


async def _hold(context: BenchContext, fleet: Fleet, pid: int, hold_s: float) -> tuple[list[Usage], int]:
    """Readings over the time, the first and the last among them, and how many sessions ended meanwhile."""
    fleet.lost, fleet.counting = 0, True
    readings = [Usage.of(pid)]
    end_s = time.monotonic() + hold_s
    while (left_s := end_s - time.monotonic()) > 0:
        context.progress(round(hold_s - left_s), round(hold_s), "hold")
        await asyncio.sleep(min(1.0, left_s))
        readings.append(Usage.of(pid))
    fleet.counting = False
    return readings, fleet.lost


def _credentials(folder: Path, count: int) -> list[NodeCredentials]:
    """Certificates of one key, since making 2,000 keys is not what is measured. Writes placement's own."""
    authority = CertificateAuthority.create_or_load(folder / "ca", _MESH)
    placement = Place(
        mesh=_MESH, role=Role.PLACEMENT, tier=Tier.CORE, site="dc", region="eu", jurisdiction="DE", node_id=_PLACEMENT
    )
    authority.issue(placement).save(folder / "identity")
    places = [
        Place(
            mesh=_MESH, role=Role.EDGE, tier=Tier.EDGE, site=f"site-{n}", region="eu", jurisdiction="DE",
            node_id=f"edge-{n}",
        )
        for n in range(count)
    ]  # fmt: skip
    first = authority.issue(places[0])
    key = certified_key(load_certificate(first.cert_pem, "certificate"))
    return [
        NodeCredentials(key_pem=first.key_pem, cert_pem=authority.certify(key, place), ca_pem=authority.ca_pem)
        for place in places
    ]


def _settings(context: BenchContext, folder: Path) -> PlacementSettings:
    with socket.socket() as probe:  # a port of its own, to come back at
        probe.bind(("127.0.0.1", 0))
        node = _LOOPBACK.with_port(probe.getsockname()[1])
    return PlacementSettings(
        identity=Identity(folder=folder / "identity"),
        state_folder=folder / "state",
        drain_s=1.0,
        listeners=PlacementListeners(public=_LOOPBACK, http=_LOOPBACK, node=node),
        uplink=Uplink(lease_s=context.number("lease_s"), heartbeat_s=context.number("heartbeat_s")),
    )


async def _start_placement(folder: Path, settings: PlacementSettings, life: int) -> NodeProcess:
    make_private_folder(folder)
    config = folder / "placement.yaml"
    write_private(config, to_yaml(settings).encode())
    process = NodeProcess(
        node_id=_PLACEMENT,
        command=(sys.executable, "-m", "mesh.cli.main", "placement", "--config", str(config)),
        state_folder=settings.state_folder,
        log_file=folder / f"process-{life}.log",
    )
    await process.start()
    return process


def _mib(size_bytes: int) -> float:
    return round(size_bytes / 2**20, 1)


async def _ignore_config(_: uplink_pb2.SiteConfig) -> None:
    return


async def _ignore_snapshot(_: admin_pb2.Snapshot) -> None:
    return


async def _no_command(_: uplink_pb2.Command) -> uplink_pb2.CommandResult:
    return uplink_pb2.CommandResult()


BENCH = _Agents()
