"""API keys on the public listener: who calls, and whether the role suffices for the RPC.

The table fails closed: an RPC that is not in it needs a key of no role that exists. A finer rule (a tenant sees
its own requests only) is the servicer's, by `current_principal()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import MappingProxyType

import grpc.aio

from mesh.errors import PolicyDenied, Unauthenticated
from mesh.identity.principal import AccessRole, Principal
from mesh.identity.tenants import TenantDirectory
from mesh.rpc.around import AroundInterceptor

_TENANT = ("Inference/Generate", "Inference/Tokenize", "Inference/ListModels", "Inference/Abort", "Inference/Explain")
_OPERATOR = ("MeshView/GetSnapshot", "MeshView/WatchSnapshot", "MeshView/SetNodeRole", "MeshView/ListRequests")
_OPEN = ("Enrolment/GetAuthority", "Enrolment/Join")  # a token takes the place of a key
_SITES = ("Sites/Create", "Sites/IssueToken", "Sites/List", "Sites/Revoke")
_ADMIN = (
    *(f"Policies/{rpc}" for rpc in ("Put", "Get", "List", "Delete", "Validate", "History")),
    *(f"Tenants/{rpc}" for rpc in ("Create", "List", "IssueKey", "RevokeKey", "SetSites")),
)

NEEDED_ROLE: Mapping[str, AccessRole | None] = MappingProxyType(
    {
        **{f"/mesh.v1.{rpc}": AccessRole.TENANT for rpc in _TENANT},
        # A tenant may move its own requests; the servicer holds it to that.
        "/mesh.v1.MeshView/Migrate": AccessRole.TENANT,
        **{f"/mesh.v1.{rpc}": AccessRole.OPERATOR for rpc in (*_OPERATOR, *_SITES)},
        **{f"/mesh.v1.{rpc}": AccessRole.ADMIN for rpc in _ADMIN},
        **{f"/mesh.v1.{rpc}": None for rpc in _OPEN},
        "/grpc.health.v1.Health/Check": None,
        "/grpc.health.v1.Health/Watch": None,
        "/grpc.health.v1.Health/List": None,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
    }
)
"""Least role for each RPC of a public listener; None: open to everybody."""

_principal: ContextVar[Principal] = ContextVar("kvmesh_principal")


class Authenticator(AroundInterceptor):
    """Authenticates each call against the directory as it is at that moment, so a revoked key ends at once for
    new calls (a running stream goes on)."""

    def __init__(
        self,
        directory: Callable[[], TenantDirectory],
        needed_role: Mapping[str, AccessRole | None] = NEEDED_ROLE,
    ) -> None:
        self._directory = directory
        self._needed_role = needed_role

    @asynccontextmanager
    async def around(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        if method in self._needed_role and self._needed_role[method] is None:
            yield
            return
        principal = self._directory().authenticate(_authorization(context))
        check_role(principal, method, self._needed_role)
        token = _principal.set(principal)
        try:
            yield
        finally:
            _principal.reset(token)


def check_role(principal: Principal, method: str, needed_role: Mapping[str, AccessRole | None] = NEEDED_ROLE) -> None:
    """Raises PolicyDenied (rule "role") unless the principal's role suffices for the RPC (its full name)."""
    needed = needed_role.get(method)
    if needed is None and method not in needed_role:
        raise PolicyDenied(f"{method} is not served to API keys", rule="role")
    if needed is not None and principal.role < needed:
        raise PolicyDenied(
            f"{method} needs the role {needed.name.lower()}; this key has {principal.role.name.lower()}",
            rule="role",
        )


def current_principal() -> Principal:
    """The caller of the RPC that runs in this task. Raises Unauthenticated outside an authenticated one."""
    try:
        return _principal.get()
    except LookupError as error:
        raise Unauthenticated("this call carries no API key") from error


def _authorization(context: grpc.aio.ServicerContext) -> str | None:
    """The one authorization header; several are as good as none, since a proxy may have seen another one."""
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None
