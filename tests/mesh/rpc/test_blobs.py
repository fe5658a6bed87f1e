# ruff: noqa: ASYNC240 - small files
"""Files by digest over real gRPC: resumed, verified, refused where they are not what was asked for."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from mesh.errors import (
    AlreadyExists,
    InvalidRequest,
    NodeUnreachable,
    NotFound,
    Overloaded,
    PayloadCorrupt,
    Unauthenticated,
)
from mesh.identity.place import Place
from mesh.rpc.blobs import fetch as fetch_module
from mesh.rpc.blobs.fetch import FetchLimits, fetch_blob, list_blobs, part_of
from mesh.rpc.blobs.servicer import PART_BYTES, BlobsServicer
from mesh.rpc.blobs.shelf import Blob, BlobShelf, model_shelf
from mesh.rpc.errors import ErrorInterceptor
from mesh.settings import ModelFile
from mesh.v1 import blobs_pb2 as pb
from mesh.v1 import blobs_pb2_grpc

Dial = Callable[[], grpc.aio.Channel]
QUICK = FetchLimits(silence_s=0.5, attempts=3, pause_s=0.01)
BYTES = random.Random(3).randbytes(3 * PART_BYTES + 17)
DIGEST = hashlib.sha256(BYTES).hexdigest()


def anybody(context: Any) -> Place:
    return SimpleNamespace(node_id="edge-1")  # type: ignore[return-value]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "core" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(BYTES)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "edge").mkdir()
    return tmp_path / "edge" / "model.gguf"


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Any], Any]]:
    servers: list[grpc.aio.Server] = []

    async def run(servicer: blobs_pb2_grpc.BlobsServicer) -> Dial:
        server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
        blobs_pb2_grpc.add_BlobsServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return lambda: grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    yield run
    for server in servers:
        await server.stop(0)


def shelf_of(path: Path) -> BlobShelf:
    return model_shelf([ModelFile(id="m", path=path)])


class Breaking(BlobsServicer):
    """Breaks off after so many parts, so many times; remembers the offsets it was asked for."""

    def __init__(self, shelf: BlobShelf, *, after_parts: int, times: int) -> None:
        super().__init__(shelf, anybody)
        self.after_parts, self.times = after_parts, times
        self.offsets: list[int] = []

    async def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.FetchBlobResponse]:
        self.offsets.append(request.offset_bytes)
        sent = 0
        async for part in super().FetchBlob(request, context):
            if self.times and sent > self.after_parts:
                self.times -= 1
                raise NodeUnreachable("the link broke")
            yield part
            sent += 1


async def test_a_file_comes_whole_and_its_artifact_is_listed(model: Path, target: Path, serve: Any) -> None:
    model.with_name("m.gguf.kvtc").write_bytes(b"artifact")
    dial = await serve(BlobsServicer(shelf_of(model), anybody))
    listed = {b.kind: (b.digest, b.size_bytes) for b in await list_blobs(dial)}
    seen: list[tuple[int, int]] = []
    await fetch_blob(dial, DIGEST, target, limits=QUICK, on_progress=lambda here, size: seen.append((here, size)))
    assert listed["model"] == (DIGEST, len(BYTES))
    assert listed["kvtc"] == (hashlib.sha256(b"artifact").hexdigest(), 8)
    assert target.read_bytes() == BYTES
    assert seen[0] == (0, len(BYTES))
    assert seen[-1] == (len(BYTES), len(BYTES))
    assert os.listdir(target.parent) == [target.name]
    assert target.stat().st_mode & 0o777 == 0o600


async def test_it_goes_on_where_it_broke_off(model: Path, target: Path, serve: Any) -> None:
    servicer = Breaking(shelf_of(model), after_parts=1, times=3)
    await fetch_blob(await serve(servicer), DIGEST, target, limits=QUICK)
    assert target.read_bytes() == BYTES
    assert servicer.offsets == [0, PART_BYTES, 2 * PART_BYTES, 3 * PART_BYTES]


async def test_attempts_without_a_byte_end_and_keep_what_is_here(model: Path, target: Path, serve: Any) -> None:
    dial = await serve(Breaking(shelf_of(model), after_parts=0, times=99))
    part_of(target, DIGEST).write_bytes(BYTES[:100])
    with pytest.raises(NodeUnreachable):
        await fetch_blob(dial, DIGEST, target, limits=QUICK)
    assert part_of(target, DIGEST).read_bytes() == BYTES[:100]
    assert not target.exists()


async def test_a_peer_that_gives_other_bytes_is_found_out(model: Path, target: Path, serve: Any) -> None:
    class Liar(BlobsServicer):
        async def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.FetchBlobResponse]:
            yield pb.FetchBlobResponse(size_bytes=4, data=b"evil")

    target.write_bytes(b"the old one")
    with pytest.raises(PayloadCorrupt):
        await fetch_blob(await serve(Liar(BlobShelf(), anybody)), DIGEST, target, limits=QUICK)
    assert target.read_bytes() == b"the old one"
    assert os.listdir(target.parent) == [target.name]


async def test_sizes_that_change_or_are_passed_are_refused(target: Path, serve: Any) -> None:
    class Swells(BlobsServicer):
        async def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.FetchBlobResponse]:
            yield pb.FetchBlobResponse(size_bytes=4, data=b"ev")
            yield pb.FetchBlobResponse(size_bytes=4, data=b"illy")

    with pytest.raises(PayloadCorrupt):
        await fetch_blob(await serve(Swells(BlobShelf(), anybody)), DIGEST, target, limits=QUICK)


async def test_a_file_that_changes_under_way_is_not_given_on(model: Path, target: Path, serve: Any) -> None:
    class Changes(BlobsServicer):
        async def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.FetchBlobResponse]:
            async for part in super().FetchBlob(request, context):
                yield part
                model.write_bytes(b"x" * len(BYTES))

    with pytest.raises(PayloadCorrupt, match="changed"):
        await fetch_blob(await serve(Changes(shelf_of(model), anybody)), DIGEST, target, limits=QUICK)
    assert not target.exists()


async def test_an_old_digest_is_not_found_after_a_change(model: Path, target: Path, serve: Any) -> None:
    dial = await serve(BlobsServicer(shelf_of(model), anybody))
    await list_blobs(dial)
    model.write_bytes(b"newer")
    with pytest.raises(NotFound):
        await fetch_blob(dial, DIGEST, target, limits=QUICK)


async def test_a_part_that_is_longer_than_the_file_is_begun_anew(model: Path, target: Path, serve: Any) -> None:
    part_of(target, DIGEST).write_bytes(b"z" * (len(BYTES) + 1))
    await fetch_blob(await serve(BlobsServicer(shelf_of(model), anybody)), DIGEST, target, limits=QUICK)
    assert target.read_bytes() == BYTES


async def test_a_full_disk_is_said_before_a_byte_is_taken(
    model: Path, target: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial = await serve(BlobsServicer(shelf_of(model), anybody))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=len(BYTES)))
    with pytest.raises(Overloaded, match="stay free"):
        await fetch_blob(dial, DIGEST, target, limits=QUICK)
    assert part_of(target, DIGEST).stat().st_size == 0


async def test_silence_counts_as_a_broken_link(target: Path, serve: Any) -> None:
    class Silent(BlobsServicer):
        async def FetchBlob(self, request: pb.FetchBlobRequest, context: Any) -> AsyncIterator[pb.FetchBlobResponse]:
            yield pb.FetchBlobResponse(size_bytes=4)
            await fetch_module.asyncio.sleep(3600)

    limits = FetchLimits(silence_s=0.05, attempts=2, pause_s=0.01)
    with pytest.raises(NodeUnreachable, match="not a byte"):
        await fetch_blob(await serve(Silent(BlobShelf(), anybody)), DIGEST, target, limits=limits)


async def test_one_process_at_a_time(model: Path, target: Path, serve: Any) -> None:
    dial = await serve(BlobsServicer(shelf_of(model), anybody))
    with part_of(target, DIGEST).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(AlreadyExists):
            await fetch_blob(dial, DIGEST, target, limits=QUICK)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "a" * 63])
async def test_what_is_no_digest_is_refused(digest: str, target: Path) -> None:
    def dial() -> grpc.aio.Channel:
        raise AssertionError("nobody is asked")

    with pytest.raises(InvalidRequest, match="digest"):
        await fetch_blob(dial, digest, target)


async def test_strangers_and_too_many_are_refused(model: Path, target: Path, serve: Any) -> None:
    def nobody(context: Any) -> Place:
        raise Unauthenticated("no certificate")

    with pytest.raises(Unauthenticated):
        await fetch_blob(await serve(BlobsServicer(shelf_of(model), nobody)), DIGEST, target, limits=QUICK)
    dial = await serve(BlobsServicer(shelf_of(model), anybody, most_open=0))
    with pytest.raises(Overloaded):
        await fetch_blob(dial, DIGEST, target, limits=FetchLimits(attempts=1))


async def test_one_node_does_not_take_all_places(model: Path, target: Path, serve: Any) -> None:
    callers = iter(["edge-1", "edge-2"])

    def caller(context: Any) -> Place:
        return SimpleNamespace(node_id=next(callers))  # type: ignore[return-value]

    servicer = BlobsServicer(shelf_of(model), caller, most_each=1)
    servicer._open["edge-1"] = 1  # one that never ends
    dial = await serve(servicer)
    with pytest.raises(Overloaded, match="edge-1 takes"):
        await fetch_blob(dial, DIGEST, target, limits=FetchLimits(attempts=1))
    await fetch_blob(dial, DIGEST, target, limits=QUICK)
    assert target.read_bytes() == BYTES
    assert "edge-2" not in servicer._open


async def test_askers_who_leave_do_not_use_up_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, most, begun, done = [0], [0], threading.Event(), threading.Event()

    def slow(shelf: BlobShelf) -> tuple[Blob, ...]:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        begun.set()
        done.wait(5.0)
        reading[0] -= 1
        return ()

    monkeypatch.setattr(BlobShelf, "blobs", slow)
    servicer = BlobsServicer(shelf_of(model), anybody)
    for _ in range(4):
        asked = asyncio.create_task(servicer.ListBlobs(pb.ListBlobsRequest(), SimpleNamespace()))  # type: ignore[arg-type]
        assert await asyncio.to_thread(begun.wait, 5.0)
        await asyncio.sleep(0.02)
        asked.cancel()
    done.set()
    await servicer.ListBlobs(pb.ListBlobsRequest(), SimpleNamespace())  # type: ignore[arg-type]
    assert most[0] == 1


def test_a_file_that_is_gone_is_left_out(model: Path) -> None:
    shelf = shelf_of(model)
    assert [b.digest for b in shelf.blobs()] == [DIGEST]
    model.unlink()
    assert shelf.blobs() == ()
