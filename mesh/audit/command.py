"""`kvmesh audit verify | query | export`: what audit logs prove, offline, from their folders and the mesh's CA."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mesh.audit.query import Filter, StayedAt, select, select_legs, stayed_at
from mesh.audit.verify import LoggedLeg, LogReport, verify_logs
from mesh.errors import InvalidRequest
from mesh.identity.sealing import StateKey

Folders = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of audit logs, e.g. STATE/audit.")]
KeyFile = Annotated[Path | None, typer.Option("--state-key", metavar="FILE", help="Of the box, for a sealed log.")]
CaFile = Annotated[Path, typer.Option("--ca", metavar="FILE", help="The mesh's ca_cert.pem.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
_NOT_PROVEN = 1


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    audit = typer.Typer(no_args_is_help=True, help="Audit logs: verify, query, export. Offline; nothing is changed.")
    app.add_typer(audit, name="audit")

    @audit.command("verify")
    def verify(folders: Folders, ca: CaFile, state_key: KeyFile = None, as_json: Json = False) -> None:
        """Check chains, signatures, and that no log lost its end. Exit code 1 if anything is wrong."""
        reports = _read(folders, ca, state_key)
        if as_json:
            print(json.dumps([_report(r) for r in reports], indent=2))
        else:
            Console().print(_table(reports))
            for report in reports:
                for problem in report.problems:
                    Console().print(f"[red]{report.node or report.folder}[/]: {problem}", highlight=False)
        raise typer.Exit(0 if all(r.ok for r in reports) else _NOT_PROVEN)

    @audit.command("query")
    def query(
        folders: Folders,
        ca: CaFile,
        tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
        label: Annotated[list[str] | None, typer.Option(help="Effective label; may repeat.")] = None,
        node: Annotated[str, typer.Option(help="Only what this node saw or held.")] = "",
        outcome: Annotated[str, typer.Option(help="e.g. stop, length, or an error's reason.")] = "",
        request_id: Annotated[str, typer.Option("--request", help="One request.")] = "",
        since: Annotated[str, typer.Option("--from", help="Day or time, UTC, e.g. 2026-11-01.")] = "",
        until: Annotated[str, typer.Option("--to", help="Up to (not including), e.g. 2026-12-01.")] = "",
        stayed: Annotated[str, typer.Option("--stayed-at", metavar="SITE", help="Prove that none left it.")] = "",
        entry_site: Annotated[str, typer.Option("--entry-site", help="Only of this site's entries.")] = "",
        legs: Annotated[bool, typer.Option("--legs", help="What nodes kept of their own work, not receipts.")] = False,
        state_key: KeyFile = None,
        as_json: Json = False,
    ) -> None:
        """List receipts, or with --legs the nodes' own records.

        With --stayed-at prove that all of them stayed at a site (exit code 1 if not proven)."""
        wanted = Filter(
            tenant=tenant,
            labels=frozenset(label or ()),
            node=node,
            outcome=outcome,
            request_id=request_id,
            site=entry_site,
            since_unix_s=_time(since, "--from"),
            until_unix_s=_time(until, "--to"),
        )
        reports = _read(folders, ca, state_key)
        if stayed:
            answer = stayed_at(reports, wanted, stayed)
            _show_answer(answer, stayed, as_json=as_json)
            raise typer.Exit(0 if answer.proven else _NOT_PROVEN)
        if legs:
            _show_rows([_leg_row(report, leg) for report, leg in select_legs(reports, wanted)], as_json=as_json)
            return
        rows = [_row(report, seq, receipt.body) for report, seq, receipt in select(reports, wanted)]
        _show_rows(rows, as_json=as_json)

    @audit.command("export")
    def export(folders: Folders, ca: CaFile, state_key: KeyFile = None) -> None:
        """All verified receipts, one JSON object a line, to standard output."""
        for report, seq, receipt in select(_read(folders, ca, state_key), Filter()):
            legs = [{"node": place.uri, **leg} for leg, place in receipt.legs]
            print(json.dumps({"log": report.node, "seq": seq, "receipt": receipt.body, "legs": legs}))


def _read(folders: list[Path], ca: Path, state_key: Path | None) -> list[LogReport]:
    try:
        ca_pem = ca.read_bytes()
    except OSError as exc:
        raise InvalidRequest(f"cannot read {ca}: {exc.strerror}", field="--ca") from exc
    sealer = None if state_key is None else StateKey.load(state_key).sealer("audit")
    return verify_logs(folders, ca_pem, sealer)


def _time(text: str, flag: str) -> float | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidRequest(f"{flag} is a day or a time such as 2026-11-01, got {text[:40]!r}", field=flag) from exc
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _report(report: LogReport) -> dict[str, Any]:
    return {
        "node": report.node,
        "entries": report.n_entries,
        "receipts": report.n_receipts,
        "legs": len(report.legs),
        "signed_seq": report.signed_seq,
        "witnessed_seq": report.witnessed_seq,
        "problems": report.problems,
    }


def _table(reports: list[LogReport]) -> Table:
    table = Table()
    for column in ("node", "entries", "receipts", "legs", "signed up to", "witnessed up to", "problems"):
        table.add_column(column, justify="left" if column == "node" else "right")
    for r in reports:
        numbers = (r.n_entries, r.n_receipts, len(r.legs), r.signed_seq, r.witnessed_seq, len(r.problems))
        table.add_row(r.node.rpartition("/")[2] or str(r.folder), *(f"{n:,}" if n >= 0 else "never" for n in numbers))
    return table


def _row(report: LogReport, seq: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "ended": datetime.fromtimestamp(body["ended_unix_s"], UTC).isoformat(timespec="seconds"),
        "request_id": body["request_id"],
        "tenant": body["tenant"],
        "label": body["label"]["effective"],
        "outcome": body["outcome"],
        "saw_prompt": ", ".join(sorted(body["saw_prompt"])),
        "log": report.node,
        "seq": seq,
    }


def _leg_row(report: LogReport, leg: LoggedLeg) -> dict[str, Any]:
    names = ("request_id", "tenant", "label", "kind", "outcome", "prompt_tokens", "generated_tokens")
    return {
        "ended": datetime.fromtimestamp(leg.unix_s, UTC).isoformat(timespec="seconds"),
        **{name: leg.body.get(name, "") for name in names},
        "log": report.node,
        "seq": leg.seq,
    }


def _show_rows(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*(rows[0] if rows else ("nothing found",)))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def _show_answer(answer: StayedAt, site: str, *, as_json: bool) -> None:
    if as_json:
        left = [{"log": log, "seq": seq, "request_id": r, "nodes": nodes} for log, seq, r, nodes in answer.left]
        print(
            json.dumps(
                {
                    "proven": answer.proven,
                    "requests": answer.n_requests,
                    "left": left,
                    "unvouched": list(answer.unvouched),
                },
                indent=2,
            )
        )
        return
    console = Console()
    console.print(f"{answer.n_requests:,} requests, {len(answer.left):,} of them were seen outside {site}")
    for log, seq, request_id, nodes in answer.left:
        console.print(f"  {request_id}: also at {', '.join(nodes)} (entry {seq} of {log})", highlight=False)
    for reason in answer.unvouched:
        console.print(f"  not vouched for: {reason}", highlight=False)
    console.print("proven" if answer.proven else "not proven", style="green" if answer.proven else "red")
