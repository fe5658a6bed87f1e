"""`kvmesh policy simulate`: what a policy would change, before it is applied.

From receipts: recorded decisions are taken again under both policies (placement.sim.replay), over the nodes of the mesh
that is connected to. From a trace: it is simulated under both over a modelled mesh. Neither sees a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mesh.audit.query import Filter, select
from mesh.audit.verify import verify_logs
from mesh.cli.client_connection import Connection, connected
from mesh.cli.client_output import print_json
from mesh.cli.groups import group
from mesh.errors import InvalidRequest, NotFound
from placement.entry.mesh_view import NodeFacts, from_wire
from placement.policy.book import BUILTIN_YAML
from placement.policy.model import Policy, parse_policy
from placement.sim.flight import Outcome, Record
from placement.sim.mesh import make_mesh, mesh_spec
from placement.sim.own_router import OwnSpec
from placement.sim.replay import Comparison, Recorded, compare
from placement.sim.results import summarise
from placement.sim.scenario import OWN, Scenario
from placement.sim.simulation import simulate
from placement.sim.slo import SLO, Slo
from placement.sim.traces import TraceRequest, mean_rate, read_trace, scaled

_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    group(app, "policy").command("simulate")(connected(admin=True)(policy_simulate))


def policy_simulate(
    connection: Connection,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy to try, YAML.")],
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Whose policy it would replace, and whose receipts.")],
    receipts: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="Audit log to take decisions from; repeatable.")
    ] = None,
    ca: Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="The mesh's ca_cert.pem.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The policy to compare with; absent: the tenant's current one.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Simulate this trace over a modelled mesh instead.")
    ] = None,
    mesh: Annotated[str, typer.Option(metavar="NAME", help="The modelled mesh of a trace.")] = "regional",
    rate: Annotated[float, typer.Option(metavar="N", help="Requests/s of a trace; 0: as it is.", min=0.0)] = 0.0,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of a trace, at most.", min=1)] = 2000,
    label: Annotated[list[str] | None, typer.Option(help="Labels of a trace's sessions, in turn; repeatable.")] = None,
    ttft: Annotated[float, typer.Option(metavar="S", help="SLO: TTFT, beside its share for each prompt token.")] = 1.0,
    tpot: Annotated[float, typer.Option(metavar="S", help="SLO: time per output token.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every request newly refused.")] = False,
) -> None:
    """What a policy would change: where requests go, how many are in time, cost, and which would newly be refused."""
    if bool(trace) == bool(receipts):
        raise InvalidRequest("give --receipts FOLDER (with --ca), or --trace FILE: one of them", field="receipts")
    slo = replace(SLO, ttft_s=ttft, tpot_s=tpot)
    new = parse_policy(_read(file), version=0)
    old = parse_policy(_read(against) if against else _current(connection, tenant), version=0)
    if trace:
        requests_of = labelled(read_trace(trace, limit=requests), label or [old.default_label])
        requests_of = scaled(requests_of, rate or mean_rate(requests_of))
        report = simulate_both(requests_of, mesh, old, new, slo)
    else:
        if ca is None:
            raise InvalidRequest("--ca is missing: receipts are verified before they are believed", field="ca")
        recorded = [
            Recorded.of(receipt)
            for _, _, receipt in select(verify_logs(receipts or [], _bytes(ca)), Filter(tenant=tenant))
        ]
        report = report_of(compare(recorded, _nodes(connection), old, new, slo=slo), slo)
    if as_json:
        print_json(report.as_dict())
    else:
        show(report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is shown. `refused`: (request, label, why) of each that is newly refused."""

    n_requests: int
    placed: tuple[Counter[str], Counter[str]]
    slo_ratio: tuple[float, float]
    price_s: tuple[float, float]
    moved: int
    refused: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "requests": self.n_requests,
            "placed": {"before": dict(self.placed[0]), "after": dict(self.placed[1])},
            "within_slo_ratio": {"before": self.slo_ratio[0], "after": self.slo_ratio[1]},
            "price": {"before": self.price_s[0], "after": self.price_s[1]},
            "moved": self.moved,
            "newly_refused": [{"request_id": r, "label": label, "why": why} for r, label, why in self.refused],
            "notes": list(self.notes),
        }


