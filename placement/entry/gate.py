"""The gate of an entry: holds requests back while the nodes have enough to do, and lets them in by fair share.

How many may be in at once follows what nodes tell: for each ready node what it computes now, and LEAST_PER_NODE more.
While nothing waits there it is more, by its free KV at TOKENS_PER_REQUEST each, or as much again as it computes, up to
MOST_PER_NODE. So queues stay short where order cannot be mended any more (at engines, first come first served), and the
rest waits here, where it is fair. The window grows with what engines prove to batch; nothing has to be set.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from mesh.errors import Overloaded
from mesh.telemetry.log import get_logger
from placement.decide.types import Snapshot
from placement.entry.fair_queue import FairQueue, Ticket

log = get_logger(__name__)
LEAST_PER_NODE = 8
MOST_PER_NODE = 64
TOKENS_PER_REQUEST = 1024
MAX_WAIT_S = 30.0
_FREE = 8  # so many are let in without a look at the mesh
_LOOK_EVERY_S = 0.25
_RATE_OVER_S = 30.0


def window_of(snapshot: Snapshot) -> int:
    """How many requests the nodes have use for now. Pure."""
    usable = snapshot.ready & snapshot.reachable & ~snapshot.draining
    room = np.maximum(snapshot.running, snapshot.kv_free_tokens // TOKENS_PER_REQUEST)
    more = np.where(snapshot.waiting > 0, LEAST_PER_NODE, np.clip(room, LEAST_PER_NODE, MOST_PER_NODE))
    return int((snapshot.running + more)[usable].sum())


class Gate:
    """One per entry; used from its event loop."""

    def __init__(self, snapshot: Callable[[], Snapshot], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._queue = FairQueue()
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._inside = 0
        self._window = (-1.0, 0)  # when it was worked out, and what it was
        self._ends: deque[float] = deque(maxlen=256)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    async def enter(self, ticket: Ticket, *, max_wait_s: float = MAX_WAIT_S) -> None:
        """Return when it is the ticket's turn; `leave` follows once for each. Raises Overloaded (with `rule` and
        `retry_after_s`) if there is no room to wait, or it waited too long."""
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            refused = self._queue.push(ticket)
            if refused is not None:
                self._refuse(refused, "too many requests wait here")
            self._pump()
            async with asyncio.timeout(max_wait_s):
                await waiter
        except TimeoutError:
            if not _let_in(waiter):  # else its turn came at this very moment
                raise self._overloaded(f"no node had room within {max_wait_s:g} s") from None
        except BaseException:
            if _let_in(waiter):
                self.leave()
            raise
        finally:
            self._waiters.pop(ticket, None)
            self._queue.remove(ticket)

    def leave(self) -> None:
        """A request that was let in has ended."""
        self._inside -= 1
        self._ends.append(self._clock())
        self._pump()

    def _pump(self) -> None:
        while len(self._queue) and self._inside < max(_FREE, self._room()):
            ticket = self._queue.pop()
            waiter = None if ticket is None else self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                self._inside += 1
                waiter.set_result(None)
        if len(self._queue) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._pump()

    def _room(self) -> int:
        at_s, room = self._window
        now_s = self._clock()
        if self._inside >= _FREE and (at_s < 0.0 or now_s - at_s >= _LOOK_EVERY_S):
            room = window_of(self._snapshot())
            self._window = now_s, room
        return room

    def _refuse(self, ticket: Ticket, message: str) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_exception(self._overloaded(message))

    def _overloaded(self, message: str) -> Overloaded:
        """With the time that those who wait will take, at the pace of late."""
        now_s = self._clock()
        recent = sum(1 for end_s in self._ends if now_s - end_s <= _RATE_OVER_S)
        pace_per_s = max(recent, 1) / _RATE_OVER_S
        retry_after_s = min(60.0, max(1.0, len(self._queue) / pace_per_s))
        return Overloaded(message, rule="fair-share", retry_after_s=f"{retry_after_s:.1f}")


def _let_in(waiter: asyncio.Future[None]) -> bool:
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None
