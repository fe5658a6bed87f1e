"""`kvmesh policy`: placement policies of tenants, and their history.

The tenant is named in the same way by all: as the argument after the command, but for `apply`, whose argument is the
file.
"""

from __future__ import annotations

import difflib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from mesh.cli.client_connection import Connection, connected
from mesh.cli.client_output import message_json, print_json, simple_table
from mesh.cli.groups import group
from mesh.errors import InvalidRequest, NotFound
from mesh.v1 import admin_pb2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tenant = Annotated[str, typer.Option(metavar="TENANT", help="Tenant.")]
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Tenant.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML policy; - reads standard input.")]
Version = Annotated[int, typer.Argument(metavar="VERSION", min=1, help="A version of `kvmesh policy history`.")]

_out = Console(highlight=False, markup=False)
_notes = Console(stderr=True, highlight=False, markup=False)


def register(app: typer.Typer) -> None:
    """Add them."""
    policy = group(app, "policy")
    policy.command("apply")(connected(admin=True)(policy_apply))
    policy.command("get")(connected(admin=True)(policy_get))
    policy.command("list")(connected(admin=True)(policy_list))
    policy.command("delete")(connected(admin=True)(policy_delete))
    policy.command("validate")(connected(admin=True)(policy_validate))
    policy.command("history")(connected(admin=True)(policy_history))
    policy.command("diff")(connected(admin=True)(policy_diff))
    policy.command("rollback")(connected(admin=True)(policy_rollback))


def policy_apply(
    connection: Connection,
    file: File,
    tenant: Tenant,
    expected_version: Annotated[
        int | None, typer.Option(metavar="N", help="Only if this is the current version.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a policy and make it a tenant's current one."""
    yaml = _read(file)
    with connection.open() as mesh:
        _refuse_problems(file, [message_json(p) for p in mesh.validate_policy(yaml)], as_json)
        _tell(file, mesh.policy_warnings(yaml))
        version = mesh.put_policy(tenant, yaml, expected_version=expected_version)
    if as_json:
        print_json({"tenant": tenant, "version": version})
        return
    _out.print(f"policy of {tenant} is now version {version}")


def policy_get(connection: Connection, tenant: TenantName, as_json: AsJson = False) -> None:
    """Print a tenant's policy."""
    with connection.open() as mesh:
        policy = mesh.get_policy(tenant)
    if as_json:
        print_json(message_json(policy))
        return
    _notes.print(f"# {policy.tenant}, version {policy.version}", style="dim")
    sys.stdout.write(policy.yaml)


def policy_list(connection: Connection, as_json: AsJson = False) -> None:
    """Tenants that have a policy, and its version."""
    with connection.open() as mesh:
        policies = mesh.list_policies()
    if as_json:
        print_json([message_json(p) for p in policies])
        return
    _out.print(simple_table(("tenant", "version"), [(p.tenant, str(p.version)) for p in policies]))


def policy_delete(connection: Connection, tenant: TenantName, as_json: AsJson = False) -> None:
    """Remove a tenant's policy; the built-in one applies then."""
    with connection.open() as mesh:
        mesh.delete_policy(tenant)
    if as_json:
        print_json({"tenant": tenant, "deleted": True})
        return
    _out.print(f"policy of {tenant} removed: the built-in one applies")


def policy_validate(connection: Connection, file: File, as_json: AsJson = False) -> None:
    """Check a policy without storing it; exits 1 if something is wrong."""
    with connection.open() as mesh:
        yaml = _read(file)
        problems = [message_json(p) for p in mesh.validate_policy(yaml)]
        warnings = [] if problems else mesh.policy_warnings(yaml)
    _refuse_problems(file, problems, as_json)
    _tell(file, warnings)
    if as_json:
        print_json([])
        return
    _out.print(f"{file}: valid")


def policy_history(connection: Connection, tenant: TenantName, as_json: AsJson = False) -> None:
    """Versions of a tenant's policy, the newest first: when, and which key stored them."""
    with connection.open() as mesh:
        versions = mesh.policy_history(tenant)
    if as_json:
        print_json([message_json(v) for v in versions])
        return
    rows = [(str(v.version), _when(v), v.stored_by, "deleted" if v.deleted else _size(v)) for v in versions]
    _out.print(simple_table(("version", "stored", "by key", "document"), rows))


def policy_diff(
    connection: Connection,
    tenant: TenantName,
    old: Version,
    new: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", min=1, help="What to compare with; absent: the newest.")
    ] = None,
) -> None:
    """What changed between two versions."""
    with connection.open() as mesh:
        versions = mesh.policy_history(tenant)
    before, after = _version(versions, old), _version(versions, new or max((v.version for v in versions), default=0))
    lines = difflib.unified_diff(
        before.yaml.splitlines(), after.yaml.splitlines(), f"version {before.version}", f"version {after.version}",
        lineterm="",
    )  # fmt: skip
    text = "\n".join(lines)
    if not text:
        _notes.print(f"versions {before.version} and {after.version} are the same")
    elif sys.stdout.isatty():
        Console().print(Syntax(text, "diff", background_color="default"))
    else:
        print(text)


def policy_rollback(connection: Connection, tenant: TenantName, version: Version, as_json: AsJson = False) -> None:
    """Make an older version the current one, as a new version; fails if the policy changes meanwhile."""
    with connection.open() as mesh:
        versions = mesh.policy_history(tenant)
        wanted = _version(versions, version)
        if wanted.deleted:
            raise InvalidRequest(
                f"at version {version} the policy was removed; `kvmesh policy delete {tenant}` does that",
                field="version",
            )
        newest = max(v.version for v in versions)
        stored = mesh.put_policy(tenant, wanted.yaml, expected_version=newest)
    if as_json:
        print_json({"tenant": tenant, "version": stored, "as": version})
        return
    _out.print(f"policy of {tenant} is now version {stored}, the same as version {version}")


def _version(versions: list[admin_pb2.StoredPolicy], number: int) -> admin_pb2.StoredPolicy:
    found = next((v for v in versions if v.version == number), None)
    if found is None:
        kept = ", ".join(str(v.version) for v in versions) or "none"
        raise NotFound(f"there is no version {number}; kept are {kept}", field="version")
    return found


def _when(version: admin_pb2.StoredPolicy) -> str:
    if not version.stored_unix_s:
        return "not known"
    return datetime.fromtimestamp(version.stored_unix_s, UTC).isoformat(sep=" ", timespec="seconds")


def _size(version: admin_pb2.StoredPolicy) -> str:
    return f"{len(version.yaml.splitlines())} lines"


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"cannot read {file}: {exc}", field="file") from exc


def _tell(file: Path, warnings: list[admin_pb2.PolicyProblem]) -> None:
    """What is odd, on standard error; nothing is refused for it."""
    for w in warnings:
        _notes.print(f"{file}:{w.line}:{w.column}: {w.path}: {w.message}", style="yellow")


def _refuse_problems(file: Path, problems: list[dict[str, object]], as_json: bool) -> None:
    if not problems:
        return
    if as_json:
        print_json(problems)
    else:
        for p in problems:
            _notes.print(f"{file}:{p['line']}:{p['column']}: {p['path']}: {p['message']}", style="red")
    raise typer.Exit(1)
