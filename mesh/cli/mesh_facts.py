"""A snapshot of the mesh by site: what `kvmesh sites`, `kvmesh site show` and `kvmesh top` tell. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mesh.errors import NotFound
from mesh.v1 import admin_pb2

_READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """One site as the viewer sees it. `requests_entered` came in there, `requests_here` compute (and have their KV)
    there. `rtt_s` is of its nearest node, `goodput_bytes_per_s` of its best link; None: not measured."""

    site: str
    region: str
    jurisdiction: str
    tiers: tuple[str, ...]
    nodes: int
    nodes_ready: int
    draining: int
    running: int
    waiting: int
    waiting_prefill_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    rtt_s: float | None
    goodput_bytes_per_s: float | None
    age_s: float
    models: tuple[str, ...]
    requests_entered: int
    requests_here: int

    @property
    def state(self) -> str:
        """ "ready", "draining", "disconnected", or "2 of 3 ready"."""
        if not self.nodes_ready:
            return "disconnected"
        if self.nodes_ready < self.nodes:
            return f"{self.nodes_ready} of {self.nodes} ready"
        return "draining" if self.draining == self.nodes else _READY

    def to_json(self) -> dict[str, Any]:
        """All of it under the names of its fields."""
        return {**asdict(self), "state": self.state}


def sites_of(snapshot: admin_pb2.Snapshot, requests: Iterable[admin_pb2.RunningRequest] = ()) -> tuple[SiteFacts, ...]:
    """Every site that has a node, by name."""
    by_site: dict[str, list[admin_pb2.NodeView]] = defaultdict(list)
    for node in snapshot.nodes:
        by_site[node.site].append(node)
    site_of = {node.node_id: node.site for node in snapshot.nodes}
    entered: dict[str, int] = defaultdict(int)
    here: dict[str, int] = defaultdict(int)
    for request in requests:
        entered[site_of.get(request.entry_node_id, "")] += 1
        here[site_of.get(request.node_id, "")] += 1
    return tuple(_site(name, by_site[name], entered[name], here[name]) for name in sorted(by_site))


def find_site(snapshot: admin_pb2.Snapshot, name: str) -> list[admin_pb2.NodeView]:
    """The nodes of one site. Raises NotFound."""
    found = [node for node in snapshot.nodes if node.site == name]
    if not found:
        known = ", ".join(sorted({node.site for node in snapshot.nodes})) or "none"
        raise NotFound(f"no node of a site {name[:64]!r} is known; known sites: {known}", field="site")
    return found


def _site(name: str, nodes: list[admin_pb2.NodeView], entered: int, here: int) -> SiteFacts:
    ready = [node for node in nodes if node.state == _READY]
    return SiteFacts(
        site=name,
        region=nodes[0].region,
        jurisdiction=nodes[0].jurisdiction,
        tiers=tuple(sorted({node.tier for node in nodes})),
        nodes=len(nodes),
        nodes_ready=len(ready),
        draining=sum(node.draining for node in nodes),
        running=sum(node.running for node in ready),
        waiting=sum(node.waiting for node in ready),
        waiting_prefill_tokens=sum(node.waiting_prefill_tokens for node in ready),
        kv_used_tokens=sum(node.kv_used_tokens for node in ready),
        kv_capacity_tokens=sum(node.kv_capacity_tokens for node in ready),
        prefill_tokens_per_s=sum(node.prefill_tokens_per_s for node in ready),
        decode_tokens_per_s=max((node.decode_tokens_per_s for node in ready), default=0.0),
        rtt_s=min((node.rtt_s for node in ready if node.rtt_s > 0), default=None),
        goodput_bytes_per_s=max((n.goodput_bytes_per_s for n in ready if n.goodput_bytes_per_s > 0), default=None),
        age_s=max((node.age_s for node in nodes), default=0.0),
        models=tuple(sorted({model.id for node in nodes for model in node.models})),
        requests_entered=entered,
        requests_here=here,
    )
