"""The three listeners of a node.

- public: API keys, over TLS; plain text on loopback only;
- node: mutual TLS within the mesh, a client certificate is demanded by the handshake;
- health: grpc.health.v1 on loopback, for Consul's own check.

They are three because one gRPC port cannot ask some clients for certificates and others not. Each factory binds
at once, so that a port in use is an error at start-up, and leaves starting to the caller, who first adds
servicers to `listener.server`. Call them inside a running event loop.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.identity.ca import NodeCredentials
from mesh.identity.keyring import Keyring
from mesh.rpc.errors import ErrorInterceptor

PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024
NODE_MESSAGE_BYTES = 16 * 1024 * 1024
"""KV pieces are 512 KiB; what needs the room is a listing of stored values."""

# Clients ping every 20 s to keep NAT mappings alive; grpc's default server answers that with GOAWAY.
_MIN_PING_INTERVAL_MS = 10_000
_KEEPALIVE_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound server, not started yet. `address` has the real port where 0 was asked for."""

    server: grpc.aio.Server
    address: str


def public_server(
    address: str,
    *,
    credentials: NodeCredentials | Keyring | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> Listener:
    """The listener for tenants and people. `interceptors` run inside the error mapping: usually mesh.rpc.auth's.

    Raises InvalidRequest for plain text (no `credentials`) on an address that is not loopback: keys and prompts
    would cross the network in the clear. A Keyring's newest certificate is shown at each handshake."""
    if credentials is None:
        _require_loopback(address, "a plain-text public listener")
        return _listen(address, None, PUBLIC_MESSAGE_BYTES, interceptors)
    tls = _tls(credentials, clients=False)
    return _listen(address, tls, PUBLIC_MESSAGE_BYTES, interceptors)


def node_server(
    address: str, credentials: NodeCredentials | Keyring, *, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> Listener:
    """The listener for other nodes of the mesh: mutual TLS. mesh.rpc.peer tells a servicer who calls."""
    tls = _tls(credentials, clients=True)
    return _listen(address, tls, NODE_MESSAGE_BYTES, interceptors)


def health_server(address: str = "127.0.0.1:0") -> tuple[Listener, health.aio.HealthServicer]:
    """The health listener and its servicer; `await servicer.set("", status)` sets what it says. Loopback only."""
    _require_loopback(address, "the health listener")
    listener = _listen(address, None, PUBLIC_MESSAGE_BYTES, ())
    return listener, add_health(listener.server)


def add_health(server: grpc.aio.Server) -> health.aio.HealthServicer:
    """Serve grpc.health.v1 on any listener. A fresh one answers SERVING for the whole server."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Let tools list these services (full names) and their messages."""
    reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)


def _require_loopback(address: str, what: str) -> None:
    if not HostPort.parse(address).is_loopback:
        raise InvalidRequest(
            f"{what} may listen on loopback only, not on {address}; give it a certificate or use 127.0.0.1",
            field="address",
        )


def _tls(source: NodeCredentials | Keyring, *, clients: bool) -> grpc.ServerCredentials:
    """`clients`: they must show a certificate of this mesh. grpc asks again at each handshake, from its own threads."""
    keyring = source if isinstance(source, Keyring) else Keyring(source)
    shown = keyring.now

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = [(shown.key_pem, shown.cert_pem)]
        return grpc.ssl_server_certificate_configuration(pair, root_certificates=shown.ca_pem if clients else None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        newest = keyring.now
        if newest is shown:
            return None  # as before
        shown = newest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=clients)


def _listen(
    address: str,
    tls: grpc.ServerCredentials | None,
    message_bytes: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> Listener:
    wanted = HostPort.parse(address)
    server = grpc.aio.server(interceptors=(ErrorInterceptor(), *interceptors), options=_options(message_bytes))
    try:
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise _bind_error(wanted) from error
    return Listener(server=server, address=str(wanted.with_port(port)))


def _options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else a second process binds the same port and takes half of the calls
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def _bind_error(wanted: HostPort) -> InvalidRequest:
    """grpc does not say why it could not bind, so ask the operating system."""
    why = "grpc could not bind it"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except socket.gaierror:
        why = f"{wanted.host!r} is not the name of an address of this machine"
    except OSError as error:
        why = {
            errno.EADDRINUSE: f"port {wanted.port} is in use by another process",
            errno.EACCES: f"port {wanted.port} needs privileges",
            errno.EADDRNOTAVAIL: f"{wanted.host} is not an address of this machine",
        }.get(error.errno or 0, str(error))
    return InvalidRequest(f"cannot listen on {wanted}: {why}", field="address", port=str(wanted.port))
