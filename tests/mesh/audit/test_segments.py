"""A log in many files: read from anywhere, sealed or not, let go only what the mesh has, never more than agreed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog, LogLimits, segments
from mesh.audit.verify import verify_log
from mesh.errors import Overloaded, PayloadCorrupt
from mesh.identity.ca import CertificateAuthority
from mesh.identity.sealing import StateKey
from mesh.identity.signing import NodeIdentity
from tests.mesh.audit.conftest import receipt_of

NodeOf = Callable[..., NodeIdentity]
SMALL = LogLimits(segment_bytes=3_000)
KEY = StateKey(b"k" * 32).sealer("audit")
OTHER = StateKey(b"o" * 32).sealer("audit")


@pytest.mark.parametrize("sealer", [None, KEY])
async def test_any_range_reads_as_it_was_made(node: NodeOf, tmp_path: Path, sealer: object) -> None:
    log = AuditLog(tmp_path / "a", node("paris"), limits=SMALL, sealer=sealer)  # type: ignore[arg-type]
    for i in range(60):
        await log.append(EntryKind.ADMIN, {"n": i, "pad": "x" * 100})
    assert len(segments(tmp_path / "a")) > 3
    everything = log.read(0, 1 << 30)
    assert len(everything) == log.head.seq + 1
    rng = random.Random(5)
    for _ in range(40):
        start = rng.randrange(len(everything) + 1)
        most = rng.choice([1, 500, 5_000])
        part = log.read(start, most)
        assert part == everything[start : start + len(part)]
        assert len(part) == 1 or sum(map(len, part)) <= most or start == len(everything)
    at, got = 0, list[bytes]()
    while part := log.read(at, 900):  # as a copy is made, the cursor in use
        got += part
        at += len(part)
    assert got == everything


async def test_a_sealed_log_shows_nothing_and_opens_with_its_key_only(
    node: NodeOf, tmp_path: Path, authority: CertificateAuthority
) -> None:
    paris = node("paris")
    log = AuditLog(tmp_path / "a", paris, sealer=KEY)
    await log.append_receipt(receipt_of(paris, tenant="acme-hospital"))
    await log.close()
    raw = b"".join(p.read_bytes() for p in segments(tmp_path / "a"))
    assert b"acme" not in raw
    assert b"receipt" not in raw
    report = verify_log(tmp_path / "a", authority.ca_pem, KEY)
    assert (report.problems, report.n_receipts) == ([], 1)
    with pytest.raises(PayloadCorrupt, match="sealed"):
        verify_log(tmp_path / "a", authority.ca_pem)
    for wrong in (None, OTHER):
        with pytest.raises(PayloadCorrupt):
            AuditLog(tmp_path / "a", paris, sealer=wrong)
    again = AuditLog(tmp_path / "a", paris, sealer=KEY)
    await again.append(EntryKind.ADMIN, {"n": 1})


async def test_a_plain_log_goes_on_sealed(node: NodeOf, tmp_path: Path, authority: CertificateAuthority) -> None:
    paris = node("paris")
    await AuditLog(tmp_path / "a", paris).append(EntryKind.ADMIN, {"n": 1})
    await AuditLog(tmp_path / "a", paris, sealer=KEY).append(EntryKind.ADMIN, {"n": 2})
    assert verify_log(tmp_path / "a", authority.ca_pem, KEY).n_entries == 3


async def test_too_much_unmerged_refuses_new_work_but_drops_nothing(node: NodeOf, tmp_path: Path) -> None:
    limits = LogLimits(segment_bytes=2_000, most_unmerged_bytes=8_000, keep_merged_bytes=0)
    log = AuditLog(tmp_path / "a", node("paris"), limits=limits)
    refused_at = -1
    for i in range(60):
        try:
            await log.check()
        except Overloaded:
            refused_at = i
            break
        await log.append(EntryKind.ADMIN, {"n": i, "pad": "x" * 100})
    assert refused_at > 10
    await log.append(EntryKind.ADMIN, {"n": "still running"})  # what runs is kept all the same
    everything = log.read(0, 1 << 30)
    again = AuditLog(tmp_path / "a", node("paris"), limits=limits)  # a restart does not forget what waits
    with pytest.raises(Overloaded, match="wait for the mesh"):
        await again.check()
    assert again.read(0, 1 << 30) == everything
    again.merged(again.head.seq)
    await again.check()
    assert len(segments(tmp_path / "a")) == 1
    with pytest.raises(PayloadCorrupt, match="no longer here"):
        again.read(0, 1 << 30)
    last = AuditLog(tmp_path / "a", node("paris"), limits=limits)  # which entries are merged is kept too
    await last.check()
    assert last.head == again.head


async def test_only_whole_files_that_were_merged_go(node: NodeOf, tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a", node("paris"), limits=LogLimits(segment_bytes=2_000, keep_merged_bytes=0))
    for i in range(40):
        await log.append(EntryKind.ADMIN, {"n": i, "pad": "x" * 100})
    everything = log.read(0, 1 << 30)
    for seq in (3, 17, 18, 31, 5):
        log.merged(seq)
        top = max(3, seq) if seq != 5 else 31
        assert log.read(top + 1, 1 << 30) == everything[top + 1 :]


async def test_a_disk_that_is_nearly_full_refuses_new_work(
    node: NodeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "a", node("paris"), limits=LogLimits(keep_free_bytes=10 << 20))
    await log.check()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9 << 20))
    with pytest.raises(Overloaded, match="9 MiB left"):
        await log.check()
    await log.append(EntryKind.ADMIN, {"n": "still running"})


async def test_a_file_that_was_begun_and_no_more_does_not_keep_a_box_down(node: NodeOf, tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a", node("paris"), limits=LogLimits(segment_bytes=10))
    for i in range(3):
        await log.append(EntryKind.ADMIN, {"n": i})
    head = log.head
    found = segments(tmp_path / "a")
    (tmp_path / "a" / f"audit-{len(found) + 1:06d}.jsonl").write_bytes(b'{"half')
    again = AuditLog(tmp_path / "a", node("paris"), limits=LogLimits(segment_bytes=10))
    assert again.head.seq == head.seq + 1  # the entry that tells of it
