"""Following a registry that is elsewhere: one task that reads it forever, and watchers that share what it reads.

The task reconnects with jittered back-off for as long as it takes; meanwhile watchers keep the last state. What
waiting cannot mend (not allowed, not authenticated, a bad request) ends the task and is raised to every watcher.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from mesh.errors import Code, MeshError
from mesh.registry.signal import Signal, wait_for_event
from mesh.rpc.uplink.backoff import FullJitter
from mesh.telemetry.log import get_logger

T = TypeVar("T")

_FATAL = frozenset(
    {Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.NOT_FOUND, Code.UNIMPLEMENTED}
)

log = get_logger(__name__)


class Follower(Generic[T]):
    """`source` yields states, the current one first, until the registry is lost (it raises or ends). `name` is for
    the log."""

    def __init__(
        self, source: Callable[[], AsyncGenerator[T, None]], *, name: str, backoff: FullJitter | None = None
    ) -> None:
        self._source = source
        self._name = name
        self._backoff = backoff or FullJitter(random.Random())
        self._changed = Signal()
        self._latest: tuple[T] | None = None  # a tuple, since T may be None
        self._failure: MeshError | None = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start reading; again is fine."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name=f"follow-{self._name}")

    async def restart(self) -> None:
        """Read from a fresh source; watchers keep the last state meanwhile. Nothing if it does not read (any more)."""
        if self._task is None or self._task.done() or self._closed:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        self.start()

    async def close(self) -> None:
        """Stop reading and end all watches."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._changed.fire()

    async def states(self, repeat_s: float | None) -> AsyncGenerator[T, None]:
        """The state as soon as there is one, at each change, and again after `repeat_s` without one."""
        self.start()
        while not self._closed:
            changed = self._changed.event
            if self._failure is not None:
                raise type(self._failure)(self._failure.message, **self._failure.details)
            if self._latest is not None:
                yield self._latest[0]
            await wait_for_event(changed, repeat_s)

    async def _run(self) -> None:
        lost = False
        while True:
            try:
                async with aclosing(self._source()) as states:
                    async for state in states:
                        if lost:
                            log.info("registry_back", name=self._name)
                        lost = False
                        self._backoff.reset()
                        self._latest = (state,)
                        self._changed.fire()
                cause = "its stream ended"
            except MeshError as error:
                if error.code in _FATAL:
                    log.error("registry_refuses", name=self._name, reason=error.reason, cause=error.message)
                    self._failure = error
                    self._changed.fire()
                    return
                cause = error.message
            except Exception:
                log.exception("registry_following_failed_by_bug", name=self._name)
                cause = "a bug"
            if not lost:
                log.warning("registry_gone", name=self._name, cause=cause)
            lost = True
            await asyncio.sleep(self._backoff.next_s())
