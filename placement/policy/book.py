"""All tenants' policies at one moment, and the border guard that asks them.

A book is an immutable value: whoever holds it replaces it as a whole when a policy changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mesh.errors import PolicyDenied, StalePlan
from mesh.identity.place import Place
from mesh.node.port import WorkContext
from placement.policy.model import DataKind, Policy, parse_policy

# For a tenant without a policy of its own. Everything has a home; nothing private travels.
BUILTIN_YAML = """\
version: 1
labels:
  order: [public, internal, confidential, restricted]
  default: internal
rules:
  public: {anywhere: true}
  internal:
    - tiers: [core]
    - sites: [own]
  confidential: {sites: [own]}
  restricted: {sites: [own]}
detectors:
  raise_to: {identifiers: confidential, credentials: confidential}
"""
BUILTIN = parse_policy(BUILTIN_YAML, version=0)


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A tenant's policy and the version of its document; 0 is the built-in policy."""

    policy: Policy
    version: int


_BUILTIN_ENTRY = TenantPolicy(BUILTIN, 0)


@dataclass(frozen=True, slots=True)
class PolicyBook:
    """Tenant -> policy; a tenant that is not in it has the built-in one."""

    tenants: Mapping[str, TenantPolicy] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, documents: Iterable[tuple[str, str, int]]) -> PolicyBook:
        """From (tenant, YAML, version), versions from 1. Raises InvalidRequest if a document is not valid."""
        book = {tenant: TenantPolicy(parse_policy(text, version=v), v) for tenant, text, v in documents}
        return cls(MappingProxyType(book))

    def lookup(self, tenant: str) -> TenantPolicy:
        """The tenant's policy, or the built-in one."""
        return self.tenants.get(tenant, _BUILTIN_ENTRY)

    def with_policy(self, tenant: str, text: str, version: int) -> PolicyBook:
        """A book with this document of the tenant. Raises InvalidRequest if it is not valid."""
        entry = TenantPolicy(parse_policy(text, version=version), version)
        return PolicyBook(MappingProxyType({**self.tenants, tenant: entry}))

    def without(self, tenant: str) -> PolicyBook:
        """A book in which the tenant has the built-in policy."""
        return PolicyBook(MappingProxyType({t: p for t, p in self.tenants.items() if t != tenant}))


class BookGuard:
    """mesh.node.port.BorderGuard over a book that may change: judges by the policy that this node has now.

    `own` is the site that the work's context names as its entry's; the node listener takes contexts from members of
    the mesh only. Fails closed: a label that the policy does not know, and a tenant's policy that the entry applied
    but this node does not have, are refused. A refusal by another version than the entry planned with is StalePlan:
    one of the two has not heard the news yet, so it is no verdict, and trying again or elsewhere may help.
    """

    def __init__(self, book: Callable[[], PolicyBook]) -> None:
        self._book = book

    def check_prompt(self, context: WorkContext, place: Place) -> None:
        """Raise PolicyDenied or StalePlan (both with `rule`) unless a prompt of this tenant and label may be at
        `place`."""
        self._check(context, place, DataKind.PROMPT)

    def check_kv(self, context: WorkContext, place: Place) -> None:
        """Raise PolicyDenied or StalePlan (both with `rule`) unless KV of this tenant and label may be at `place`."""
        self._check(context, place, DataKind.KV)

    def check_relay(self, context: WorkContext) -> None:
        """Raise PolicyDenied or StalePlan unless the tenant's policy lets sealed data pass a relay."""
        found = self._book().lookup(context.tenant)
        if context.policy_version > 0 and found.version == 0:
            message = f"policy version {context.policy_version} of tenant {context.tenant} is not known here yet"
            raise StalePlan(message, rule="unknown-policy")
        found.policy.check_relay()

    def _check(self, context: WorkContext, place: Place, kind: DataKind) -> None:
        found = self._book().lookup(context.tenant)
        if context.policy_version > 0 and found.version == 0:
            message = f"policy version {context.policy_version} of tenant {context.tenant} is not known here yet"
            raise StalePlan(message, rule="unknown-policy", node=place.node_id)
        check = found.policy.check_prompt if kind is DataKind.PROMPT else found.policy.check_kv
        try:
            check(context.label, place, entry_site=context.entry_site)
        except PolicyDenied as error:
            if found.version == context.policy_version:
                raise
            versions = f"the plan is of policy version {context.policy_version}, this node has {found.version}"
            raise StalePlan(f"{error.message}; {versions}", **error.details) from error
