"""Placement catches up with sites that were away: every entry once, and what it has may be let go there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog, LogLimits, segments
from mesh.audit.verify import verify_log
from mesh.audit.witness import WitnessDesk
from mesh.errors import NodeUnreachable
from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place
from mesh.identity.signing import NodeIdentity
from mesh.v1 import uplink_pb2
from placement.service import site_logs as module
from placement.service.site_logs import SiteLogs
from tests.mesh.audit.conftest import authority, node, receipt_of

__all__ = ["authority", "node"]

NodeOf = Callable[..., NodeIdentity]


@dataclass
class Edge:
    place: Place
    desk: WitnessDesk


class Sites:
    """Hub and agents in one. `lose_answers`: the agent does what it was asked, and the link is cut."""

    def __init__(self) -> None:
        self.edges: dict[str, Edge] = {}
        self.lose_answers = 0
        self.asked = 0

    def attached(self) -> tuple[Edge, ...]:
        return tuple(self.edges.values())

    async def command(self, node_id: str, command: uplink_pb2.Command, *, timeout_s: float) -> uplink_pb2.CommandResult:
        self.asked += 1
        answer = await self.edges[node_id].desk.entries(command.audit)
        if self.lose_answers:
            self.lose_answers -= 1
            raise NodeUnreachable("cut")
        return uplink_pb2.CommandResult(audit=answer)


def merged(folder: Path, chain: str) -> list[bytes]:
    files = segments(folder / "paris" / chain)
    return [line for path in files for line in path.read_bytes().splitlines(keepends=True)]


async def test_receipts_of_a_cut_come_once_over_lost_answers_and_restarts(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_BYTES", 4_000)
    paris = node("paris")
    limits = LogLimits(segment_bytes=3_000, keep_merged_bytes=0)
    log = AuditLog(tmp_path / "site", paris, limits=limits)
    hub, core = Sites(), tmp_path / "core"
    hub.edges["paris"] = Edge(paris.place, WitnessDesk(log, authority.ca_pem))
    logs = SiteLogs(core, hub, period_s=0.0)
    everything: list[bytes] = []
    for episode in range(4):
        for i in range(15):  # cut off: nobody asks
            await log.append_receipt(receipt_of(paris, request_id=f"{episode}-{i}"))
        everything += log.read(len(everything), 1 << 30)
        hub.lose_answers = episode
        for _ in range(episode + 2):
            await logs.round()
        if episode == 2:
            logs = SiteLogs(core, hub, period_s=0.0)  # placement restarts
            await logs.round()
        assert merged(core, log.head.chain) == everything
        await logs.round()  # tells the agent so
        assert log.unmerged_bytes == 0
    report = verify_log(core / "paris" / log.head.chain, authority.ca_pem)
    assert (report.problems, report.n_receipts) == ([], 60)
    assert len(segments(tmp_path / "site")) == 1


async def test_a_log_begun_anew_gets_a_folder_of_its_own(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority
) -> None:
    paris, hub, core = node("paris"), Sites(), tmp_path / "core"
    logs = SiteLogs(core, hub, period_s=0.0)
    chains = []
    for life in ("one", "two"):
        log = AuditLog(tmp_path / life, paris)
        await log.append(EntryKind.ADMIN, {"life": life})
        hub.edges["paris"] = Edge(paris.place, WitnessDesk(log, authority.ca_pem))
        await logs.round()
        chains.append(log.head.chain)
    assert sorted(p.name for p in (core / "paris").iterdir()) == sorted(chains)
    assert [len(merged(core, chain)) for chain in chains] == [2, 2]


async def test_a_site_that_does_not_fit_or_answer_leaves_the_others_alone(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority
) -> None:
    hub, core = Sites(), tmp_path / "core"
    good, bad = AuditLog(tmp_path / "good", node("paris")), AuditLog(tmp_path / "bad", node("osaka"))
    hub.edges["rome"] = Edge(node("rome").place, WitnessDesk(bad, authority.ca_pem))  # tells another node's log
    hub.edges["paris"] = Edge(node("paris").place, WitnessDesk(good, authority.ca_pem))
    logs = SiteLogs(core, hub, period_s=0.0)
    await logs.round()
    await logs.round()
    assert merged(core, good.head.chain) == good.read(0, 1 << 30)
    assert not (core / "rome" / bad.head.chain / "audit-000001.jsonl").exists()


async def test_a_bug_at_one_site_leaves_the_others_alone(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority
) -> None:
    hub = Sites()
    for name in ("lyon", "paris"):
        log = AuditLog(tmp_path / name, node(name))
        hub.edges[name] = Edge(node(name).place, WitnessDesk(log, authority.ca_pem))
    del hub.edges["lyon"].desk
    logs = SiteLogs(tmp_path / "core", hub)
    await logs.round()
    assert logs.merged_total > 0


async def test_an_attached_site_is_asked_once_in_a_period(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority
) -> None:
    hub = Sites()
    log = AuditLog(tmp_path / "site", node("paris"))
    hub.edges["paris"] = Edge(node("paris").place, WitnessDesk(log, authority.ca_pem))
    logs = SiteLogs(tmp_path / "core", hub, period_s=3600.0)
    await logs.round()
    asked = hub.asked
    await logs.round()
    assert hub.asked == asked
    gone = hub.edges.pop("paris")
    await logs.round()
    hub.edges["paris"] = gone  # back again: at once
    await logs.round()
    assert hub.asked > asked
