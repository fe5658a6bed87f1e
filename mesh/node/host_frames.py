"""The first frame of a KV transfer, and the stream of frames between two nodes.

`KvOpen` is a KvOrder without the peer, cut to what the dialled node needs to know: token ids are prompt text, and
a node is told none that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from mesh.identity.place import Place
from mesh.kv.transfer_frames import Frame
from mesh.node.engine import RunId
from mesh.node.port import KvDirection, KvOrder, KvSource, Peer, WorkContext


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOpen:
    """Opens a transfer; fields as in KvOrder, `direction` as seen from the dialling node."""

    transfer_id: str
    direction: KvDirection
    context: WorkContext
    source: KvSource
    target: RunId
    token_ids: tuple[int, ...]
    max_tokens: int
    codec: str
    own_tokens: int = 0
    token: bytes = field(default=b"", repr=False)  # 32 random bytes; who has them may resume the transfer

    @classmethod
    def of(cls, order: KvOrder, *, token: bytes = b"") -> KvOpen:
        """All of the order but the peer: what the dialling node itself works with."""
        return cls(
            transfer_id=order.transfer_id,
            direction=order.direction,
            context=order.context,
            source=order.source,
            target=order.target,
            token_ids=order.token_ids,
            max_tokens=order.max_tokens,
            codec=order.codec,
            own_tokens=order.own_tokens,
            token=token,
        )

    def for_peer(self) -> KvOpen:
        """What travels: a source does not need the ids of a run that it has itself or that are in its prefill
        order; a target does not need the order of a prefill that it does not do."""
        pull = self.direction is KvDirection.PULL
        return KvOpen(
            transfer_id=self.transfer_id,
            direction=self.direction,
            context=self.context,
            source=self.source if pull else KvSource(run_id=self.source.run_id, pause=self.source.pause),
            target=self.target,
            token_ids=() if pull else self.token_ids,
            max_tokens=self.max_tokens,
            codec=self.codec,
            own_tokens=self.own_tokens,
            token=self.token,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """First on a new connection after a broken one: which transfer, and how many frames had come to the dialling
    end. `token` is that of the open frame."""

    transfer_id: str
    token: bytes = field(repr=False)
    received: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The answer: how many frames had come to the dialled end."""

    received: int


@dataclass(frozen=True, slots=True)
class Ack:
    """From either end, not counted itself: so many of your frames were used in all."""

    consumed: int


HostFrame = KvOpen | Resume | Resumed | Ack | Frame


class FrameStream(Protocol):
    """One end of a transfer's stream. Frames arrive in order; a broken stream is NodeUnreachable, and an error that
    the peer raised instead of sending Abort is that error."""

    @property
    def peer_place(self) -> Place:
        """From the peer's certificate."""
        ...

    async def send(self, frame: HostFrame) -> None:
        """Waits for room (flow control)."""

    async def recv(self) -> HostFrame:
        """The next frame; NodeUnreachable if the peer ended the stream."""
        ...


Dial = Callable[[Peer], AbstractAsyncContextManager[FrameStream]]
"""Opens a stream to a peer and has proved that its certificate says `peer.place`; leaving it ends the stream, after
what was sent has gone out if it is left without an exception."""
