"""Time as the uplink sees it: one small interface, so that tests can run leases in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol


class Clock(Protocol):
    """Reads time and sleeps. All values in seconds."""

    def monotonic(self) -> float:
        """Never goes back; only differences mean something."""
        ...

    def unix(self) -> float:
        """Seconds since the epoch, for what crosses to another machine."""
        ...

    async def sleep(self, delay_s: float) -> None: ...


class SystemClock:
    """The machine's own."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


@asynccontextmanager
async def time_limit(clock: Clock, limit_s: float) -> AsyncIterator[None]:
    """Like asyncio.timeout, but on `clock`: the body is cancelled and TimeoutError raised after `limit_s`."""
    async with asyncio.timeout(None) as scope:
        timer = asyncio.create_task(_expire(clock, limit_s, scope))
        try:
            yield
        finally:
            timer.cancel()


async def _expire(clock: Clock, limit_s: float, scope: asyncio.Timeout) -> None:
    await clock.sleep(limit_s)
    scope.reschedule(asyncio.get_running_loop().time())
