"""`kvmesh sites`, `kvmesh site show` and `kvmesh top`: the mesh as its operators see it. Needs the role operator."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from mesh.cli.client_connection import Connection, connected
from mesh.cli.client_output import message_json, print_json
from mesh.cli.groups import group
from mesh.cli.mesh_facts import find_site, sites_of
from mesh.cli.mesh_tables import site_view, sites_table, top_view
from mesh.client_sync import SyncMeshClient
from mesh.v1 import admin_pb2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_out = Console(highlight=False, markup=False)
_FREE_LINES = 16  # of a screen, beside its requests and one line for each node and site


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    app.command("sites")(connected(admin=True)(sites))
    group(app, "site").command("show")(connected(admin=True)(site_show))
    app.command("top")(connected(admin=True)(top))


def sites(connection: Connection, as_json: AsJson = False) -> None:
    """Sites of the mesh: state, load, share of KV in use, speeds in tokens/s, requests."""
    with connection.open() as mesh:
        snapshot, running = mesh.snapshot(), mesh.list_requests()
    found = sites_of(snapshot, running.requests)
    if as_json:
        print_json([site.to_json() for site in found])
        return
    _out.print(sites_table(found))


def site_show(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="SITE", help="A site of the mesh.")],
    as_json: AsJson = False,
) -> None:
    """One site: its nodes, models, links, and the requests that entered or compute there."""
    with connection.open() as mesh:
        snapshot, running = mesh.snapshot(), mesh.list_requests()
    nodes = find_site(snapshot, name)
    (facts,) = [site for site in sites_of(snapshot, running.requests) if site.site == name]
    if as_json:
        ids = {node.node_id for node in nodes}
        requests = [r for r in running.requests if r.entry_node_id in ids or r.node_id in ids]
        print_json({**facts.to_json(), "node_views": _all(nodes), "requests": _all(requests)})
        return
    _out.print(site_view(facts, nodes, running.requests))


def top(
    connection: Connection,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look, for programs.")] = False,
) -> None:
    """Watch the mesh: sites, nodes, links, queues, speeds, and running requests with where their KV is. Ctrl-C ends."""
    with connection.open() as mesh:
        try:
            if as_json or once or not sys.stdout.isatty():
                _print_looks(mesh, every_s, as_json=as_json, once=once)
            else:
                _watch(mesh, every_s)
        except KeyboardInterrupt:
            return


def _print_looks(mesh: SyncMeshClient, every_s: float, *, as_json: bool, once: bool) -> None:
    while True:
        snapshot, running = mesh.snapshot(), mesh.list_requests()
        if as_json:
            print_json(look_json(snapshot, running))
        else:
            _out.print(top_view(snapshot, running, most_requests=len(running.requests)))
        if once:
            return
        sys.stdout.flush()
        time.sleep(every_s)


def _watch(mesh: SyncMeshClient, every_s: float) -> None:
    with Live(console=_out, screen=True, auto_refresh=False) as live:
        while True:
            snapshot, running = mesh.snapshot(), mesh.list_requests()
            rows = _out.height - _FREE_LINES - 2 * len(snapshot.nodes) - len({node.site for node in snapshot.nodes})
            live.update(top_view(snapshot, running, most_requests=max(3, rows)), refresh=True)
            time.sleep(every_s)


def look_json(snapshot: admin_pb2.Snapshot, running: admin_pb2.ListRequestsResponse) -> dict[str, Any]:
    """What `kvmesh top --json` prints for one look."""
    return {
        "made_unix_s": snapshot.made_unix_s,
        "registry_age_s": snapshot.registry_age_s,
        "sites": [site.to_json() for site in sites_of(snapshot, running.requests)],
        "nodes": _all(snapshot.nodes),
        "requests": _all(running.requests),
        "silent_entry_node_ids": list(running.silent_entry_node_ids),
    }


def _all(messages: Any) -> list[Any]:
    return [message_json(message) for message in messages]
