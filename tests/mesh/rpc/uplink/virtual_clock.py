"""A clock that stands still until a test advances it."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

START_UNIX_S = 1_700_000_000.0


class VirtualClock:
    """Implements mesh.rpc.uplink.clock.Clock. Sleepers wake in the order of their due times."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._tie = count()

    def monotonic(self) -> float:
        return self._now_s

    def unix(self) -> float:
        return START_UNIX_S + self._now_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._tie), woken))
        await woken

    async def advance(self, duration_s: float) -> None:
        """Move time on, stopping at each sleeper that is due and letting tasks run there."""
        end_s = self._now_s + duration_s
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, woken = heapq.heappop(self._sleepers)
            if woken.done():
                continue
            self._now_s = max(self._now_s, due_s)
            woken.set_result(None)
            for _ in range(10):
                await asyncio.sleep(0)
        self._now_s = end_s
