"""The mesh as one entry sees it, as metrics: for sites that no Prometheus can reach, placement speaks.

Labels are node ids, sites and tiers: they come from certificates of the mesh, never from a caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.rpc.uplink.types import LinkState
from mesh.v1 import admin_pb2

_LABELS = ("node", "site", "tier")
_NEVER_S = 1e9


class MeshCollector(Collector):
    """A snapshot's nodes; `read` is called at each scrape. A figure that was never measured is left out."""

    def __init__(self, read: Callable[[], admin_pb2.Snapshot]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        yield GaugeMetricFamily(
            "kvmesh_registry_age_seconds", "Since the registry was last heard", value=snapshot.registry_age_s
        )
        columns: tuple[tuple[str, str, Callable[[admin_pb2.NodeView], float | None]], ...] = (
            ("ready", "1: it takes work; 0: disconnected or retired", lambda n: float(n.state == "ready")),
            ("draining", "1: it takes nothing new", lambda n: float(n.draining)),
            ("running", "Sequences that compute", lambda n: n.running),
            ("waiting", "Sequences that wait", lambda n: n.waiting),
            ("kv_used_tokens", "KV tokens in use", lambda n: n.kv_used_tokens),
            ("kv_capacity_tokens", "KV tokens in all", lambda n: n.kv_capacity_tokens),
            ("prefill_tokens_per_second", "Measured prefill speed", lambda n: n.prefill_tokens_per_s or None),
            (
                "decode_tokens_per_second",
                "Measured decode speed of one sequence",
                lambda n: n.decode_tokens_per_s or None,
            ),
            ("rtt_seconds", "Round trip to this entry", lambda n: n.rtt_s or None),
            ("goodput_bytes_per_second", "Measured goodput to this entry", lambda n: n.goodput_bytes_per_s or None),
            ("load_age_seconds", "Age of the figures", lambda n: n.age_s if n.age_s < _NEVER_S else None),
        )
        for name, text, value_of in columns:
            family = GaugeMetricFamily(f"kvmesh_node_{name}", text, labels=_LABELS)
            for node in snapshot.nodes:
                value = value_of(node)
                if value is not None:
                    family.add_metric((node.node_id, node.site, node.tier), value)
            yield family


class UplinkCollector(Collector):
    """An edge agent's side of its uplink."""

    def __init__(self, read: Callable[[], LinkState], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        link = self._read()
        yield GaugeMetricFamily(
            "kvmesh_uplink_connected", "1: the mesh is reached; 0: the site is on its own", value=float(link.connected)
        )
        yield GaugeMetricFamily(
            "kvmesh_uplink_state_seconds",
            "Since it was connected, or cut off",
            value=self._clock() - link.since_monotonic_s,
        )
        if link.rtt_s is not None:
            yield GaugeMetricFamily("kvmesh_uplink_rtt_seconds", "Round trip to placement", value=link.rtt_s)
