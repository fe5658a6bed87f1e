"""What waits to be written to one session: bounded, in order, with a way around the queue for what is urgent.

Three lanes, taken in this order:

    urgent   cancels; never waits. The caller keeps it short (at most one cancel per open order).
    latest   one message per slot (renewal, config, snapshot, heartbeat): a newer one replaces one that was not
             written yet, so that a slow peer sees fewer of them, never old ones after new ones.
    queue    orders, events, results; first in, first out. `put` waits for room: this is the back-pressure.

Bound: `max_bytes` in the queue (or one larger message, alone), one message per slot, the urgent ones. Nothing
here does I/O; one task writes (`get`), any task of the same event loop puts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mesh.errors import MeshError

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[M]):
    message: M
    size_bytes: int
    key: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter(Generic[M]):
    entry: _Entry[M]
    admitted: asyncio.Future[None]


class Outbox(Generic[M]):
    """See the module's docstring."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._urgent: deque[M] = deque()
        self._latest: dict[str, M] = {}
        self._queue: deque[_Entry[M]] = deque()
        self._waiters: deque[_Waiter[M]] = deque()
        self._queued_bytes = 0
        self._ready = asyncio.Event()
        self._finished = False
        self._error: MeshError | None = None

    @property
    def queued_bytes(self) -> int:
        """Bytes in the queue lane now."""
        return self._queued_bytes

    @property
    def waiting(self) -> int:
        """How many `put` calls wait for room."""
        return len(self._waiters)

    async def put(self, message: M, size_bytes: int, *, key: Hashable = None) -> None:
        """Queue it, after waiting for room and for those that waited before. Raises the error of `close`.

        A cancelled `put` leaves nothing behind while it waited; once there was room, `discard(key)` takes the
        message back."""
        self._check_open()
        entry = _Entry(message, size_bytes, key)
        if not self._waiters and self._has_room(size_bytes):
            self._append(entry)
            return
        waiter = _Waiter(entry, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._admit()
            elif not waiter.admitted.cancelled():
                waiter.admitted.exception()  # seen: the cancellation came first
            raise

    def put_urgent(self, message: M) -> None:
        """Ahead of all others; never waits. Does nothing after `close`."""
        if self._error is None:
            self._urgent.append(message)
            self._ready.set()

    def put_latest(self, slot: str, message: M) -> None:
        """Replace what the slot holds; never waits. Does nothing after `close`."""
        if self._error is None:
            self._latest[slot] = message
            self._ready.set()

    def discard(self, key: Hashable) -> int:
        """Take back the queued messages of this key that were not written yet; returns how many."""
        kept = deque(entry for entry in self._queue if entry.key != key)
        removed = len(self._queue) - len(kept)
        self._queue = kept
        self._queued_bytes = sum(entry.size_bytes for entry in kept)
        self._admit()
        return removed

    async def get(self) -> M | None:
        """The next message; None after `finish` when all were taken. Raises the error of `close`."""
        while True:
            if self._error is not None:
                raise self._error
            if self._urgent:
                return self._urgent.popleft()
            if self._latest:
                return self._latest.pop(next(iter(self._latest)))
            if self._queue:
                entry = self._queue.popleft()
                self._queued_bytes -= entry.size_bytes
                self._admit()
                return entry.message
            if self._finished:
                return None
            self._ready.clear()
            await self._ready.wait()

    def finish(self) -> None:
        """No more will be put; `get` still gives what is there."""
        self._finished = True
        self._ready.set()

    def close(self, error: MeshError) -> None:
        """Drop everything; every `put` and `get`, also those that wait now, raises `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._urgent.clear()
        self._latest.clear()
        self._queue.clear()
        self._queued_bytes = 0
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._ready.set()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _has_room(self, size_bytes: int) -> bool:
        return not self._queue or self._queued_bytes + size_bytes <= self._max_bytes

    def _append(self, entry: _Entry[M]) -> None:
        self._queue.append(entry)
        self._queued_bytes += entry.size_bytes
        self._ready.set()

    def _admit(self) -> None:
        while self._waiters and self._has_room(self._waiters[0].entry.size_bytes):
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                self._append(waiter.entry)
                waiter.admitted.set_result(None)
