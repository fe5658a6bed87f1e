"""What every Transport must do: one suite for gRPC and for the in-memory one of the tests.

A module that tests a transport subclasses TransportSuite and gives it a fixture `far`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mesh.errors import NodeUnreachable, Overloaded, PolicyDenied
from mesh.identity.place import Place
from mesh.kv.chunks import PIECE_BYTES, digest_of
from mesh.kv.geometry import KvDtype
from mesh.kv.manifest import make_manifest
from mesh.kv.transfer_frames import Abort, Chunk, Commit, Done, Offer, Piece, Want
from mesh.node.engine import RunId
from mesh.node.host_frames import Ack, FrameStream, HostFrame, KvOpen, Resume, Resumed
from mesh.node.port import KvDirection, KvSource, Peer
from mesh.node.transport import Transport
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import CORE, kv_order

Accept = Callable[[HostFrame, FrameStream], Awaitable[None]]


@dataclass(slots=True)
class Far:
    """A node to dial. `accept` is what it does with a stream; `sever` breaks every connection to it and lets no new
    one through."""

    transport: Transport
    peer: Peer
    own: Place
    sever: Callable[[], Awaitable[None]]
    accept: Accept | None = None
    place: Place = CORE
    served: list[str] = field(default_factory=list)

    async def serve_transfer(self, first: HostFrame, stream: FrameStream) -> None:
        """Stands for a NodeHost's."""
        assert self.accept is not None
        await self.accept(first, stream)


def piece(index: int, size: int = 100) -> Piece:
    data = bytes([index % 256]) * size
    return Piece(chunk_index=index, offset_bytes=0, data=data, digest=digest_of(data))


OPEN = KvOpen.of(
    kv_order(CORE, direction=KvDirection.PUSH, token_ids=(1, 2, 3), source=KvSource(run_id=RunId("h"))),
    token=bytes(range(32)),
)
MANIFEST = make_manifest(
    FakeEngine().info, codec="f16", count_tokens=16, block_hashes=(bytes(32),), tenant="a", label="b",
    expires_unix_s=5.0,
)  # fmt: skip
EVERY_KIND: tuple[HostFrame, ...] = (
    OPEN,
    Want(from_position=3, layout_hash="l", weights_lineage="w", dtype=KvDtype.BF16, window_bytes=1 << 20),
    Offer(MANIFEST),
    Chunk(index=0, start=0, stop=16, size_bytes=100, digest=bytes(32), prefix_hash=bytes(32)),
    piece(0, PIECE_BYTES),
    Commit(chunks=1, stop=16, digest=bytes(32)),
    Done(16),
    Abort(reason="OVERLOADED", message="no"),
    Ack(7),
    Resume(transfer_id="t", token=bytes(32), received=2**40),
    Resumed(5),
)


async def echo(first: HostFrame, stream: FrameStream) -> None:
    """Sends everything back until the other end leaves."""
    frame: Any = first
    while True:
        await stream.send(frame)
        frame = await stream.recv()


