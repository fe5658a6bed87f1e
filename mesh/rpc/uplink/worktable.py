"""The hub's open orders of one session: ids, unread events, outcomes. Pure: no I/O, no protobuf, no clock.

An order is open from `open` to `close`. Its reader takes events until the outcome; an outcome that is an error
stands behind the events that came before it. Bound: `max_open` orders, each with `max_unread_bytes` of events
that its reader did not take; beyond that the order fails with Overloaded, and the others of the session go on
(one slow reader must not hold up a heartbeat).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from mesh.errors import MeshError, Overloaded

E = TypeVar("E")  # event
R = TypeVar("R")  # result


class Delivery(Enum):
    """What became of an event or result that came in."""

    ACCEPTED = "accepted"
    NOT_OPEN = "not_open"  # of an order that was closed here before: normal after a cancel
    OVERFLOW = "overflow"  # the order has just failed; the node must be told to stop


class Work(Generic[E, R]):
    """One order. `wake` is called when there is something new to read."""

    def __init__(self, work_id: int, wake: Callable[[], None]) -> None:
        self.work_id = work_id
        self.settled = False  # there is an outcome; no more events will come
        self.result: R | None = None
        self.error: MeshError | None = None
        self.unread_bytes = 0
        self._unread: deque[tuple[E, int]] = deque()
        self._wake = wake

    def take(self) -> E | None:
        """The oldest unread event, None if there is none now."""
        if not self._unread:
            return None
        event, size_bytes = self._unread.popleft()
        self.unread_bytes -= size_bytes
        return event

    def add(self, event: E, size_bytes: int) -> None:
        """Append an event."""
        self._unread.append((event, size_bytes))
        self.unread_bytes += size_bytes
        self._wake()

    def settle(self, *, result: R | None = None, error: MeshError | None = None) -> None:
        """Fix the outcome; the first one stands."""
        if not self.settled:
            self.settled, self.result, self.error = True, result, error
            self._wake()


class WorkTable(Generic[E, R]):
    """See the module's docstring. `node_id` is for messages."""

    def __init__(self, node_id: str, *, max_open: int, max_unread_bytes: int) -> None:
        self._node_id = node_id
        self._max_open = max_open
        self._max_unread_bytes = max_unread_bytes
        self._works: dict[int, Work[E, R]] = {}
        self._next_id = 1
        self._failed: MeshError | None = None

    def __len__(self) -> int:
        return len(self._works)

    def open(self, wake: Callable[[], None]) -> Work[E, R]:
        """A new order. Raises Overloaded when `max_open` are open, and after `fail_all` its error."""
        if self._failed is not None:
            raise self._failed
        if len(self._works) >= self._max_open:
            raise Overloaded(
                f"node {self._node_id} has {self._max_open} open orders on its uplink; try again later",
                node=self._node_id,
            )
        work: Work[E, R] = Work(self._next_id, wake)
        self._next_id += 1
        self._works[work.work_id] = work
        return work

    def event(self, work_id: int, event: E, size_bytes: int) -> Delivery:
        """An event came in."""
        work = self._works.get(work_id)
        if work is None or work.settled:
            return Delivery.NOT_OPEN
        if work.unread_bytes + size_bytes > self._max_unread_bytes:
            work.settle(
                error=Overloaded(
                    f"the reader of a run at {self._node_id} fell more than {self._max_unread_bytes} bytes behind",
                    node=self._node_id,
                )
            )
            return Delivery.OVERFLOW
        work.add(event, size_bytes)
        return Delivery.ACCEPTED

    def settle(self, work_id: int, *, result: R | None = None, error: MeshError | None = None) -> Delivery:
        """The end of an order came in."""
        work = self._works.get(work_id)
        if work is None or work.settled:
            return Delivery.NOT_OPEN
        work.settle(result=result, error=error)
        return Delivery.ACCEPTED

    def close(self, work_id: int) -> None:
        """The reader is done with it; later events of it are NOT_OPEN."""
        self._works.pop(work_id, None)

    def fail_all(self, error: MeshError) -> None:
        """The session ended: every open order fails with `error`, and nothing can be opened again."""
        if self._failed is None:
            self._failed = error
            for work in self._works.values():
                work.settle(error=error)
