"""The two ends of a transfer's session: the one that dials, and dials again, and the one that is dialled."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import AsyncExitStack

from mesh.errors import Cancelled, InvalidRequest, MeshError, NodeUnreachable, Unauthenticated
from mesh.identity.place import Place
from mesh.node.host_frames import Dial, FrameStream, KvOpen, Resume, Resumed
from mesh.node.host_session import Session
from mesh.node.port import KvReport, Peer
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between tries to dial again


class DiallingSession(Session):
    """The end that dials, and dials again."""

    def __init__(self, dial: Dial, peer: Peer, opening: KvOpen, *, window_bytes: int, resume_timeout_s: float) -> None:
        super().__init__(peer.place, window_bytes=window_bytes, resume_timeout_s=resume_timeout_s)
        self._dial = dial
        self._peer = peer
        self._opening = opening
        self._stack = AsyncExitStack()

    async def _first(self) -> FrameStream:
        return await self._connect(self._opening.for_peer())

    def _may_go_on(self, error: MeshError) -> bool:
        # A peer that was not heard may not have the transfer; its entry does better to look elsewhere at once.
        heard = self.receiving.received > 0 or self.sending.acked > 0
        return super()._may_go_on(error) and heard

    async def _connect(self, first: KvOpen | Resume) -> FrameStream:
        stream = await self._stack.enter_async_context(self._dial(self._peer))
        if stream.peer_place != self._peer.place:
            raise Unauthenticated(
                f"{self._peer.address} is {stream.peer_place.uri}, not {self._peer.place.uri}",
                node=stream.peer_place.node_id,
            )
        await stream.send(first)
        return stream

    async def _leave(self, error: BaseException | None) -> None:
        stack, self._stack = self._stack, AsyncExitStack()
        with contextlib.suppress(MeshError):
            await stack.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def _again(self, error: MeshError) -> FrameStream:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._resume_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._leave(error)
            try:
                async with asyncio.timeout_at(give_up_s):
                    return await self._resume()
            except (NodeUnreachable, TimeoutError):
                if loop.time() + pause_s >= give_up_s:
                    raise error from None
            except MeshError as refusal:
                log.info("kv_transfer_not_resumed", peer=self.peer_place.node_id, reason=refusal.reason)
                raise error from refusal
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _resume(self) -> FrameStream:
        resume = Resume(
            transfer_id=self._opening.transfer_id, token=self._opening.token, received=self.receiving.received
        )
        stream = await self._connect(resume)
        answer = await stream.recv()
        if not isinstance(answer, Resumed):
            raise InvalidRequest("a resumed KV transfer starts with how far it had come", field="frame")
        self.sending.rewind(answer.received)
        return stream


class ServedSession(Session):
    """The end that is dialled, and dialled again."""

    def __init__(self, peer_place: Place, opening: KvOpen, *, window_bytes: int, resume_timeout_s: float) -> None:
        super().__init__(peer_place, window_bytes=window_bytes, resume_timeout_s=resume_timeout_s)
        self.token = opening.token
        self._is_up = True
        self._offered: asyncio.Queue[tuple[FrameStream, int | None]] = asyncio.Queue()
        self._current: FrameStream | None = None
        self._gone: set[FrameStream] = set()

    async def carry(self, stream: FrameStream, received: int | None, work: asyncio.Task[KvReport]) -> None:
        """Use this connection until it is of no use any more or the work on the transfer is done; the peer had
        `received` frames on those before (None: it is the first). Raises what the work raised."""
        self._offered.put_nowait((stream, received))
        self._changed.beat()
        released = asyncio.create_task(self._released(stream))
        try:
            await asyncio.wait((released, work), return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()
            self._gone.add(stream)
            self._changed.beat()
        if self._ended:
            await asyncio.wait((work,))  # it is about to end; its error is the stream's
        if work.cancelled():
            raise Cancelled("the node gave the transfer up")
        if work.done():
            work.result()

    async def _released(self, stream: FrameStream) -> None:
        while stream not in self._gone:
            await self._changed.wait()

    async def _superseded(self, stream: FrameStream) -> None:
        # The peer dials again only when it lost the connection that this end may still believe in.
        while stream not in self._gone and self._offered.empty():
            await self._changed.wait()

    async def _first(self) -> FrameStream:
        self._current, _ = await self._offered.get()
        return self._current

    async def _again(self, error: MeshError) -> FrameStream:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._resume_timeout_s
        while True:
            self._release()
            try:
                async with asyncio.timeout_at(give_up_s):
                    stream, received = await self._offered.get()
                    if stream in self._gone or received is None:
                        continue
                    self._current = stream
                    self.sending.rewind(received)
                    await stream.send(Resumed(self.receiving.received))
                    return stream
            except TimeoutError:
                raise error from None
            except NodeUnreachable:
                continue

    def _release(self) -> None:
        if self._current is not None:
            self._gone.add(self._current)
            self._current = None
            self._changed.beat()

    async def _leave(self, error: BaseException | None) -> None:
        self._release()
