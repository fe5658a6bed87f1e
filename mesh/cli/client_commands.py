"""Commands of people who use or run a mesh: chat, generate, explain, models, nodes, move, policy, tenant.

Each has `--json`. Facts go to stderr and answers to stdout, so that an answer can be piped. A MeshError ends the
command (mesh.cli.main prints it); in a chat it ends the answer.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from mesh.cli.client_chat import chat
from mesh.cli.client_connection import Connection, connected
from mesh.cli.client_output import (
    AnswerPrinter,
    event_json,
    explain_tables,
    message_json,
    model_lines,
    nodes_table,
    print_json,
    simple_table,
    size_words,
)
from mesh.cli.node_commands import register as register_node
from mesh.cli.policy_commands import register as register_policy
from mesh.cli.site_commands import register as register_site
from mesh.client_types import Options, Prompt
from mesh.errors import InvalidRequest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PromptText = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.")]
AsChat = Annotated[bool, typer.Option("--chat/--raw", help="As a user's message, or as plain text to go on from.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message (with --chat).")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Model; default: the tenant's.")]
Attribute = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="For the conditions of the tenant's policy; may repeat."),
]
Continues = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="The `continuation` of the decision of the turn before: keeps its label."),
]
Label = Annotated[str | None, typer.Option(metavar="LABEL", help="Privacy label of the prompt.")]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(metavar="X", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(metavar="X", help="Nucleus sampling.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Keep the K best; 0 is off.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of the random numbers.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop string; may be given several times.")]
Shape = Annotated[
    str | None, typer.Option(metavar="SHAPE", help="Only this plan: local, core, split, offload or disaggregated.")
]
OnNode = Annotated[str | None, typer.Option("--node", metavar="NODE", help="Only decode at this node.")]
AtSite = Annotated[str | None, typer.Option("--at-site", metavar="SITE", help="Only decode at this site.")]
Tenant = Annotated[str, typer.Option(metavar="TENANT", help="Tenant.")]
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Tenant.")]
TenantSites = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="SITE", help="Its own entry serves the tenant; may repeat; *: every one."),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML policy; - reads standard input.")]

_out = Console(highlight=False, markup=False)
_notes = Console(stderr=True, highlight=False, markup=False)


def register(app: typer.Typer) -> None:
    """Add all of them."""
    app.command("chat")(connected()(chat_command))
    app.command("generate")(connected()(generate))
    app.command("explain")(connected()(explain))
    app.command("models")(connected()(models))
    app.command("nodes")(connected(admin=True)(nodes))
    app.command("move")(connected(admin=True)(move))
    register_node(app)
    register_policy(app)
    register_site(app)
    key = typer.Typer(no_args_is_help=True, help="API keys.")
    key.command("issue")(connected(admin=True)(key_issue))
    key.command("revoke")(connected(admin=True)(key_revoke))
    tenant = typer.Typer(no_args_is_help=True, help="Tenants and their API keys.")
    tenant.command("create")(connected(admin=True)(tenant_create))
    tenant.command("sites")(connected(admin=True)(tenant_sites))
    tenant.command("list")(connected(admin=True)(tenant_list))
    tenant.add_typer(key, name="key")
    app.add_typer(tenant, name="tenant")


def chat_command(
    connection: Connection,
    system: System = None,
    model: Model = None,
    label: Label = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    shape: Shape = None,
    node: OnNode = None,
    at_site: AtSite = None,
    as_json: AsJson = False,
) -> None:
    """Talk to the mesh. /new starts over, /quit ends. With --json, lines of standard input are the messages."""
    options = _options(
        model=model, label=label, max_tokens=max_tokens, temperature=temperature, seed=seed, shape=shape, node_id=node,
        site=at_site,
    )  # fmt: skip
    chat(connection, system, options, as_json=as_json, out=_out, notes=_notes)


def generate(
    connection: Connection,
    prompt: PromptText,
    as_chat: AsChat = True,
    system: System = None,
    model: Model = None,
    label: Label = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    shape: Shape = None,
    node: OnNode = None,
    at_site: AtSite = None,
    attribute: Attribute = None,
    continues: Continues = None,
    as_json: AsJson = False,
) -> None:
    """Generate once, as a stream. --json prints one event a line, the receipt in the last."""
    options = _options(
        model=model, label=label, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        stop=stop, shape=shape, node_id=node, site=at_site, attributes=_attributes(attribute or []),
        continues=continues,
    )  # fmt: skip
    wanted = _prompt(prompt, as_chat, system)
    printer = AnswerPrinter(_out, _notes, connection.receipt_ca)
    with connection.open() as mesh, closing(mesh.generate(wanted, **options)) as events:
        for event in events:
            if as_json:
                print_json(event_json(event))
            else:
                printer.show(event)


def explain(
    connection: Connection,
    prompt: PromptText,
    as_chat: AsChat = True,
    system: System = None,
    model: Model = None,
    label: Label = None,
    max_tokens: MaxTokens = None,
    shape: Shape = None,
    node: OnNode = None,
    at_site: AtSite = None,
    as_json: AsJson = False,
) -> None:
    """Show where a prompt would run and why, without running it."""
    options = _options(model=model, label=label, max_tokens=max_tokens, shape=shape, node_id=node, site=at_site)
    with connection.open() as mesh:
        response = mesh.explain(_prompt(prompt, as_chat, system), **options)
    if as_json:
        print_json(message_json(response))
        return
    for part in explain_tables(response):
        _out.print(part)


def models(connection: Connection, as_json: AsJson = False) -> None:
    """Models that you may use."""
    with connection.open() as mesh:
        found = mesh.models()
    if as_json:
        print_json([message_json(m) for m in found])
        return
    rows = [(m.id, str(m.max_context_tokens), ", ".join(m.node_ids) or "(no node now)") for m in found]
    _out.print(simple_table(("model", "context tokens", "nodes"), rows))


def nodes(connection: Connection, as_json: AsJson = False) -> None:
    """Nodes of the mesh, their load and measured speeds."""
    with connection.open() as mesh:
        snapshot = mesh.snapshot()
    if as_json:
        print_json(message_json(snapshot))
        return
    _out.print(nodes_table(snapshot))
    for line in model_lines(snapshot):
        _out.print(line)
    if snapshot.registry_age_s > 10:
        _notes.print(
            f"the registry was last heard {snapshot.registry_age_s:.0f} s ago: this may be old", style="yellow"
        )


def move(
    connection: Connection,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Id of a running request.")],
    to: Annotated[str, typer.Option("--to", metavar="NODE", help="To this node.")] = "",
    tier: Annotated[str, typer.Option(metavar="TIER", help="To the best node of this tier: core or edge.")] = "",
    how: Annotated[
        str,
        typer.Option(metavar="HOW", help="precopy, stop_and_copy or replay, instead of what is predicted to be best."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Move a running request; its KV follows and its stream has no gap."""
    with connection.open() as mesh:
        moved = mesh.migrate(request, node_id=to, tier=tier, how=how)
    if as_json:
        print_json(message_json(moved))
        return
    _out.print(
        f"{request} moved from {moved.from_node_id} to {moved.to_node_id}: {moved.kv_tokens} tokens of KV, "
        f"{size_words(moved.kv_wire_bytes)}, a pause of {moved.pause_s * 1000:.0f} ms"
    )


