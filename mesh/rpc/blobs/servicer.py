"""The Blobs RPCs over a shelf. Who calls must be a node of this mesh; every member may have what is on the shelf, which
holds no tenant's data. Bounded: so many fetches at once, fewer of one node, and one thread that reads files through for
their digests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import grpc.aio

from mesh.errors import InvalidRequest, Overloaded, PayloadCorrupt
from mesh.identity.place import Place
from mesh.rpc.blobs.shelf import Blob, BlobShelf
from mesh.v1 import blobs_pb2 as pb
from mesh.v1 import blobs_pb2_grpc as pb_grpc

PART_BYTES = 512 * 1024


class BlobsServicer(pb_grpc.BlobsServicer):
    """`peer_place` raises Unauthenticated where there is no certificate of a node of this mesh."""

    def __init__(
        self,
        shelf: BlobShelf,
        peer_place: Callable[[grpc.aio.ServicerContext], Place],
        *,
        most_open: int = 16,
        most_each: int = 4,
    ) -> None:
        self._shelf = shelf
        self._peer_place = peer_place
        self._most_open = most_open
        self._most_each = most_each
        self._open: Counter[str] = Counter()  # node id -> its fetches
        # Digests take long at first: askers, also those who left, must not use the threads of this process up.
        self._looker = ThreadPoolExecutor(1, "blobs")

    async def ListBlobs(self, request: pb.ListBlobsRequest, context: grpc.aio.ServicerContext) -> pb.ListBlobsResponse:
        self._peer_place(context)
        blobs = await asyncio.get_running_loop().run_in_executor(self._looker, self._shelf.blobs)
        told = (pb.Blob(digest=b.digest, size_bytes=b.size_bytes, name=b.name, kind=b.kind) for b in blobs)
        return pb.ListBlobsResponse(blobs=told)

    async def FetchBlob(
        self, request: pb.FetchBlobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchBlobResponse]:
        node_id = self._peer_place(context).node_id
        total = self._open.total()
        if total >= self._most_open:
            raise Overloaded(f"{total} files are being given here, the most is {self._most_open}: try again later")
        if self._open[node_id] >= self._most_each:
            raise Overloaded(f"{node_id} takes {self._most_each} files already, which is the most: end one")
        self._open[node_id] += 1
        try:
            loop = asyncio.get_running_loop()
            blob = await loop.run_in_executor(self._looker, self._shelf.find, request.digest)
            if request.offset_bytes > blob.size_bytes:
                raise InvalidRequest(
                    f"the file has {blob.size_bytes} bytes, asked for those from {request.offset_bytes} on",
                    field="offset_bytes",
                )
            with await asyncio.to_thread(blob.path.open, "rb") as file:
                await asyncio.to_thread(file.seek, request.offset_bytes)
                yield pb.FetchBlobResponse(size_bytes=blob.size_bytes)
                left = blob.size_bytes - request.offset_bytes
                while left:
                    data = await asyncio.to_thread(_read, file, blob, min(left, PART_BYTES))
                    left -= len(data)
                    yield pb.FetchBlobResponse(size_bytes=blob.size_bytes, data=data)
        finally:
            self._open[node_id] -= 1
            self._open += Counter()  # without those at nought


def _read(file: BinaryIO, blob: Blob, n_bytes: int) -> bytes:
    """The next bytes. Raises PayloadCorrupt if the file is being changed: what was sent of it is of no use then."""
    data = file.read(n_bytes)
    try:
        stat = blob.path.stat()
        same = (stat.st_size, stat.st_mtime_ns) == (blob.size_bytes, blob.mtime_ns)
    except OSError:
        same = False
    if len(data) < n_bytes or not same:
        raise PayloadCorrupt(f"{blob.name} was changed while it was given: ask for the list again", field="digest")
    return data
