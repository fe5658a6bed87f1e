"""A transfer's stream with patience that ends, and with the peer's Abort heard while we send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from mesh.errors import Cancelled, Internal, MeshError, NodeUnreachable
from mesh.kv.transfer import Sender, State
from mesh.kv.transfer_frames import Abort, Frame
from mesh.node.host_session import Session

_T = TypeVar("_T")

_LAST_WORD_S = 1.0  # for an Abort to go out, or for the peer's to come in


class Link:
    """A session whose waits for the peer are at most `idle_timeout_s` each; then NodeUnreachable."""

    def __init__(self, session: Session, *, idle_timeout_s: float) -> None:
        self._session = session
        self._idle_timeout_s = idle_timeout_s
        self._aborted = False
        self.peer_place = session.peer_place

    @property
    def window_bytes(self) -> int:
        """What may be under way to this end."""
        return self._session.window_bytes

    def grant(self, window_bytes: int) -> None:
        """The peer takes no more than this under way."""
        self._session.sending.grant(window_bytes)

    async def send(self, frame: Frame) -> None:
        await self.patiently(self._session.send(frame))

    async def settled(self) -> None:
        """Until the peer has used all that was sent, or is gone."""
        await self.patiently(self._session.settled())

    async def recv(self) -> Frame:
        """The next frame of the transfer, which is due now."""
        return await self.patiently(self.recv_sometime())

    async def recv_sometime(self) -> Frame:
        """The next frame, however long it takes."""
        return await self._session.recv()

    async def patiently(self, work: Awaitable[_T]) -> _T:
        """Something that is the peer's turn to let happen."""
        try:
            async with asyncio.timeout(self._idle_timeout_s) as limit:
                return await work
        except TimeoutError as exc:
            if not limit.expired():
                raise
            node = self.peer_place.node_id
            raise NodeUnreachable(f"node {node} did not go on for {self._idle_timeout_s:g} s", node=node) from exc

    async def abort(self, error: BaseException) -> None:
        """Tell the peer why it failed, once; best effort and short."""
        if self._aborted:
            return
        self._aborted = True
        if isinstance(error, asyncio.CancelledError):
            error = Cancelled("the transfer was cancelled")
        elif not isinstance(error, MeshError):
            error = Internal("the peer failed by a bug; its log has it")
        with contextlib.suppress(MeshError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._session.send(Abort.of(error))


class Inbox:
    """Gives what the receiver says to the sender's machine at once, while the sender is busy: an Abort, or a frame
    that is out of order, must not wait for the last chunk."""

    def __init__(self, link: Link, sender: Sender) -> None:
        self._link = link
        self._sender = sender
        self._news = asyncio.Event()

    async def reached(self, state: State) -> None:
        """Until the machine is in `state`, which is the receiver's turn to let happen."""
        while self._sender.state is not state:
            self._news.clear()
            await self._link.patiently(self._news.wait())

    async def guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` to its end, or to the receiver's Abort, fault or disappearance, whichever is first."""
        worker = asyncio.create_task(work)
        reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait((worker, reader), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()  # raises, unless the last frame is in
            try:
                return await worker
            except NodeUnreachable:
                # The stream broke under a send; what the peer said before it left tells more.
                await asyncio.wait((reader,), timeout=_LAST_WORD_S)
                if reader.done():
                    reader.result()
                raise
        except BaseException as exc:
            await self._link.abort(exc)  # now: ending the reader may end the stream
            raise
        finally:
            for task in (worker, reader):
                task.cancel()
            await asyncio.wait((worker, reader))
            _retrieve(worker, reader)

    async def _read(self) -> None:
        while self._sender.state is not State.DONE:
            self._sender.receive(await self._link.recv_sometime())
            self._news.set()


def _retrieve(*tasks: asyncio.Task[Any]) -> None:
    """Mark exceptions as seen: the first one is on its way already."""
    for task in tasks:
        if not task.cancelled():
            task.exception()
