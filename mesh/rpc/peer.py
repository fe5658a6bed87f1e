"""Who is calling the node listener: the place in the peer's certificate, which the handshake has verified."""

from __future__ import annotations

from collections.abc import Collection

import grpc.aio
from cryptography import x509

from mesh.errors import InvalidRequest, PolicyDenied, Unauthenticated
from mesh.identity.certificates import load_certificate
from mesh.identity.place import Place, Role


def peer_place(context: grpc.aio.ServicerContext, *, mesh: str | None = None) -> Place:
    """The caller's place. Raises Unauthenticated on a connection without client certificate, or whose
    certificate does not name exactly one place (of `mesh`, if given)."""
    # grpc lists URI SANs apart from DNS names, so a DNS name that looks like a place is none.
    uris = context.auth_context().get("peer_uri") or ()
    if len(uris) != 1:
        raise Unauthenticated("the caller showed no node certificate; node RPCs need mutual TLS")
    try:
        place = Place.from_uri(bytes(next(iter(uris))).decode())
    except (InvalidRequest, UnicodeDecodeError) as error:
        raise Unauthenticated("the caller's certificate does not name a place of a mesh") from error
    if mesh is not None and place.mesh != mesh:
        raise Unauthenticated(f"the caller's certificate is of mesh {place.mesh!r}, not {mesh!r}")
    return place


def peer_certificate(context: grpc.aio.ServicerContext) -> x509.Certificate:
    """The caller's certificate, which the handshake has verified. Raises Unauthenticated where there is none."""
    shown = context.auth_context().get("x509_pem_cert") or ()
    if len(shown) != 1:
        raise Unauthenticated("the caller showed no node certificate; node RPCs need mutual TLS")
    try:
        return load_certificate(bytes(next(iter(shown))), "the caller's certificate")
    except InvalidRequest as error:
        raise Unauthenticated(error.message) from error


def require_role(place: Place, roles: Collection[Role], what: str) -> None:
    """Raises PolicyDenied (rule "node_role") unless the node has one of the roles."""
    if place.role not in roles:
        raise PolicyDenied(
            f"{what} is for {' or '.join(sorted(role.value for role in roles))} nodes; "
            f"{place.node_id} is of role {place.role.value}",
            rule="node_role",
            node=place.node_id,
        )
