"""Sites as the registry keeps them, and this process's view of which are nodes of the mesh.

Keys: `sites/NAME` holds a SiteRecord, `revoked_sites/NAME` marks a revoked one for core nodes, which may read no more
than that. Changes are compare-and-set, so a token is used once and a revocation stays; the view follows by watch, so
that a site revoked at one placement service is cut off at all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from mesh.errors import AlreadyExists, PayloadCorrupt, PolicyDenied, RevisionMismatch
from mesh.identity.enrolment import SiteRecord, site_named
from mesh.identity.place import Place, Role
from mesh.identity.requests import key_digest
from mesh.process import background_loop
from mesh.registry.types import Registry, Value
from mesh.rpc.peer import peer_certificate, peer_place
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
SITE_PREFIX = "sites/"
REVOKED_PREFIX = "revoked_sites/"  # also what the registry lets core nodes read
_CAS_ATTEMPTS = 8
OnChange = Callable[[], None]


class SiteStore:
    """Owned by the placement service; `start` and `close` it. A record that cannot be read, or is gone, keeps its last
    good state: a registry that lost its data must not take a revoked site back. One that was never read lets nobody of
    that site in: it may be revoked."""

    def __init__(self, registry: Registry, on_change: OnChange = lambda: None) -> None:
        self._registry = registry
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._sites: dict[str, SiteRecord] = {}
        self._unreadable: frozenset[str] = frozenset()  # sites without a last good state

    async def start(self) -> None:
        """Read once (raises NodeUnreachable), then follow."""
        self._use(await self._registry.list_values(SITE_PREFIX))
        self._task = background_loop(self._follow, "sites")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on_change(self, on_change: OnChange) -> None:
        """Who is told of changes from now on."""
        self._on_change = on_change

    @property
    def sites(self) -> tuple[SiteRecord, ...]:
        """All of them, by name."""
        return tuple(self._sites[name] for name in sorted(self._sites))

    def named(self, site: str) -> SiteRecord:
        """Raises NotFound."""
        return site_named(self.sites, site)

    async def create(self, record: SiteRecord) -> None:
        """Raises AlreadyExists."""
        try:
            await self._registry.put(SITE_PREFIX + record.site, record.to_json(), expected_version=0)
        except RevisionMismatch:
            raise AlreadyExists(
                f"site {record.site} exists; `kvmesh site token {record.site}` makes a token for one more box",
                field="site",
            ) from None
        self._use(await self._registry.list_values(SITE_PREFIX))

    async def change(self, site: str, edit: Callable[[SiteRecord], SiteRecord]) -> SiteRecord:
        """Apply `edit` to the stored record; it may be called again if somebody else was faster. Raises what it
        raises, NotFound."""
        for _ in range(_CAS_ATTEMPTS):
            value = await self._registry.get(SITE_PREFIX + site)
            before = self.named(site) if value is None else SiteRecord.from_json(value.value)
            after = edit(before)
            if after == before and value is not None:
                return after
            try:
                expected = 0 if value is None else value.version
                await self._registry.put(SITE_PREFIX + site, after.to_json(), expected_version=expected)
            except RevisionMismatch:
                continue
            self._use(await self._registry.list_values(SITE_PREFIX))
            return after
        raise RevisionMismatch(f"site {site} keeps changing under us: try again")

    async def revoke(self, site: str, now_unix_s: float) -> SiteRecord:
        """Its boxes are no nodes any more, here and at every core node. Raises NotFound."""
        revoked = await self.change(site, lambda record: record.revoked(now_unix_s))
        await self._registry.put(REVOKED_PREFIX + site, str(revoked.revoked_unix_s).encode())
        return revoked

    def admit(self, context: grpc.aio.ServicerContext, mesh: str) -> Place:
        """The place of a caller that is a node of the mesh now. Raises Unauthenticated, PolicyDenied."""
        place = peer_place(context, mesh=mesh)
        record = self._sites.get(place.site) if place.role is Role.EDGE else None
        if record is None and place.role is Role.EDGE and place.site in self._unreadable:
            raise PolicyDenied(
                f"what is known of site {place.site} cannot be read by this placement service: look at its log",
                rule="site_unreadable",
                site=place.site,
            )
        if record is not None:
            record.check_box(place, key_digest(peer_certificate(context).public_key()))
        return place

    def refusal(self, place: Place) -> PolicyDenied | None:
        """Why a node that was admitted once is none any more; None if it still is."""
        record = self._sites.get(place.site) if place.role is Role.EDGE else None
        if record is None:
            return None
        try:
            record.check_not_revoked()
        except PolicyDenied as error:
            return error
        return None

    async def _follow(self) -> None:
        async for values in self._registry.watch_values(SITE_PREFIX):
            self._use(values)

    def _use(self, values: tuple[Value, ...]) -> None:
        sites, unreadable = dict(self._sites), set()
        for value in values:
            name = value.key.removeprefix(SITE_PREFIX)
            try:
                record = SiteRecord.from_json(value.value)
            except PayloadCorrupt as error:
                log.error("site_record_unusable", site=name, reason=error.reason)
                unreadable.add(name)
                continue
            known = sites.get(name)
            if known is None or not known.revoked_unix_s or record.revoked_unix_s:
                sites[name] = record
        self._unreadable = frozenset(unreadable - sites.keys())
        if sites != self._sites:
            self._sites = sites
            self._on_change()


class RevokedSites:
    """What a core node knows of revoked sites: their names, followed by watch. A mark that is gone stays in force."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self._names: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Read once (raises NodeUnreachable), then follow."""
        self._use(await self._registry.list_values(REVOKED_PREFIX))
        self._task = background_loop(self._follow, "revoked sites")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def admit(self, context: grpc.aio.ServicerContext, mesh: str) -> Place:
        """As SiteStore.admit, without knowing keys."""
        place = peer_place(context, mesh=mesh)
        self.check(place)
        return place

    def check(self, place: Place) -> None:
        """Raises PolicyDenied (rule "site_revoked")."""
        if place.role is Role.EDGE and place.site in self._names:
            raise PolicyDenied(
                f"site {place.site} was revoked; {place.node_id} is no node of this mesh any more",
                rule="site_revoked",
                site=place.site,
            )

    async def _follow(self) -> None:
        async for values in self._registry.watch_values(REVOKED_PREFIX):
            self._use(values)

    def _use(self, values: tuple[Value, ...]) -> None:
        self._names |= {value.key.removeprefix(REVOKED_PREFIX) for value in values}
