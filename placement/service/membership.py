"""One node's membership in the registry: joined, kept alive at the TTL's pace, left.

A registry that lost the node gets it again; one that is gone for a while is tried until it is back.
"""

from __future__ import annotations

import asyncio

from mesh.errors import MeshError, NotFound
from mesh.process import background
from mesh.registry.types import Registration, Registry
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
_BEATS_PER_TTL = 3
_RETRY_S = 1.0


class Membership:
    """Owned by the node's process."""

    def __init__(self, registry: Registry, registration: Registration) -> None:
        self._registry = registry
        self._registration = registration
        self._ready = True
        self._missing = False  # the last heartbeat failed
        self._changed = False  # the registry has older facts
        self._beat_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Register and say ready. Raises NodeUnreachable if the registry is not there."""
        await self._registry.register(self._registration)
        await self._registry.heartbeat(self._registration.node_id, ready=self._ready)
        self._task = background(self._beat_forever(), "membership")

    def set_ready(self, ready: bool) -> None:
        """Readiness is told at once, not at the next beat."""
        self._ready = ready
        self._beat_now.set()

    def change(self, registration: Registration) -> None:
        """Other facts of the same node, told at once; a registry that is not there hears of them when it is back."""
        self._registration = registration
        self._changed = True
        self._beat_now.set()

    async def leave(self) -> None:
        """Deregister; a registry that is not there will see the silence."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._registry.deregister(self._registration.node_id)
        except MeshError as error:
            log.warning("left_without_registry", reason=error.reason)

    async def _beat_forever(self) -> None:
        pause_s = self._registration.ttl_s / _BEATS_PER_TTL
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await self._beat_now.wait()
            except TimeoutError:
                pass
            self._beat_now.clear()
            try:
                pause_s = await self._beat()
            except Exception as error:  # a bug, here or in the registry's client, must not make the node fall silent
                log.error("membership_failed_by_a_bug", exc_info=error)
                pause_s = _RETRY_S

    async def _beat(self) -> float:
        """One heartbeat; seconds until the next. Whatever the registry says, the node goes on trying: it is at worst
        critical for a while."""
        try:
            if self._changed:
                await self._registry.register(self._registration)
                self._changed = False
            await self._registry.heartbeat(self._registration.node_id, ready=self._ready)
        except NotFound:
            log.warning("registering_again")
            try:
                await self._registry.register(self._registration)
                await self._registry.heartbeat(self._registration.node_id, ready=self._ready)
            except MeshError as error:
                return self._missed(error)
        except MeshError as error:
            return self._missed(error)
        if self._missing:
            log.info("registry_hears_us_again")
        self._missing = False
        return self._registration.ttl_s / _BEATS_PER_TTL

    def _missed(self, error: MeshError) -> float:
        if not self._missing:
            log.warning("registry_does_not_hear_us", reason=error.reason, error=error.message)
        self._missing = True
        return _RETRY_S
