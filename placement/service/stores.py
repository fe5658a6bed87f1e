"""Policies and tenants as the registry keeps them, and this process's current view of both.

Keys: `policies/TENANT` holds {"version", "yaml", "stored_unix_s", "stored_by"} (yaml null: deleted, so that versions
never repeat), `policy_history/TENANT/VERSION` what was replaced, `tenants` the whole TenantDirectory. Every change is
a compare-and-set; the view follows the registry by watch, so that several placement services agree, and is checked
whole before it is used.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mesh.errors import MeshError, NotFound, PayloadCorrupt, RevisionMismatch
from mesh.identity.tenants import TenantDirectory
from mesh.process import background_loop
from mesh.registry.types import Registry, Value
from mesh.telemetry.log import get_logger
from placement.policy.book import PolicyBook
from placement.policy.model import parse_policy

log = get_logger(__name__)
POLICY_PREFIX = "policies/"  # also what the registry lets core nodes read
HISTORY_PREFIX = "policy_history/"
KEPT_VERSIONS = 100
EPOCH_BYTES = 8
TENANTS_KEY = "tenants"
_CAS_ATTEMPTS = 8
OnChange = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPolicy:
    """One tenant's policy document; `yaml` None: deleted at this version."""

    tenant: str
    yaml: str | None
    version: int
    stored_unix_s: float = 0.0
    stored_by: str = ""

    def to_json(self) -> bytes:
        body: dict[str, object] = {"version": self.version, "yaml": self.yaml}
        body |= {"stored_unix_s": self.stored_unix_s, "stored_by": self.stored_by}
        return json.dumps(body, sort_keys=True).encode()

    @classmethod
    def from_value(cls, value: Value) -> StoredPolicy:
        """Raises PayloadCorrupt."""
        try:
            body = json.loads(value.value)
            yaml, version = body["yaml"], body["version"]
            if not (yaml is None or isinstance(yaml, str)) or not isinstance(version, int) or version < 1:
                raise TypeError("a field has another type")
            at_s, by = float(body.get("stored_unix_s", 0.0)), str(body.get("stored_by", ""))
        except (ValueError, KeyError, TypeError) as exc:
            raise PayloadCorrupt(f"the registry's value {value.key!r} is not a stored policy") from exc
        tenant = value.key.split("/")[1]
        return cls(tenant=tenant, yaml=yaml, version=version, stored_unix_s=at_s, stored_by=by)


class PolicyReader:
    """The policies in force, followed by watch. A document that does not parse keeps the tenant's last good one
    in force and is logged, and so does one that is gone, for a deleted policy leaves its mark: a registry that lost
    its data must not loosen anything. Nodes without any deny (see BookGuard)."""

    def __init__(self, registry: Registry, on_change: OnChange) -> None:
        self._registry = registry
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._using = asyncio.Lock()
        self.book = PolicyBook()
        self.stored: tuple[StoredPolicy, ...] = ()

    async def start(self) -> None:
        """Read once (raises NodeUnreachable), then follow."""
        await self._read()
        self._task = background_loop(self._follow, "policies")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for values in self._registry.watch_values(POLICY_PREFIX):
            waits = self._using.locked()
            async with self._using:
                # Whoever was in turn may have read something newer than what the watch told.
                await self._use(await self._registry.list_values(POLICY_PREFIX) if waits else values)

    async def _read(self) -> None:
        """Take in what the registry has now."""
        async with self._using:
            await self._use(await self._registry.list_values(POLICY_PREFIX))

    async def _use(self, values: tuple[Value, ...]) -> None:
        entries = {entry.tenant: entry for entry in self.stored}
        lost = entries.keys() - {value.key.removeprefix(POLICY_PREFIX) for value in values}
        if lost:
            log.error("policies_lost_by_the_registry", count=len(lost))
        book = self.book
        for value in values:
            tenant = value.key.removeprefix(POLICY_PREFIX)
            try:
                entry = StoredPolicy.from_value(value)
                if entry.yaml is None:
                    book = book.without(tenant)
                elif entry != entries.get(tenant):
                    # Off the event loop: a large document takes long.
                    book = await asyncio.to_thread(book.with_policy, tenant, entry.yaml, entry.version)
                entries[tenant] = entry
            except MeshError as error:
                log.error("policy_unusable", tenant=tenant, reason=error.reason)
        stored = tuple(entries[tenant] for tenant in sorted(entries))
        changed = stored != self.stored
        self.stored, self.book = stored, book
        if changed:
            self._on_change()


