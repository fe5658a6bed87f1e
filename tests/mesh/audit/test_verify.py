"""Tampering, deletion, reordering and cut-off ends are found; the question of where data has been is answered."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mesh.audit.command import register
from mesh.audit.log import AuditLog, segments
from mesh.audit.query import Filter, stayed_at
from mesh.audit.verify import verify_log, verify_logs
from mesh.errors import InvalidRequest
from mesh.identity.ca import CertificateAuthority
from mesh.identity.receipt import record_to_wire
from mesh.identity.signing import NodeIdentity, SignedRecord
from mesh.v1 import common_pb2 as common
from tests.mesh.audit.conftest import receipt_of

NodeOf = Callable[..., NodeIdentity]
LogOf = Callable[..., AuditLog]
RESTRICTED = Filter(tenant="acme", labels=frozenset({"restricted"}))


async def written(log: AuditLog, entry: NodeIdentity, n: int = 5) -> list[bytes]:
    for i in range(n):
        await log.append_receipt(receipt_of(entry, entry, request_id=f"r{i}"))
    await log.close()
    return segments(log._folder)[0].read_bytes().splitlines(keepends=True)


def rewrite(log: AuditLog, lines: list[bytes]) -> Path:
    segments(log._folder)[0].write_bytes(b"".join(lines))
    return log._folder


@pytest.mark.parametrize("what", ["delete", "swap", "change", "repeat", "cut-begin", "resign"])
async def test_tampering_is_found(node: NodeOf, log_of: LogOf, authority: CertificateAuthority, what: str) -> None:
    paris = node("paris")
    log = log_of(paris)
    lines = await written(log, paris)
    match what:
        case "delete":
            del lines[2]
        case "swap":
            lines[2], lines[3] = lines[3], lines[2]
        case "change":
            lines[2] = lines[2].replace(b'"unix_s":17', b'"unix_s":18')
        case "repeat":
            lines.insert(3, lines[2])
        case "cut-begin":
            del lines[0]
        case "resign":  # a whole new entry in its place, well formed
            body = json.loads(lines[2]) | {"payload": json.loads(lines[3])["payload"]}
            lines[2] = json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert verify_log(rewrite(log, lines), authority.ca_pem).problems


async def test_a_cut_off_end_shows_where_another_node_keeps_a_head(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    log, other = log_of(paris), log_of(core)
    for i in range(3):
        await log.append_receipt(receipt_of(paris, request_id=f"r{i}"))
    await other.append_witness(log.sign_head())
    lines = segments(log._folder)[0].read_bytes().splitlines(keepends=True)
    folders = [log._folder, other._folder]
    assert [r.problems for r in verify_logs(folders, authority.ca_pem)] == [[], []]
    assert verify_logs(folders, authority.ca_pem)[0].witnessed_seq == 3
    rewrite(log, lines[:-1])
    assert verify_log(log._folder, authority.ca_pem).problems == [], "by itself it looks whole"
    assert "cut off" in verify_logs(folders, authority.ca_pem)[0].problems[0]


async def test_a_chain_begun_anew_shows(node: NodeOf, log_of: LogOf, authority: CertificateAuthority) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    log, other = log_of(paris), log_of(core)
    await log.append_receipt(receipt_of(paris))
    await other.append_witness(log.sign_head())
    segments(log._folder)[0].unlink()
    again = log_of(paris)
    await again.append_receipt(receipt_of(paris, request_id="harmless"))
    assert "rewritten" in verify_logs([again._folder, other._folder], authority.ca_pem)[0].problems[0]


async def test_receipts_of_others_and_forged_ones_show(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, osaka = node("paris"), node("osaka", "osaka")
    log = log_of(paris)
    await log.append_receipt(receipt_of(osaka))
    forged = receipt_of(paris)
    forged.record.body = forged.record.body.replace(b"acme", b"evil")
    await log.append_receipt(forged)
    problems = verify_log(log._folder, authority.ca_pem).problems
    assert len(problems) == 2
    assert "in the log of" in problems[0]


async def test_where_restricted_prompts_have_been(node: NodeOf, log_of: LogOf, authority: CertificateAuthority) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    log, other = log_of(paris), log_of(core)
    await log.append_receipt(receipt_of(paris, paris, request_id="home"))
    await log.append_receipt(receipt_of(paris, core, request_id="public", label="public"))
    await other.append_witness(log.sign_head())
    folders = [log._folder, other._folder]
    answer = stayed_at(verify_logs(folders, authority.ca_pem), RESTRICTED, "paris")
    assert (answer.n_requests, answer.proven) == (1, True), answer

    # A leg that the core signed is found even if the entry's own list leaves the core out.
    await log.append_receipt(receipt_of(paris, core, request_id="away", saw={}))
    answer = stayed_at(verify_logs(folders, authority.ca_pem), RESTRICTED, "paris")
    assert [(r, nodes) for _, _, r, nodes in answer.left] == [("away", ("core-1",))]
    assert not answer.proven


async def test_nothing_is_proven_beyond_what_others_vouch_for(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris = node("paris")
    log = log_of(paris)
    await log.append_receipt(receipt_of(paris, paris))
    answer = stayed_at(verify_logs([log._folder], authority.ca_pem), RESTRICTED, "paris")
    assert (answer.left, answer.proven) == ((), False)
    assert "vouch" in answer.unvouched[0]


async def test_the_command(node: NodeOf, log_of: LogOf, authority: CertificateAuthority, tmp_path: Path) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    log, other = log_of(paris), log_of(core)
    await log.append_receipt(receipt_of(paris, paris, request_id="home"))
    await other.append_witness(log.sign_head())
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.ca_pem)
    folders = [str(log._folder), str(other._folder)]

    app = typer.Typer()
    register(app)

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["audit", *words, "--ca", str(ca)])
        return result.exit_code, result.output

    assert run("verify", *folders)[0] == 0
    code, output = run("query", *folders, "--tenant", "acme", "--label", "restricted", "--stayed-at", "paris", "--json")
    assert (code, json.loads(output)["proven"], json.loads(output)["requests"]) == (0, True, 1)
    assert run("query", *folders, "--stayed-at", "osaka")[0] == 1
    assert json.loads(run("query", *folders, "--json", "--from", "2030-01-01")[1]) == []
    assert json.loads(run("export", *folders)[1])["receipt"]["request_id"] == "home"
    assert run("query", *folders, "--from", "yesterday")[0] != 0


def test_a_folder_without_a_log_is_an_error(tmp_path: Path, authority: CertificateAuthority) -> None:
    with pytest.raises(InvalidRequest, match="no audit log"):
        verify_log(tmp_path, authority.ca_pem)


def leg_of(
    node: NodeIdentity, request_id: str = "r", label: str = "restricted", ended_unix_s: float = 0.0
) -> SignedRecord:
    body = {"request_id": request_id, "node": node.place.node_id, "kind": "run", "tenant": "acme", "label": label}
    return node.sign(body | {"outcome": "stop", "entry_site": "paris", "ended_unix_s": ended_unix_s or time.time()})


def receipt_with(entry: NodeIdentity, leg: SignedRecord, request_id: str = "r") -> common.Receipt:
    """A receipt of the entry that shows this very leg."""
    made = receipt_of(entry, request_id=request_id)
    body = json.loads(made.record.body) | {"legs": [hashlib.sha256(leg.body).hexdigest()]}
    return common.Receipt(record=record_to_wire(entry.sign(body)), legs=[record_to_wire(leg)])


async def test_a_leg_that_a_node_left_out_of_its_own_log_is_found(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    entry, own = log_of(paris), log_of(core)
    await own.append_leg(leg_of(core, "r0"))
    kept, left_out = leg_of(core, "r1"), leg_of(core, "r2")
    await own.append_leg(kept)
    await entry.append_receipt(receipt_with(paris, kept, "r1"))
    reports = verify_logs([entry._folder, own._folder], authority.ca_pem)
    assert [r.problems for r in reports] == [[], []]
    assert [leg.body["request_id"] for leg in reports[1].legs] == ["r0", "r1"]
    await entry.append_receipt(receipt_with(paris, left_out, "r2"))
    problems = verify_logs([entry._folder, own._folder], authority.ca_pem)[1].problems
    assert len(problems) == 1
    assert "left out" in problems[0]


async def test_work_that_left_a_site_without_a_receipt_is_found_in_the_nodes_log(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    entry, own = log_of(paris), log_of(core)
    await entry.append_receipt(receipt_of(paris, paris, request_id="r1"))
    await own.append_leg(leg_of(core, "r2"))
    await own.append_leg(leg_of(core, "r3", label="public"))
    reports = verify_logs([entry._folder, own._folder], authority.ca_pem)
    answer = stayed_at(reports, RESTRICTED, "paris")
    assert answer.left == ((core.place.uri, 1, "r2", ("core-1",)),)
    assert not answer.proven


async def test_a_leg_of_another_node_or_without_fields_is_a_problem(
    node: NodeOf, log_of: LogOf, authority: CertificateAuthority
) -> None:
    paris, core = node("paris"), node("core-1", "dc1")
    log = log_of(core)
    await log.append_leg(leg_of(paris))
    await log.append_leg(core.sign({"node": "core-1"}))
    report = verify_log(log._folder, authority.ca_pem)
    assert len(report.problems) == 2
    assert report.legs == []


async def test_legs_are_listed(node: NodeOf, log_of: LogOf, authority: CertificateAuthority, tmp_path: Path) -> None:
    core = node("core-1", "dc1")
    log = log_of(core)
    await log.append_leg(leg_of(core, "r2"))
    (tmp_path / "ca.pem").write_bytes(authority.ca_pem)
    app = typer.Typer()
    register(app)
    shown = CliRunner().invoke(
        app, ["audit", "query", str(log._folder), "--ca", str(tmp_path / "ca.pem"), "--legs", "--json"]
    )
    (row,) = json.loads(shown.stdout)
    assert (row["request_id"], row["tenant"], row["kind"]) == ("r2", "acme", "run")