def tenant_create(connection: Connection, tenant: TenantName, at: TenantSites = None, as_json: AsJson = False) -> None:
    """Add a tenant. Without --at the placement services serve it, and no site's own entry."""
    with connection.open() as mesh:
        mesh.create_tenant(tenant, sites=at or ())
    if as_json:
        print_json({"tenant": tenant, "sites": at or []})
        return
    _out.print(f"tenant {tenant} added; `kvmesh tenant key issue {tenant}` gives it a key")
    if not at:
        _notes.print(f"no site serves it: `kvmesh tenant sites {tenant} --at SITE` changes that", style="dim")


def tenant_sites(connection: Connection, tenant: TenantName, at: TenantSites = None, as_json: AsJson = False) -> None:
    """Say which sites serve a tenant; the others get neither its keys nor its secret. Replaces what was said before."""
    with connection.open() as mesh:
        mesh.set_tenant_sites(tenant, at or ())
    if as_json:
        print_json({"tenant": tenant, "sites": at or []})
        return
    where = ", ".join(at) if at else "no site"
    _out.print(f"{tenant} is served at {where}, and by the placement services")


def tenant_list(connection: Connection, as_json: AsJson = False) -> None:
    """Tenants and their keys, without secrets."""
    with connection.open() as mesh:
        tenants = mesh.list_tenants()
    if as_json:
        print_json([message_json(t) for t in tenants])
        return
    at = {t.tenant: " ".join(t.sites) or "-" for t in tenants}
    rows = [
        (t.tenant, at[t.tenant], k.key_id, k.role, "revoked" if k.revoked else "active")
        for t in tenants
        for k in t.keys
    ]
    rows += [(t.tenant, at[t.tenant], "-", "-", "-") for t in tenants if not t.keys]
    _out.print(simple_table(("tenant", "sites", "key", "role", "state"), sorted(rows)))


def key_issue(
    connection: Connection,
    tenant: TenantName,
    role: Annotated[str, typer.Option(metavar="ROLE", help="tenant, operator or admin.")] = "tenant",
    as_json: AsJson = False,
) -> None:
    """Give a tenant a new API key. The key is shown this once: only its hash is kept."""
    with connection.open() as mesh:
        issued = mesh.issue_key(tenant, role=role)
    if as_json:
        print_json(message_json(issued))
        return
    _notes.print(f"key {issued.key_id} for {tenant} ({role}), shown this once:", style="dim")
    _out.print(issued.api_key)


def key_revoke(
    connection: Connection,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Public id of the key.")],
    as_json: AsJson = False,
) -> None:
    """Revoke an API key."""
    with connection.open() as mesh:
        mesh.revoke_key(key_id)
    if as_json:
        print_json({"key_id": key_id, "revoked": True})
        return
    _out.print(f"key {key_id} revoked")


def _attributes(given: list[str]) -> dict[str, str] | None:
    """NAME=VALUE of each; None for none."""
    if wrong := next((text for text in given if "=" not in text), None):
        raise InvalidRequest(f"--attribute is NAME=VALUE, got {wrong[:40]!r}", field="attribute")
    return dict(text.split("=", 1) for text in given) or None


def _options(**values: object) -> Options:
    """The options that were given."""
    return cast(Options, {name: value for name, value in values.items() if value is not None and value != []})


def _prompt(text: str, as_chat: bool, system: str | None) -> Prompt:
    if text == "-":
        text = sys.stdin.read()
    if not as_chat:
        if system is not None:
            raise InvalidRequest("--system needs --chat", field="system")
        return text
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]