def report_of(comparison: Comparison, slo: Slo) -> Report:
    """Of recorded decisions."""
    return Report(
        n_requests=len(comparison.changes),
        placed=(comparison.placed(after=False), comparison.placed(after=True)),
        slo_ratio=(comparison.slo_ratio(slo, after=False), comparison.slo_ratio(slo, after=True)),
        price_s=(comparison.price_s(after=False), comparison.price_s(after=True)),
        moved=sum(change.moved for change in comparison.changes),
        refused=tuple(
            (c.recorded.request_id, c.after.label or c.recorded.label, c.after.refusal)
            for c in comparison.changes
            if c.newly_refused
        ),
        notes=("predicted on the mesh as it is now", *comparison.notes),
    )


def labelled(trace: Sequence[TraceRequest], labels: Sequence[str]) -> list[TraceRequest]:
    """Sessions get these labels in turn."""
    turns: dict[int, str] = {}
    return [replace(r, label=turns.setdefault(r.session, labels[len(turns) % len(labels)])) for r in trace]


def simulate_both(trace: Sequence[TraceRequest], mesh: str, old: Policy, new: Policy, slo: Slo) -> Report:
    """A trace over a modelled mesh under both policies."""
    made = make_mesh(mesh_spec(mesh))
    for policy in (old, new):
        for label in {r.label for r in trace}:
            policy.check_label(label)

    def records(policy: Policy) -> list[Record]:
        own = OwnSpec(policy=policy, slo=slo)
        return simulate(Scenario(mesh=made, trace=trace, router=OWN, own=own, slo=slo))

    def placed(found: Sequence[Record]) -> Counter[str]:
        return Counter(r.outcome.value if not r.node_id else f"{r.shape} {r.node_id}" for r in found)

    tiers = {spec.place.node_id: spec.place.tier.value for spec in made.nodes}

    def price_s(policy: Policy, found: Sequence[Record]) -> float:
        prices = policy.prices
        prefill = {"core": prices.core_prefill_per_s, "edge": prices.edge_prefill_per_s}
        decode = {"core": prices.core_decode_per_s, "edge": prices.edge_decode_per_s}
        return sum(
            prefill[tiers[r.node_id]] * r.ttft_s + decode[tiers[r.node_id]] * (r.total_s - r.ttft_s)
            for r in found
            if r.node_id
        )

    before, after = records(old), records(new)
    refused = [
        (str(a.request.index), a.request.label, a.reason)
        for b, a in zip(before, after, strict=True)
        if a.outcome is Outcome.REFUSED and b.outcome is not Outcome.REFUSED
    ]
    served = [(b, a) for b, a in zip(before, after, strict=True) if b.node_id and a.node_id]
    return Report(
        n_requests=len(trace),
        placed=(placed(before), placed(after)),
        slo_ratio=(summarise(before).goodput_ratio, summarise(after).goodput_ratio),
        price_s=(price_s(old, before), price_s(new, after)),
        moved=sum(b.node_id != a.node_id for b, a in served),
        refused=tuple(refused),
        notes=(f"simulated over the modelled mesh {mesh}: nodes are published GPU profiles",),
    )


def show(report: Report) -> None:
    """For people."""
    console = Console(highlight=False)
    table = Table()
    for column in ("where", "before", "after"):
        table.add_column(column, justify="left" if column == "where" else "right")
    before, after = report.placed
    for where in sorted({*before, *after}, key=lambda w: -max(before[w], after[w]))[:_SHOWN]:
        table.add_row(where, f"{before[where]:,}", f"{after[where]:,}")
    console.print(table)
    console.print(
        f"{report.n_requests:,} requests: {report.moved:,} go elsewhere, {len(report.refused):,} newly refused"
    )
    console.print(f"within the SLO: {report.slo_ratio[0]:.1%} before, {report.slo_ratio[1]:.1%} after")
    console.print(f"price of engine time: {report.price_s[0]:,.1f} before, {report.price_s[1]:,.1f} after")
    for request_id, label, why in report.refused[:_SHOWN]:
        console.print(f"  refused: {request_id} ({label}): {why}", markup=False)
    if len(report.refused) > _SHOWN:
        console.print(f"  and {len(report.refused) - _SHOWN:,} more; --json lists all")
    for note in report.notes:
        console.print(f"note: {note}", markup=False)


def _nodes(connection: Connection) -> tuple[NodeFacts, ...]:
    with connection.open() as mesh:
        return from_wire(mesh.snapshot(), mesh="mesh")


def _current(connection: Connection, tenant: str) -> str:
    with connection.open() as mesh:
        try:
            return str(mesh.get_policy(tenant).yaml)
        except NotFound:
            return BUILTIN_YAML


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"cannot read {file}: {exc}", field="file") from exc


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise InvalidRequest(f"cannot read {file}: {exc.strerror}", field="ca") from exc
