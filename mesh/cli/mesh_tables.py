"""Tables of sites, nodes' links and running requests, for terminals of 80 columns and more. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh.cli.client_output import model_lines, nodes_table, size_words
from mesh.cli.mesh_facts import SiteFacts, sites_of
from mesh.v1 import admin_pb2

_STYLES = {"ready": "green", "disconnected": "red"}
_OLD_AFTER_S = 10.0
_LONG_AGO_S = 1e6  # what a node that was never heard tells as its age


def sites_table(sites: Iterable[SiteFacts]) -> Table:
    """One row a site."""
    table = _table("site", "region", "where", "tier", "state", right=("load", "KV", "prefill", "decode", "RTT ms"))
    table.add_column("requests", justify="right")
    for site in sites:
        table.add_row(
            Text(site.site), Text(site.region), Text(site.jurisdiction), "+".join(site.tiers), _state(site.state),
            f"{site.running}+{site.waiting}", _share(site.kv_used_tokens, site.kv_capacity_tokens),
            _number(site.prefill_tokens_per_s, 0), _number(site.decode_tokens_per_s, 1),
            _number((site.rtt_s or 0.0) * 1000, 1), f"{site.requests_entered} in, {site.requests_here} here",
        )  # fmt: skip
    return table


def links_table(nodes: Iterable[admin_pb2.NodeView]) -> Table:
    """One row a node: its link to the viewer as measured, and how old its figures are."""
    table = _table("node", "site", "address", right=("RTT ms", "goodput", "heard"))
    for node in nodes:
        goodput = f"{size_words(int(node.goodput_bytes_per_s))}/s" if node.goodput_bytes_per_s else "-"
        table.add_row(
            Text(node.node_id), Text(node.site), Text(node.address or "dials out"),
            _number(node.rtt_s * 1000, 1), goodput, age_words(node.age_s),
        )  # fmt: skip
    return table


def requests_table(requests: Sequence[admin_pb2.RunningRequest], most: int) -> Table:
    """One row a request, the oldest first; `most` rows."""
    table = _table("request", "tenant", "label", "plan", "entry", "KV at", right=("KV", "tokens", "tok/s", "age"))
    for request in sorted(requests, key=lambda r: -r.age_s)[:most]:
        where = f"{request.node_id or '(waits)'}{' ->' if request.moving else ''}"
        speed = 1.0 / request.token_s if request.token_s else 0.0
        table.add_row(
            Text(_short(request.request_id)), Text(request.tenant), Text(request.label), request.shape,
            Text(request.entry_node_id), Text(where, style="yellow" if request.moving else ""),
            size_words(request.kv_bytes), f"{request.prompt_tokens}+{request.generated_tokens}/{request.max_tokens}",
            _number(speed, 1), age_words(request.age_s),
        )  # fmt: skip
    return table


def top_view(
    snapshot: admin_pb2.Snapshot, running: admin_pb2.ListRequestsResponse, *, most_requests: int
) -> RenderableType:
    """The whole screen of `kvmesh top`."""
    sites = sites_of(snapshot, running.requests)
    ready = sum(site.nodes_ready for site in sites)
    head = Text(
        f"kvmesh · {time.strftime('%H:%M:%S', time.localtime(snapshot.made_unix_s))} · {len(sites)} sites · "
        f"{ready} of {len(snapshot.nodes)} nodes ready · {len(running.requests)} requests run",
        style="bold",
    )
    notes = []
    if snapshot.registry_age_s > _OLD_AFTER_S:
        notes.append(f"the registry was last heard {age_words(snapshot.registry_age_s)} ago: this may be old")
    if running.silent_entry_node_ids:
        notes.append(f"requests of {', '.join(running.silent_entry_node_ids)} are not shown: no answer from there")
    left_out = len(running.requests) - most_requests
    if left_out > 0:
        notes.append(f"{left_out} younger requests are left out")
    parts: list[RenderableType] = [
        head, Text(), sites_table(sites), Text(), nodes_table(snapshot), Text(), links_table(snapshot.nodes), Text(),
    ]  # fmt: skip
    parts.append(requests_table(running.requests, most_requests) if running.requests else Text("no request runs"))
    parts += [Text(note, style="yellow") for note in notes]
    return Group(*parts)


def site_view(
    site: SiteFacts, nodes: Sequence[admin_pb2.NodeView], requests: Sequence[admin_pb2.RunningRequest]
) -> RenderableType:
    """The screen of `kvmesh site show`."""
    ids = {node.node_id for node in nodes}
    here = [r for r in requests if r.entry_node_id in ids or r.node_id in ids]
    own = admin_pb2.Snapshot(nodes=nodes)
    parts: list[RenderableType] = [
        Text.assemble((site.site, "bold"), f" · {site.region} · {site.jurisdiction} · ", _state(site.state)),
        Text(), nodes_table(own), Text(), links_table(nodes), Text(),
        *(Text(f"model {line}") for line in model_lines(own)), Text(),
    ]  # fmt: skip
    parts.append(requests_table(here, len(here)) if here else Text("no request entered or computes here"))
    return Group(*parts)


def age_words(age_s: float) -> str:
    """ "0.4 s", "12 s", "3 min", "5 h", "never"."""
    if age_s >= _LONG_AGO_S:
        return "never"
    if age_s < 10:
        return f"{age_s:.1f} s"
    if age_s < 120:
        return f"{age_s:.0f} s"
    return f"{age_s / 60:.0f} min" if age_s < 7200 else f"{age_s / 3600:.0f} h"


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(*left, box=None, padding=(0, 1, 0, 0))
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state, "yellow"))


def _share(used: int, capacity: int) -> str:
    return f"{used / capacity:.0%}" if capacity else "-"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value else "-"


def _short(request_id: str) -> str:
    """The entry stands in its own column."""
    return request_id.rpartition(":")[2][:12] or request_id[:12]
