"""What is told as kept is on disk, in order, whatever happens to the process or the disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.audit import log as log_module
from mesh.audit.chain import EntryKind
from mesh.audit.log import AuditLog, segments
from mesh.audit.verify import verify_log
from mesh.errors import Internal, MeshError, Overloaded, PayloadCorrupt
from mesh.identity.ca import CertificateAuthority
from mesh.identity.signing import NodeIdentity
from tests.mesh.audit.conftest import receipt_of

NodeOf = Callable[..., NodeIdentity]
LogOf = Callable[..., AuditLog]


def kept(path: Path) -> bytes:
    return path.read_bytes()


async def test_many_at_once_are_kept_in_order(node: NodeOf, log_of: LogOf, authority: CertificateAuthority) -> None:
    paris = node("paris")
    log = log_of(paris)
    heads = await asyncio.gather(*(log.append_receipt(receipt_of(paris, request_id=f"r{i}")) for i in range(50)))
    assert [head.seq for head in heads] == list(range(1, 51))
    await log.close()
    report = verify_log(segments(log._folder)[0].parent, authority.ca_pem)
    assert (report.problems, report.n_receipts, report.signed_seq) == ([], 50, 50)


async def test_the_chain_goes_on_over_restarts_and_files(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 4_000)
    paris = node("paris")
    for start in range(3):
        log = log_of(paris)
        for i in range(4):
            await log.append_receipt(receipt_of(paris, request_id=f"{start}-{i}"))
        await log.close()
    folder = log._folder
    assert len(segments(folder)) > 2
    report = verify_log(folder, authority.ca_pem)
    assert (report.problems, report.n_receipts) == ([], 12)
    assert [r.body["request_id"] for _, r in report.receipts] == [f"{s}-{i}" for s in range(3) for i in range(4)]


async def test_heads_are_signed_on_the_way(node: NodeOf, log_of: LogOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "HEAD_EVERY", 4)
    log = log_of(node("paris"))
    for i in range(9):
        await log.append(EntryKind.ADMIN, {"n": i})
    kinds = [json.loads(line)["kind"] for line in segments(log._folder)[0].read_text().splitlines()]
    assert kinds.count("head") >= 2


@pytest.mark.parametrize("cut_bytes", [1, 5, 40])
async def test_a_half_written_line_is_cut_off_and_told_of(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority, cut_bytes: int
) -> None:
    log = log_of(node("paris"))
    for i in range(3):
        await log.append(EntryKind.ADMIN, {"n": i})
    path = segments(log._folder)[0]
    path.write_bytes(path.read_bytes()[:-cut_bytes])
    again = log_of(node("paris"))
    await again.append(EntryKind.ADMIN, {"n": 3})
    report = verify_log(path.parent, authority.ca_pem)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert (report.problems, kinds) == ([], ["start", "admin", "admin", "recovered", "admin"])


async def test_a_damaged_last_file_stops_the_start(node: NodeOf, log_of: LogOf) -> None:
    log = log_of(node("paris"))
    await log.append(EntryKind.ADMIN, {"n": 1})
    path = segments(log._folder)[0]
    path.write_bytes(path.read_bytes().replace(b'"n":1', b'"n":2') + b'{"not": "it"}\n')
    with pytest.raises(PayloadCorrupt):
        log_of(node("paris"))


async def test_a_full_disk_raises_for_all_that_wait_and_keeps_nothing_by_half(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(node("paris"))
    await log.append(EntryKind.ADMIN, {"n": 0})
    path: Path = segments(log._folder)[0]
    before = kept(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_module.os, "fsync", full)
        told = await asyncio.gather(*(log.append(EntryKind.ADMIN, {"n": i}) for i in (1, 2)), return_exceptions=True)
    assert all(isinstance(each, Overloaded) for each in told), told
    assert kept(path) == before
    await log.append(EntryKind.ADMIN, {"n": 3})
    assert verify_log(path.parent, authority.ca_pem).problems == []


async def test_files_are_private(node: NodeOf, log_of: LogOf) -> None:
    log = log_of(node("paris"))
    assert segments(log._folder)[0].stat().st_mode & 0o777 == 0o600
    assert log._folder.stat().st_mode & 0o777 == 0o700


async def test_what_is_no_json_is_refused(node: NodeOf, log_of: LogOf) -> None:
    log = log_of(node("paris"))
    with pytest.raises(MeshError):
        await log.append(EntryKind.ADMIN, {"n": float("nan")})
    await log.append(EntryKind.ADMIN, {"n": 1})


async def test_a_bug_in_writing_is_told_to_all_who_wait(
    node: NodeOf, log_of: LogOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(node("paris"))

    def broken(entries: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(log, "_write", broken)
        async with asyncio.timeout(10):
            told = await asyncio.gather(*(log.append(EntryKind.ADMIN, {}) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in told] == [Internal] * 3
    await log.check()
    assert (await log.append(EntryKind.ADMIN, {"n": 1})).seq == log.head.seq
    await log.close()
