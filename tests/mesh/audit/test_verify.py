"""Tampering, deletion, reordering and cut-off ends are found; the question of where data has been is answered."""

from __future__ import annotations

import json
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
from mesh.identity.signing import NodeIdentity
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
