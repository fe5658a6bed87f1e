"""`kvmesh site`: sites of the mesh, the tokens that boxes join with, and the end of a site."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from mesh.cli.client_connection import Connection, connected
from mesh.cli.client_output import message_json, print_json, simple_table
from mesh.cli.groups import group
from mesh.errors import InvalidRequest
from mesh.rpc.enrol import MOST_SKEW_S, skew_words
from mesh.v1 import enrolment_pb2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SiteName = Annotated[str, typer.Argument(metavar="SITE", help="Name of the site.")]
NodeId = Annotated[
    str, typer.Option("--node-id", metavar="ID", help="Node id of the box; default: edge-SITE.", show_default=False)
]
ValidHours = Annotated[float, typer.Option(metavar="HOURS", help="The token may be used for this long, up to 168.")]
Dns = Annotated[list[str] | None, typer.Option("--dns", help="Host name of the box's own public listener; may repeat.")]
Ip = Annotated[list[str] | None, typer.Option("--ip", help="Address of the box's own public listener; may repeat.")]

_out = Console(highlight=False, markup=False, soft_wrap=True)
_notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`; called by the client's."""
    site = group(app, "site")
    site.command("create")(connected(admin=True)(create))
    site.command("token")(connected(admin=True)(token))
    site.command("list")(connected(admin=True)(list_sites))
    site.command("revoke")(connected(admin=True)(revoke))


def create(
    connection: Connection,
    name: SiteName,
    region: Annotated[str, typer.Option(help="Region, e.g. eu-west.")],
    jurisdiction: Annotated[str, typer.Option(help="Jurisdiction, e.g. FR.")],
    node_id: NodeId = "",
    valid_hours: ValidHours = 24.0,
    dns: Dns = None,
    ip: Ip = None,
    as_json: AsJson = False,
) -> None:
    """Add a site and print a token, good once, for its first box."""
    with connection.open() as mesh:
        made = mesh.create_site(name, region, jurisdiction, _terms(node_id, valid_hours, dns, ip))
    _show(made, connection, as_json)


def token(
    connection: Connection,
    name: SiteName,
    node_id: NodeId = "",
    valid_hours: ValidHours = 24.0,
    dns: Dns = None,
    ip: Ip = None,
    as_json: AsJson = False,
) -> None:
    """Print a token for one more box of a site, or for a box that takes another's place (same node id)."""
    with connection.open() as mesh:
        made = mesh.site_token(name, _terms(node_id, valid_hours, dns, ip))
    _show(made, connection, as_json)


def list_sites(connection: Connection, as_json: AsJson = False) -> None:
    """Sites that were created, their boxes, and which are attached now."""
    with connection.open() as mesh:
        sites = mesh.list_sites()
    if as_json:
        print_json([message_json(site) for site in sites])
        return
    rows = []
    for site in sites:
        place = [site.site, site.region, site.jurisdiction]
        state = f"revoked {_day(site.revoked_unix_s)}" if site.revoked_unix_s else f"{site.open_tokens} open tokens"
        rows += [[*place, "", state, "", ""]] if not site.boxes else []
        for box in site.boxes:
            now = state if site.revoked_unix_s else ("attached" if box.attached else "not attached")
            skew = skew_words(box.clock_skew_s) if abs(box.clock_skew_s) > MOST_SKEW_S else ""
            rows.append([*place, box.node_id, now, f"until {_day(box.not_after_unix_s)}", skew])
    _out.print(simple_table(["site", "region", "jurisdiction", "box", "state", "certificate", "clock"], rows))


def revoke(
    connection: Connection,
    name: SiteName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """End a site: its boxes are cut off now, and never taken back."""
    if not yes:
        typer.confirm(f"Revoke {name}? Its boxes are cut off and have to join anew, as another site", abort=True)
    with connection.open() as mesh:
        cut_off = mesh.revoke_site(name)
    if as_json:
        print_json({"site": name, "cut_off": cut_off})
        return
    words = f"cut off now: {', '.join(cut_off)}" if cut_off else "no box of it was attached"
    _out.print(f"{name} is revoked; {words}. A box that is offline keeps what it has until its policy lease ends")


def _terms(node_id: str, valid_hours: float, dns: list[str] | None, ip: list[str] | None) -> enrolment_pb2.TokenTerms:
    if not 0 < valid_hours <= 168:
        raise InvalidRequest(f"--valid-hours is up to 168, got {valid_hours:g}", field="valid_hours")
    return enrolment_pb2.TokenTerms(
        node_id=node_id, valid_s=valid_hours * 3600, dns_names=dns or [], ip_addresses=ip or []
    )


def _show(made: enrolment_pb2.EnrolmentToken, connection: Connection, as_json: bool) -> None:
    """The token alone on stdout, so that it can be piped."""
    if as_json:
        print_json({**message_json(made), "join_address": connection.address})
        return
    until = datetime.fromtimestamp(made.expires_unix_s, UTC)
    _notes.print(f"token for {made.node_id}, good once and until {until:%Y-%m-%d %H:%M} UTC; on the box:")
    _notes.print(f"  kvmesh edge join --mesh {connection.address} --model MODEL.gguf --token ...", style="dim")
    _out.print(made.token)


def _day(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d}" if unix_s else ""
