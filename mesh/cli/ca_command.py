"""`kvmesh ca`: the mesh's own certificate authority, for nodes that run on machines of their own.

`kvmesh up` does this by itself for a local mesh. The authority's folder is the mesh's root of trust: keep it off
the nodes. What a node needs is the folder that `issue` writes.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mesh.errors import InvalidRequest
from mesh.identity.ca import NODE_LIFETIME, CertificateAuthority, NodeCredentials
from mesh.identity.place import Place, Role, Tier

Folder = Annotated[Path, typer.Option("--ca", metavar="DIR", help="Folder of the authority, mode 0700.")]
Mesh = Annotated[str, typer.Option("--mesh", help="Name of the mesh.")]
_DEFAULT_FOLDER = Path(".kvmesh/ca")


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    ca = typer.Typer(no_args_is_help=True, help="The mesh's certificate authority and its nodes' certificates.")
    app.add_typer(ca, name="ca")

    @ca.command("init")
    def init(mesh: Mesh, ca: Folder = _DEFAULT_FOLDER) -> None:
        """Make an authority (or say that it is there)."""
        CertificateAuthority.create_or_load(ca, mesh)
        Console(stderr=True).print(f"authority of mesh {mesh} in {ca}", highlight=False)

    @ca.command("issue")
    def issue(
        mesh: Mesh,
        role: Annotated[str, typer.Option(help="placement, core or edge.")],
        node_id: Annotated[str, typer.Option(help="Unique in the mesh.")],
        site: Annotated[str, typer.Option(help="Site, e.g. paris.")],
        region: Annotated[str, typer.Option(help="Region, e.g. eu-west.")],
        jurisdiction: Annotated[str, typer.Option(help="Jurisdiction, e.g. FR.")],
        out: Annotated[Path, typer.Option(metavar="DIR", help="The node's identity folder; must be new.")],
        ca: Folder = _DEFAULT_FOLDER,
        dns: Annotated[list[str] | None, typer.Option(help="Host name of its public listener; may repeat.")] = None,
        ip: Annotated[list[str] | None, typer.Option(help="Address of its public listener; may repeat.")] = None,
        days: Annotated[int, typer.Option(min=1, max=3650, help="Lifetime.")] = NODE_LIFETIME.days,
    ) -> None:
        """Issue a node's key and certificate; its place is in the certificate and nowhere else."""
        credentials = issue_credentials(
            CertificateAuthority.create_or_load(ca, mesh),
            _place(mesh, role, node_id, site, region, jurisdiction),
            dns_names=dns or [],
            ip_addresses=ip or [],
            lifetime=timedelta(days=days),
            out=out,
        )
        Console(stderr=True).print(
            f"{out}: {credentials.place.uri}, valid until {credentials.not_after:%Y-%m-%d}",
            highlight=False,
            soft_wrap=True,
        )


def issue_credentials(
    authority: CertificateAuthority,
    place: Place,
    *,
    dns_names: list[str],
    ip_addresses: list[str],
    lifetime: timedelta,
    out: Path,
) -> NodeCredentials:
    """Issue and save. Raises InvalidRequest if the folder is in use: a node's key is never written over."""
    if out.exists() and any(out.iterdir()):
        raise InvalidRequest(f"{out} is not empty; choose a new folder, or remove it first", field="out")
    credentials = authority.issue(place, dns_names=dns_names, ip_addresses=ip_addresses, lifetime=lifetime)
    credentials.save(out)
    return credentials


def _place(mesh: str, role: str, node_id: str, site: str, region: str, jurisdiction: str) -> Place:
    try:
        known = Role(role)
    except ValueError:
        raise InvalidRequest(f"role is placement, core or edge, got {role[:40]!r}", field="role") from None
    return Place(
        mesh=mesh,
        role=known,
        tier=Tier.EDGE if known is Role.EDGE else Tier.CORE,
        site=site,
        region=region,
        jurisdiction=jurisdiction,
        node_id=node_id,
    )