class TransportSuite:
    """See the module's docstring."""

    @pytest.mark.parametrize("frame", EVERY_KIND, ids=lambda f: type(f).__name__)
    async def test_every_frame_travels_as_it_is(self, far: Far, frame: HostFrame) -> None:
        far.accept = echo
        async with far.transport.dial(far.peer) as stream:
            await stream.send(frame)
            assert await stream.recv() == frame

    async def test_frames_keep_their_order(self, far: Far) -> None:
        far.accept = echo
        sent = [piece(i, 1 + i * 997) for i in range(50)]
        async with far.transport.dial(far.peer) as stream:

            async def send_all() -> None:
                for frame in sent:
                    await stream.send(frame)

            sending = asyncio.create_task(send_all())  # both ways at once
            assert [await stream.recv() for _ in sent] == sent
            await sending

    async def test_both_ends_know_who_the_other_is(self, far: Far) -> None:
        seen: list[Place] = []

        async def look(first: HostFrame, stream: FrameStream) -> None:
            seen.append(stream.peer_place)
            await stream.send(Done(1))

        far.accept = look
        async with far.transport.dial(far.peer) as stream:
            assert stream.peer_place == far.peer.place
            await stream.send(OPEN)
            await stream.recv()
        assert seen == [far.own]

    async def test_what_was_sent_arrives_before_the_end(self, far: Far) -> None:
        got: list[HostFrame] = []
        ended = asyncio.Event()

        async def take(first: HostFrame, stream: FrameStream) -> None:
            got.append(first)
            try:
                while True:
                    got.append(await stream.recv())
            except NodeUnreachable:
                ended.set()

        far.accept = take
        async with far.transport.dial(far.peer) as stream:
            for i in range(20):
                await stream.send(piece(i, 10_000))
        await asyncio.wait_for(ended.wait(), 10)
        assert got == [piece(i, 10_000) for i in range(20)]

    async def test_the_dialled_end_leaves(self, far: Far) -> None:
        async def three(first: HostFrame, stream: FrameStream) -> None:
            for i in range(3):
                await stream.send(piece(i))

        far.accept = three
        async with far.transport.dial(far.peer) as stream:
            await stream.send(OPEN)
            assert [await stream.recv() for _ in range(3)] == [piece(i) for i in range(3)]
            with pytest.raises(NodeUnreachable):
                await stream.recv()
            with pytest.raises(NodeUnreachable):  # noqa: PT012
                for _ in range(100):
                    await stream.send(piece(0))

    async def test_an_error_of_the_dialled_end_is_that_error(self, far: Far) -> None:
        async def refuse(first: HostFrame, stream: FrameStream) -> None:
            await stream.send(Done(1))
            raise PolicyDenied("not here", rule="test")

        far.accept = refuse
        async with far.transport.dial(far.peer) as stream:
            await stream.send(OPEN)
            assert await stream.recv() == Done(1)
            with pytest.raises(PolicyDenied) as caught:
                await stream.recv()
            assert caught.value.details["rule"] == "test"

    async def test_an_error_inside_is_not_hidden_by_leaving(self, far: Far) -> None:
        far.accept = echo
        with pytest.raises(Overloaded):  # noqa: PT012
            async with far.transport.dial(far.peer) as stream:
                await stream.send(OPEN)
                raise Overloaded("here")

    async def test_a_broken_connection_is_seen_at_both_ends(self, far: Far) -> None:
        seen = asyncio.Event()

        async def wait(first: HostFrame, stream: FrameStream) -> None:
            try:
                await stream.send(first)
                await stream.recv()
            except (NodeUnreachable, asyncio.CancelledError):
                seen.set()
                raise

        far.accept = wait
        with pytest.raises(NodeUnreachable):  # noqa: PT012
            async with far.transport.dial(far.peer) as stream:
                await stream.send(OPEN)
                assert await stream.recv() == OPEN
                await far.sever()
                await stream.recv()
        await asyncio.wait_for(seen.wait(), 10)

    async def test_nobody_is_there(self, far: Far) -> None:
        far.accept = echo
        await far.sever()
        with pytest.raises(NodeUnreachable):  # noqa: PT012
            async with far.transport.dial(far.peer) as stream:
                await stream.send(OPEN)
                await stream.recv()

    async def test_streams_do_not_meet(self, far: Far) -> None:
        far.accept = echo
        async with far.transport.dial(far.peer) as one, far.transport.dial(far.peer) as two:
            await one.send(piece(1))
            await two.send(piece(2))
            assert await two.recv() == piece(2)
            assert await one.recv() == piece(1)

    async def test_cancelling_ends_the_stream(self, far: Far) -> None:
        seen = asyncio.Event()

        async def wait(first: HostFrame, stream: FrameStream) -> None:
            try:
                await stream.send(first)
                await stream.recv()
            except (NodeUnreachable, asyncio.CancelledError):
                seen.set()
                raise

        far.accept = wait
        up = asyncio.Event()

        async def dial() -> None:
            async with far.transport.dial(far.peer) as stream:
                await stream.send(OPEN)
                await stream.recv()
                up.set()
                await stream.recv()

        task = asyncio.create_task(dial())
        await up.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(seen.wait(), 10)
