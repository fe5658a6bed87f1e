"""Transport: how frames of KV transfers get from one node to another.

gRPC is the one implementation (mesh.node.grpc_port_transfer, dialled side in mesh.node.servicer); one over RDMA or
shared memory would implement the same two ends. tests/conformance/transport_suite.py holds each to what is written
here and at FrameStream. A transport knows nothing of what frames mean: order of frames, credits, digests and going on
after a break are above it.

- Both ends know the other's place from what the transport proves (a certificate), not from what it says.
- Frames arrive whole, once and in order, or the stream is broken; sending and receiving at the same time is fine.
- A stream that broke, or that the other end left, raises NodeUnreachable; first comes what was sent before it ended.
- An error that the dialled end raised is raised at the dialling end, as that error.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from mesh.node.host_frames import FrameStream
from mesh.node.port import Peer


class Transport(Protocol):
    """The dialling half. The dialled half hands each stream with its first frame to NodeHost.serve_transfer."""

    def dial(self, peer: Peer) -> AbstractAsyncContextManager[FrameStream]:
        """A new stream to a peer that has proved to be `peer.place`, or fails on its first use with NodeUnreachable.
        Leaving it ends the stream, after what was sent has gone out if it is left without an exception."""
        ...
