"""Credits and resumption of one direction of a transfer, by counting frames. Pure.

Frames are counted, not numbered: a connection keeps their order, so both ends agree on the count without a field on
the wire. The sending end keeps each frame until the receiving end has *consumed* it (used it, not just received it),
and keeps at most a window of bytes: that bounds its memory however slow the receiver is, and it is what a new
connection sends again after a broken one. The receiving end tells how many frames it consumed (acks) and, on a new
connection, how many it received, so that none comes twice.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from mesh.errors import InvalidRequest
from mesh.kv.chunks import PIECE_BYTES
from mesh.kv.transfer_frames import Frame, Offer, Piece

WINDOW_BYTES = 16 * 1024 * 1024
"""Default: 1 Gbit/s over 130 ms."""
_OVERHEAD_BYTES = 256
_LARGEST_PIECE_BYTES = PIECE_BYTES + _OVERHEAD_BYTES

T = TypeVar("T")


def cost_bytes(frame: Frame) -> int:
    """What a frame counts for; about its memory."""
    match frame:
        case Piece():
            return len(frame.data) + _OVERHEAD_BYTES
        case Offer():
            return sum(len(h) for h in frame.manifest.block_hashes) + _OVERHEAD_BYTES
        case _:
            return _OVERHEAD_BYTES


class SendWindow(Generic[T]):
    """The sending end: `sent` frames were given to it, of which `acked` were consumed over there."""

    def __init__(self, window_bytes: int) -> None:
        self._own_window_bytes = self._window_bytes = window_bytes
        self._kept: deque[tuple[T, int]] = deque()
        self.kept_bytes = 0
        self.peak_bytes = 0
        self.acked = 0
        self.transmitted = 0  # frames below this were put on the connection of now, or consumed before it

    @property
    def sent(self) -> int:
        return self.acked + len(self._kept)

    def grant(self, window_bytes: int) -> None:
        """The receiver's window: from now on the smaller of both counts."""
        self._window_bytes = min(self._own_window_bytes, window_bytes)

    def has_room(self, cost: int) -> bool:
        """Whether a frame of this cost may be taken: it fits, or nothing else is under way."""
        return not self._kept or self.kept_bytes + cost <= self._window_bytes

    def push(self, frame: T, cost: int) -> int:
        """Take a frame; returns the count of frames up to it."""
        self._kept.append((frame, cost))
        self.kept_bytes += cost
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)
        return self.sent

    def next(self) -> tuple[T, int] | None:
        """The next frame to put on the connection and the count up to it, if there is one."""
        if self.transmitted >= self.sent:
            return None
        return self._kept[self.transmitted - self.acked][0], self.transmitted + 1

    def passed(self, count: int) -> None:
        """Frames up to `count` are on the connection."""
        self.transmitted = max(self.transmitted, count)

    def ack(self, count: int) -> None:
        """The other end consumed `count` frames in all. Raises InvalidRequest if it cannot have."""
        if not self.acked <= count <= self.sent:
            raise InvalidRequest(f"{count} frames are acknowledged; {self.acked} were, of {self.sent}", field="ack")
        for _ in range(count - self.acked):
            self.kept_bytes -= self._kept.popleft()[1]
        self.acked = count
        self.transmitted = max(self.transmitted, count)

    def rewind(self, received: int) -> None:
        """A new connection: the other end had received so many frames; go on after them. Raises InvalidRequest if
        that is less than it consumed, or more than there were."""
        if not self.acked <= received <= self.sent:
            raise InvalidRequest(f"{received} frames cannot have been received of {self.sent}", field="received")
        self.transmitted = received


class ReceiveWindow:
    """The receiving end: `received` frames came, `consumed` of them were used."""

    def __init__(self, window_bytes: int) -> None:
        self._limit_bytes = max(window_bytes, _LARGEST_PIECE_BYTES)
        self._ack_every_bytes = window_bytes // 4
        self._unacked_bytes = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self.received = 0
        self.consumed = 0

    def arrived(self, cost: int) -> None:
        """A frame came. Raises InvalidRequest if the sender had no credit for it."""
        self.received += 1
        self.held_bytes += cost
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self.held_bytes > self._limit_bytes:
            raise InvalidRequest(f"more than the granted {self._limit_bytes} bytes were sent", field="window")

    def consume(self, cost: int) -> bool:
        """A frame was used; whether enough was to tell the sender now even if more waits here."""
        self.consumed += 1
        self.held_bytes -= cost
        self._unacked_bytes += cost
        return self._unacked_bytes >= self._ack_every_bytes

    def told(self) -> int:
        """What to acknowledge now."""
        self._unacked_bytes = 0
        return self.consumed
