"""Placement and its sites keep one another's heads, and fall silent when there is no news."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog, segments
from mesh.audit.verify import verify_logs
from mesh.audit.witness import WitnessDesk
from mesh.errors import NodeUnreachable, PayloadCorrupt
from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place
from mesh.identity.signing import NodeIdentity
from mesh.v1 import uplink_pb2
from placement.service.witnesses import Witnesses
from tests.mesh.audit.conftest import authority, log_of, node, receipt_of

__all__ = ["authority", "log_of", "node"]

NodeOf = Callable[..., NodeIdentity]
LogOf = Callable[..., AuditLog]


@dataclass
class Edge:
    place: Place
    desk: WitnessDesk
    away: bool = False


class Sites:
    """Hub and agents in one."""

    def __init__(self, *edges: Edge) -> None:
        self.edges = {edge.place.node_id: edge for edge in edges}
        self.sent: list[uplink_pb2.WitnessRequest] = []

    def attached(self) -> tuple[Edge, ...]:
        return tuple(self.edges.values())

    async def command(self, node_id: str, command: uplink_pb2.Command, *, timeout_s: float) -> uplink_pb2.CommandResult:
        self.sent.append(command.witness)
        edge = self.edges[node_id]
        if edge.away:
            raise NodeUnreachable("gone")
        return uplink_pb2.CommandResult(witness=await edge.desk.answer(command.witness))


def n_entries(log: AuditLog) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in segments(log._folder))


async def test_heads_are_exchanged_once_for_each_news(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, placement = node("paris"), node("placement-1", "dc1")
    edge_log, log = log_of(paris), log_of(placement)
    sites = Sites(Edge(paris.place, WitnessDesk(edge_log, authority.ca_pem)))
    witnesses = Witnesses(log, sites, authority.ca_pem, rng=random.Random(1))
    await edge_log.append_receipt(receipt_of(paris, paris))
    await log.append(EntryKind.ADMIN, {"action": "policy.put"})
    await witnesses.round()
    reports = verify_logs([log._folder, edge_log._folder], authority.ca_pem)
    assert [r.problems for r in reports] == [[], []]
    assert [r.witnessed_seq for r in reports] == [1, 2], "the site's own head has placement's as its last entry"
    before = n_entries(log), n_entries(edge_log)
    for _ in range(3):
        await witnesses.round()
    assert (n_entries(log), n_entries(edge_log)) == before, "no news, no entries"


async def test_a_site_that_is_away_costs_nothing_and_is_asked_again(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, osaka, placement = node("paris"), node("osaka", "osaka"), node("placement-1", "dc1")
    logs = {n.place.node_id: log_of(n) for n in (paris, osaka, placement)}
    edges = [Edge(n.place, WitnessDesk(logs[n.place.node_id], authority.ca_pem)) for n in (paris, osaka)]
    edges[0].away = True
    witnesses = Witnesses(logs["placement-1"], Sites(*edges), authority.ca_pem, rng=random.Random(1))
    await witnesses.round()
    edges[0].away = False
    await witnesses.round()
    reports = verify_logs([log._folder for log in logs.values()], authority.ca_pem)
    assert all(r.witnessed_seq >= 0 for r in reports), reports


async def test_one_node_cannot_speak_for_another(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority, tmp_path: Path
) -> None:
    paris, osaka, placement = node("paris"), node("osaka", "osaka"), node("placement-1", "dc1")
    desk = WitnessDesk(log_of(placement), authority.ca_pem)
    stolen = AuditLog(tmp_path / "stolen", paris).sign_head()
    request = WitnessDesk(log_of(osaka), authority.ca_pem).ask(None, None)
    with pytest.raises(PayloadCorrupt):
        await desk.keep(request.head, of=paris.place.uri)
    request.head.body = stolen.body
    with pytest.raises(PayloadCorrupt):
        await desk.keep(request.head)
