"""A copy of a site's log has each entry once and none is missing, whatever is sent again, lost or cut short."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.audit import replica as replica_module
from mesh.audit import segments as segments_module
from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog, LogLimits, segments
from mesh.audit.replica import Replica
from mesh.audit.verify import verify_log
from mesh.errors import PayloadCorrupt
from mesh.identity.ca import CertificateAuthority
from mesh.identity.signing import NodeIdentity
from tests.mesh.audit.conftest import receipt_of

NodeOf = Callable[..., NodeIdentity]


async def lines_of(folder: Path, signer: NodeIdentity, n: int) -> tuple[AuditLog, list[bytes]]:
    log = AuditLog(folder, signer, limits=LogLimits(segment_bytes=20_000))
    for i in range(n):
        await log.append_receipt(receipt_of(signer, request_id=f"r{i}"))
    return log, log.read(0, 1 << 30)


def copied(replica_folder: Path) -> list[bytes]:
    return [line for path in segments(replica_folder) for line in path.read_bytes().splitlines(keepends=True)]


@pytest.mark.parametrize("seed", range(4))
async def test_once_each_whatever_happens(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority, seed: int
) -> None:
    paris = node("paris")
    log, lines = await lines_of(tmp_path / "site", paris, 40)
    rng = random.Random(seed)
    replica = Replica(tmp_path / "core", paris.place, log.head.chain)
    folder = tmp_path / "core" / "paris" / log.head.chain
    while replica.next_seq < len(lines):
        fate = rng.random()
        start = rng.randrange(replica.next_seq + 1)  # what is here already may come again
        batch = lines[start : start + rng.randrange(1, 12)]
        if fate < 0.25:  # a crash, perhaps in the middle of a line
            torn = rng.randrange(0, 60)
            if torn and segments(folder):
                path = segments(folder)[-1]
                path.write_bytes(path.read_bytes()[: -torn or None])
            replica = Replica(tmp_path / "core", paris.place, log.head.chain)
        elif fate < 0.35 and replica.next_seq + 1 < len(lines):
            with pytest.raises(PayloadCorrupt, match="the next one is"):
                replica.append(replica.next_seq + 1, lines[replica.next_seq + 1 :])
        else:
            replica.append(start, batch)
    assert copied(folder) == lines
    report = verify_log(folder, authority.ca_pem)
    assert (report.problems, report.n_receipts) == ([], 40)


async def test_what_does_not_continue_is_not_mixed_in(node: NodeOf, tmp_path: Path) -> None:
    paris = node("paris")
    log, lines = await lines_of(tmp_path / "site", paris, 6)
    replica = Replica(tmp_path / "core", paris.place, log.head.chain)
    changed = [*lines[:3], lines[3].replace(b'"kind"', b'"k1nd"'), *lines[4:]]
    with pytest.raises(PayloadCorrupt):
        replica.append(0, changed)
    assert replica.next_seq == 3  # what was good of it
    with pytest.raises(PayloadCorrupt):
        replica.append(3, lines[4:])
    assert replica.append(3, lines[3:]) == len(lines) - 3


async def test_a_box_that_was_set_back_is_found_out(node: NodeOf, tmp_path: Path) -> None:
    import shutil

    paris = node("paris")
    log, _ = await lines_of(tmp_path / "site", paris, 3)
    shutil.copytree(tmp_path / "site", tmp_path / "backup")
    await log.append(EntryKind.ADMIN, {"n": "after the backup"})
    replica = Replica(tmp_path / "core", paris.place, log.head.chain)
    replica.append(0, log.read(0, 1 << 30))
    restored = AuditLog(tmp_path / "backup", paris)
    for i in range(3):
        await restored.append(EntryKind.ADMIN, {"n": i})
    with pytest.raises(PayloadCorrupt):
        replica.append(replica.next_seq, restored.read(replica.next_seq, 1 << 30))


async def test_another_nodes_log_and_odd_names_are_refused(node: NodeOf, tmp_path: Path) -> None:
    log, lines = await lines_of(tmp_path / "site", node("osaka"), 1)
    with pytest.raises(PayloadCorrupt, match="the log of"):
        Replica(tmp_path / "core", node("paris").place, log.head.chain).append(0, lines)
    with pytest.raises(PayloadCorrupt, match="another log"):
        Replica(tmp_path / "core", node("osaka").place, "ab" * 8).append(0, lines)
    for chain in ("", "../../etc", "a" * 65):
        with pytest.raises(PayloadCorrupt, match="names its log"):
            Replica(tmp_path / "core", node("paris").place, chain)


async def test_a_new_file_is_in_its_folder_before_it_is_told_as_kept(
    node: NodeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paris = node("paris")
    log, lines = await lines_of(tmp_path / "site", paris, 8)
    synced = list[Path]()
    for module in (replica_module, segments_module):
        monkeypatch.setattr(module, "sync_folder", synced.append)
    replica = Replica(tmp_path / "core", paris.place, log.head.chain)
    folder = tmp_path / "core" / "paris" / log.head.chain
    assert synced == [folder.parent, folder.parent.parent]
    replica.append(0, lines[:4])
    replica.append(4, lines[4:])
    assert synced[2:] == [folder], "once for the file"