class PolicyStore(PolicyReader):
    """Reads and changes policies."""

    async def put(self, tenant: str, yaml: str, expected_version: int | None, *, by: str = "") -> int:
        """Check and store a document; returns its version. `by`: id of the key that does it. Raises InvalidRequest
        (with line and column), RevisionMismatch."""
        await asyncio.to_thread(parse_policy, yaml, version=1)  # a large one takes a second
        return await self._write(tenant, yaml, expected_version, by)

    async def delete(self, tenant: str, *, by: str = "") -> None:
        """The tenant has the built-in policy from now on. Raises NotFound."""
        self.get(tenant)
        await self._write(tenant, None, None, by)

    async def history(self, tenant: str) -> tuple[StoredPolicy, ...]:
        """Versions that are kept, the newest first. Raises PayloadCorrupt."""
        values = await self._registry.list_values(f"{HISTORY_PREFIX}{tenant}/")
        now = await self._registry.get(POLICY_PREFIX + tenant)
        found = {s.version: s for s in map(StoredPolicy.from_value, (*values, *([now] if now else ())))}
        return tuple(found[version] for version in sorted(found, reverse=True))

    def get(self, tenant: str) -> StoredPolicy:
        """Raises NotFound."""
        found = next((s for s in self.stored if s.tenant == tenant and s.yaml is not None), None)
        if found is None:
            raise NotFound(
                f"tenant {tenant[:100]!r} has no policy of its own; the built-in one applies", field="tenant"
            )
        return found

    async def _write(self, tenant: str, yaml: str | None, expected_version: int | None, by: str) -> int:
        key = POLICY_PREFIX + tenant
        for _ in range(_CAS_ATTEMPTS):
            value = await self._registry.get(key)
            now = self._version_of(tenant, value)
            if expected_version is not None and expected_version != now:
                raise RevisionMismatch(f"the policy of {tenant} is at version {now}, not {expected_version}")
            entry = StoredPolicy(tenant=tenant, yaml=yaml, version=now + 1, stored_unix_s=time.time(), stored_by=by)
            if value is not None:
                await self._archive(tenant, now, value)
            try:
                await self._registry.put(key, entry.to_json(), expected_version=0 if value is None else value.version)
            except RevisionMismatch:
                continue  # another placement service was faster: look again
            await self._read()
            return entry.version
        raise RevisionMismatch(f"the policy of {tenant} keeps changing under us: try again")

    async def _archive(self, tenant: str, version: int, value: Value) -> None:
        """Keep what is about to be replaced. Before it is: so nothing is lost if this process dies in between, and
        doing it twice changes nothing."""
        await self._registry.put(_history_key(tenant, version), value.value, expected_version=None)
        if version > KEPT_VERSIONS:
            await self._registry.delete(_history_key(tenant, version - KEPT_VERSIONS))

    def _version_of(self, tenant: str, value: Value | None) -> int:
        """The tenant's newest version; of a value that is lost or damaged the last that was seen here."""
        seen = next((s.version for s in self.stored if s.tenant == tenant), 0)
        if value is None:
            return seen
        try:
            return StoredPolicy.from_value(value).version
        except PayloadCorrupt:
            return seen


def _history_key(tenant: str, version: int) -> str:
    return f"{HISTORY_PREFIX}{tenant}/{version:012d}"


class TenantStore:
    """The tenant directory, followed by watch and changed by compare-and-set."""

    def __init__(self, registry: Registry, on_change: OnChange) -> None:
        self._registry = registry
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self.directory = TenantDirectory()

    async def start(self) -> None:
        """Read once (raises NodeUnreachable, PayloadCorrupt), then follow."""
        self._use(await self._registry.get(TENANTS_KEY))
        self._task = background_loop(self._follow, "tenants")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def change(self, edit: Callable[[TenantDirectory], TenantDirectory]) -> None:
        """Apply `edit` to the stored directory; it may be called again if somebody else was faster. Raises what
        it raises."""
        for _ in range(_CAS_ATTEMPTS):
            value = await self._registry.get(TENANTS_KEY)
            before = TenantDirectory() if value is None else TenantDirectory.from_json(value.value)
            after = replace(
                edit(before), revision=before.revision + 1, epoch=before.epoch or secrets.token_hex(EPOCH_BYTES)
            )
            try:
                await self._registry.put(
                    TENANTS_KEY, after.to_json(), expected_version=0 if value is None else value.version
                )
            except RevisionMismatch:
                continue
            self._use(await self._registry.get(TENANTS_KEY))
            return
        raise RevisionMismatch("the tenant directory keeps changing under us: try again")

    async def _follow(self) -> None:
        async for values in self._registry.watch_values(TENANTS_KEY):
            value = next((v for v in values if v.key == TENANTS_KEY), None)
            try:
                self._use(value)
            except PayloadCorrupt as error:  # the last good one stays in force
                log.error("tenant_directory_unusable", reason=error.reason)

    def _use(self, value: Value | None) -> None:
        if value is None:
            return
        directory = TenantDirectory.from_json(value.value)
        if directory != self.directory:
            self.directory = directory
            self._on_change()
