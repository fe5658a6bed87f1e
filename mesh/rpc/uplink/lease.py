"""The session lease on both sides, and the agent's book of heartbeats. Pure: time comes in as a number.

Hub and agent each hold the lease by their own monotonic clock. The hub counts from when a heartbeat arrived,
the agent from when it sent the one that was renewed. The agent's view therefore ends first, and it has let go
of its orders before the hub gives them to another node (C. Gray and D. Cheriton, "Leases", SOSP'89).
"""

from __future__ import annotations

from collections import OrderedDict

from mesh.errors import InvalidRequest

MAX_OUTSTANDING = 64


class Lease:
    """Valid for `lease_s` seconds after the last renewal."""

    def __init__(self, *, lease_s: float, now_s: float) -> None:
        self.lease_s = lease_s
        self._renewed_s = now_s

    @property
    def renewed_s(self) -> float:
        """As of when it was last renewed."""
        return self._renewed_s

    def renew(self, at_s: float) -> None:
        """Renew as of `at_s`; an earlier time than the last one changes nothing."""
        self._renewed_s = max(self._renewed_s, at_s)

    def remaining_s(self, now_s: float) -> float:
        """Seconds left; zero or less: expired."""
        return self._renewed_s + self.lease_s - now_s


class HeartbeatOrder:
    """The hub's check that heartbeats of one session count upwards (the stream keeps their order)."""

    def __init__(self) -> None:
        self._last = 0

    def accept(self, sequence: int) -> None:
        """Raises InvalidRequest unless `sequence` is larger than all before it, from 1 on."""
        if sequence <= self._last:
            raise InvalidRequest(f"heartbeat {sequence} came after heartbeat {self._last}", field="heartbeat.sequence")
        self._last = sequence


class HeartbeatBook:
    """The agent's sent heartbeats that wait for their renewal; gives round trips and renewal times.

    Keeps the last MAX_OUTSTANDING; a renewal of an older one measures nothing."""

    def __init__(self) -> None:
        self._next = 1
        self._sent: OrderedDict[int, float] = OrderedDict()

    def send(self, now_s: float) -> int:
        """Sequence number of the heartbeat that is sent now."""
        sequence, self._next = self._next, self._next + 1
        self._sent[sequence] = now_s
        if len(self._sent) > MAX_OUTSTANDING:
            self._sent.popitem(last=False)
        return sequence

    def renewed(self, sequence: int) -> float | None:
        """When the heartbeat that was renewed had been sent; None for one that is not known any more.

        Forgets it and all before it: a later renewal stands for the earlier ones. Raises InvalidRequest for a
        sequence that was never sent."""
        if not 1 <= sequence < self._next:
            raise InvalidRequest(f"renewal of heartbeat {sequence}, which was not sent", field="renewal.sequence")
        sent_s = self._sent.get(sequence)
        while self._sent and next(iter(self._sent)) <= sequence:
            self._sent.popitem(last=False)
        return sent_s
