"""Placement fetches the telemetry of attached sites; a site that fails does not hold up the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edge_node.agent.telemetry import TelemetrySampler
from mesh.errors import NodeUnreachable, NotImplementedHere
from mesh.telemetry.history import TelemetryHistory, read_history
from mesh.telemetry.metrics import Metrics, Shape
from mesh.telemetry.spool import TelemetrySpool
from mesh.v1 import uplink_pb2
from placement.service.telemetry import TelemetryCollector


@dataclass
class Hub:
    """Sites by name; an error stands for a site that fails."""

    sites: dict[str, TelemetrySampler | Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def attached(self) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(place=SimpleNamespace(node_id=name)) for name in sorted(self.sites))

    async def command(self, node_id: str, command: uplink_pb2.Command, *, timeout_s: float) -> Any:
        self.asked.append(node_id)
        site = self.sites[node_id]
        if isinstance(site, Exception):
            raise site
        return uplink_pb2.CommandResult(telemetry=await site.answer(command.telemetry))


async def test_a_cut_is_told_afterwards_with_its_own_times(tmp_path: Path) -> None:
    metrics, now, connected = Metrics(node_id="edge-paris", role="edge"), [1000.0], [True]
    paris = TelemetrySampler(
        TelemetrySpool(tmp_path / "paris"), load=lambda: None, totals=lambda: metrics.totals,
        connected=lambda: connected[0], now=lambda: now[0],
    )  # fmt: skip
    hub = Hub({"edge-paris": paris, "edge-old": NotImplementedHere("older"), "edge-gone": NodeUnreachable("gone"),
               "edge-bad": ZeroDivisionError()})  # fmt: skip
    history = TelemetryHistory(tmp_path / "history")
    collector = TelemetryCollector(hub, history)  # type: ignore[arg-type]
    await paris.sample()
    await collector.round()
    away, hub.sites = hub.sites, {}
    connected[0] = False
    for _ in range(5):  # cut off: nothing is fetched, clients of the site are served
        now[0] += 10
        metrics.request_ended(outcome="OK", shape=Shape.LOCAL, generated_tokens=7)
        await paris.sample()
        await collector.round()
    hub.sites, connected[0] = away, True
    now[0] += 10
    await paris.sample()
    await collector.round()
    kept = [s for _, s in read_history(tmp_path / "history" / "edge-paris.jsonl")]
    assert [s.unix_s for s in kept] == [1000.0 + 10 * i for i in range(7)]
    assert [s.connected for s in kept] == [True, *[False] * 5, True]
    assert [s.requests_ok_total for s in kept] == [0, 1, 2, 3, 4, 5, 5]
    assert kept[-1].generated_tokens_total == 35
    assert {"edge-old", "edge-gone"} <= set(hub.asked)
