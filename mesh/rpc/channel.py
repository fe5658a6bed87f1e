"""Channels to other nodes and to public listeners.

A grpc.aio client cannot see the server's certificate, so it tells TLS beforehand whom it expects: each node
certificate carries names made from its place (mesh.identity.tls_names), and the handshake with any other place
fails, before a byte of ours is sent. The mesh itself is bound by the authority, which signs for one mesh only.
"""

from __future__ import annotations

import grpc
import grpc.aio

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.identity.ca import NodeCredentials
from mesh.identity.place import Place, Role
from mesh.identity.tls_names import name_of_any, name_of_node, name_of_place, name_of_role
from mesh.rpc.server import NODE_MESSAGE_BYTES, PUBLIC_MESSAGE_BYTES

# 20 s keeps the common NAT mappings (30 s and up) alive, and finds a dead peer within 30 s.
_KEEPALIVE_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_RECONNECT_FIRST_MS, _RECONNECT_MOST_MS = 200, 5_000
# gRPC's "minimum reconnect backoff" is the time that one attempt is given. A new connection takes three to four round
# trips (TCP, TLS, HTTP/2 settings), and a slow box its time for the handshake.
_CONNECT_TIMEOUT_MS = 5_000


def node_channel(
    address: str, credentials: NodeCredentials, expect: Place | Role | str | None = None
) -> grpc.aio.Channel:
    """A connection of its own to a node, mutual TLS. `expect`: who must answer: the very place, a role, a
    node id, or (None) any node of this mesh. Another node at the address shows as NodeUnreachable on the first call.

    Each channel has its own connection, so that bulk KV does not sit in front of tokens."""
    HostPort.parse(address)
    match expect:
        case Place():
            name = name_of_place(expect)
        case Role():
            name = name_of_role(expect)
        case str():
            name = name_of_node(expect)
        case None:
            name = name_of_any()
    tls = grpc.ssl_channel_credentials(
        root_certificates=credentials.ca_pem,
        private_key=credentials.key_pem,
        certificate_chain=credentials.cert_pem,
    )
    options = [("grpc.ssl_target_name_override", name), *_options(NODE_MESSAGE_BYTES)]
    return grpc.aio.secure_channel(address, tls, options=options)


def public_channel(address: str, ca_pem: bytes | None = None) -> grpc.aio.Channel:
    """A connection to a public listener: TLS verified by `ca_pem` against the address's host, or plain text.

    Raises InvalidRequest for plain text to an address that is not loopback."""
    host = HostPort.parse(address)
    if ca_pem is not None:
        tls = grpc.ssl_channel_credentials(root_certificates=ca_pem)
        return grpc.aio.secure_channel(address, tls, options=_options(PUBLIC_MESSAGE_BYTES))
    if not host.is_loopback:
        raise InvalidRequest(
            f"plain text is for loopback only; give the mesh's CA certificate to reach {address}", field="ca_pem"
        )
    return grpc.aio.insecure_channel(address, options=_options(PUBLIC_MESSAGE_BYTES))


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries an API key."""
    return (("authorization", f"Bearer {api_key}"),)


def _options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MOST_MS),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # a proxy taken from the environment would see who talks to whom
    ]
