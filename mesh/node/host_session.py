"""A transfer's frames over a stream that may break: a FrameStream that goes on over the next connection.

One session per transfer and end. While a connection lasts, one task reads and one writes; acks make room for what is
to be sent (mesh.kv.transfer_window). When it breaks, the dialling end dials again and names the transfer by its id
and secret token, the dialled end waits for that; both for a bounded time, after which the session has failed and its
owner frees everything. An error that the peer told, or an Abort, ends a session at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from mesh.errors import Internal, InvalidRequest, MeshError, NodeUnreachable
from mesh.identity.place import Place
from mesh.kv.transfer_frames import Abort, Frame, Piece
from mesh.kv.transfer_window import ReceiveWindow, SendWindow, cost_bytes
from mesh.node.host_frames import Ack, FrameStream, HostFrame, KvOpen, Resume, Resumed
from mesh.node.host_ledger import Pulse
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
_LAST_WORD_S = 1.0  # for the peer's reason to arrive when the stream broke under a send
_GOODBYE_S = 5.0  # for the peer to acknowledge our last frames while the connection lasts


class Session:
    """See the module's docstring. Enter it to start; leaving it ends it. One sender and one receiver of frames."""

    def __init__(self, peer_place: Place, *, window_bytes: int, resume_timeout_s: float) -> None:
        self.peer_place = peer_place
        self.window_bytes = window_bytes
        self.resumed = 0
        self.sending: SendWindow[Frame] = SendWindow(window_bytes)
        self.receiving = ReceiveWindow(window_bytes)
        self._resume_timeout_s = resume_timeout_s
        self._queue: deque[tuple[Frame, int]] = deque()
        self._in_use: int | None = None  # cost of a piece that was given out and may still be worked on
        self._changed = Pulse()
        self._ack_due = False
        self._last_word: Abort | None = None
        self._aborted = False
        self._is_up = False  # there is a connection, or is about to be without our doing
        self._ended = False  # nothing is worth another connection any more
        self._failure: MeshError | None = None
        self._task: asyncio.Task[None] | None = None

    # What the transfer uses

    async def send(self, frame: Frame) -> None:
        """Waits for credit, and until the frame is on its way. An Abort overtakes what waits."""
        if isinstance(frame, Abort):
            await self._send_last(frame)
            return
        cost = cost_bytes(frame)
        await self._until(lambda: self.sending.has_room(cost))
        count = self.sending.push(frame, cost)
        self._changed.beat()
        await self._until(lambda: self.sending.transmitted >= count)

    async def recv(self) -> Frame:
        """The next frame. Asking for it tells that the one before has been used."""
        if self._in_use is not None:
            cost, self._in_use = self._in_use, None
            self._consume(cost, at_once=not self._queue)
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        frame, cost = self._queue.popleft()
        if isinstance(frame, Piece):
            self._in_use = cost
        elif not isinstance(frame, Abort):
            self._consume(cost, at_once=True)
        return frame

    async def settled(self) -> None:
        """Until the peer has used all that was sent, or the session failed."""
        while self._failure is None and (self._ack_due or self.sending.acked < self.sending.sent):
            await self._changed.wait()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="kv-session")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:  # without it the peer would take a good transfer for a broken one
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(_GOODBYE_S, self._resume_timeout_s)):
                        await self.settled()
            self._ended = True
            if not self._is_up:
                await self._stop()  # it may be about to connect
            await self._leave(error)
        finally:
            await self._stop()
            self._fail(NodeUnreachable("the transfer's session has ended", node=self.peer_place.node_id))

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def _consume(self, cost: int, *, at_once: bool) -> None:
        if self.receiving.consume(cost) or at_once:
            self._ack_due = True
            self._changed.beat()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if holds():
                return
            await self._changed.wait()

    async def _send_last(self, frame: Abort) -> None:
        self._ended = self._aborted = True
        self._last_word = frame
        self._changed.beat()
        while self._is_up and self._last_word is not None:
            await self._changed.wait()

    def _fail(self, error: MeshError) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.beat()

    # Connections

    @abstractmethod
    async def _first(self) -> FrameStream:
        """The first connection."""

    @abstractmethod
    async def _again(self, error: MeshError) -> FrameStream:
        """The next connection, both ends in step again; raises `error`, why the last one ended, if there is none."""

    async def _leave(self, error: BaseException | None) -> None:
        """Let go of the connection, in good order unless there was an error."""

    async def _run(self) -> None:
        try:
            stream = await self._first()
            while True:
                error = await self._carry(stream)
                if not self._may_go_on(error):
                    self._fail(error)
                    return
                stream = await self._again(error)
                log.info("kv_transfer_resumed", peer=self.peer_place.node_id, after=error.message)
                self.resumed += 1
                self._ack_due = True  # the last one may not have arrived
        except MeshError as error:
            self._fail(error)
        except Exception as error:
            log.exception("kv_session_failed_by_a_bug", peer=self.peer_place.node_id)
            self._fail(Internal(f"a KV transfer's session failed by a bug: {type(error).__name__}"))

    def _may_go_on(self, error: MeshError) -> bool:
        return isinstance(error, NodeUnreachable) and not self._ended and self._resume_timeout_s > 0

    async def _superseded(self, stream: FrameStream) -> None:
        """Return when another connection is there, or this one is known to be gone."""
        await asyncio.Event().wait()

    async def _carry(self, stream: FrameStream) -> MeshError:
        """Frames both ways over one connection until it ends; returns why."""
        self._is_up = True
        reader = asyncio.create_task(self._read(stream))
        writer = asyncio.create_task(self._write(stream))
        interrupt = asyncio.create_task(self._superseded(stream))
        tasks = (reader, writer, interrupt)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not reader.done():
                await asyncio.wait((reader, interrupt), timeout=_LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer):
                if task.done():
                    return _error_of(task)
            return NodeUnreachable("the connection was given up", node=self.peer_place.node_id)
        finally:
            self._is_up = False
            self._changed.beat()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in (reader, writer):
                if not task.cancelled():
                    task.exception()  # seen

    async def _read(self, stream: FrameStream) -> None:
        while True:
            frame = await stream.recv()
            try:
                self._take(frame)
            except InvalidRequest as error:
                self._ended = True
                self._fail(error)
                await asyncio.Event().wait()  # the connection is still needed, to say why
            self._changed.beat()

    def _take(self, frame: HostFrame) -> None:
        match frame:
            case Ack():
                self.sending.ack(frame.consumed)
            case KvOpen() | Resume() | Resumed():
                raise InvalidRequest("a KV transfer is opened once", field="frame")
            case _:
                cost = cost_bytes(frame)
                if isinstance(frame, Abort):  # overtakes, so it is not counted
                    self._ended = True
                else:
                    self.receiving.arrived(cost)
                self._queue.append((frame, cost))

    async def _write(self, stream: FrameStream) -> None:
        while True:
            due = None if self._aborted else self.sending.next()
            if self._last_word is not None:
                await stream.send(self._last_word)
                self._last_word = None
            elif self._ack_due:
                self._ack_due = False
                await stream.send(Ack(self.receiving.told()))
            elif due is not None:
                frame, count = due
                await stream.send(frame)
                self.sending.passed(count)
            else:
                await self._changed.wait()
                continue
            self._changed.beat()


def _error_of(task: asyncio.Task[None]) -> MeshError:
    error = task.exception()
    if isinstance(error, MeshError):
        return error
    assert error is not None  # both go on for ever
    raise error
