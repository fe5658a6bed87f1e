"""uvicorn inside a running event loop: bound at once, without signal handlers, stopped by its owner."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.http.connections import HEADER_TIMEOUT_S, MAX_CONNECTIONS, Listener
from mesh.process import background_loop

_BACKLOG = 512  # also what asyncio accepts in one go, so that many may be over the limit for a moment


class HttpServer:
    """One HTTP listener. Raises InvalidRequest where it cannot bind, or for plain text that is not on loopback."""

    def __init__(
        self,
        app: ASGIApp,
        address: str,
        *,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        header_timeout_s: float = HEADER_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """`cert_file` and `key_file` (PEM) make it TLS. Binds; port 0 takes a free one. For the limits see
        mesh.http.connections."""
        wanted = HostPort.parse(address)
        if cert_file is None and not wanted.is_loopback:
            raise InvalidRequest(
                f"plain HTTP may listen on loopback only, not on {wanted}; give it a certificate or use 127.0.0.1",
                field="address",
            )
        self._socket = _bind(wanted, header_timeout_s, max_connections)
        self._host_port = wanted.with_port(self._socket.getsockname()[1])
        self._tls = cert_file is not None
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            timeout_keep_alive=30, backlog=_BACKLOG,
            ssl_certfile=cert_file, ssl_keyfile=key_file, ssl_version=ssl.PROTOCOL_TLS_SERVER,
        )  # fmt: skip
        self._server = _Server(config)
        self._socket.protocols = lambda: self._server.server_state.connections
        self._task: asyncio.Task[None] | None = None
        self._cutter: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port, with the real port."""
        return str(self._host_port)

    @property
    def url(self) -> str:
        """Base address, e.g. "http://127.0.0.1:7080"."""
        return f"{'https' if self._tls else 'http'}://{self._host_port}"

    def renew_certificate(self) -> None:
        """Read the certificate's file again, for handshakes from now on. Nothing without TLS. Raises InvalidRequest."""
        config = self._server.config
        if config.ssl is None or config.ssl_certfile is None:
            return
        try:
            config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise InvalidRequest(f"cannot use the certificate for {self.address}: {error}", field="address") from error

    async def start(self) -> None:
        """Serve; returns when requests are taken."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http:{self.address}")
        while not self._server.started:
            if self._task.done():
                self._socket.close()
                await self._raise_start_error(self._task)
            await asyncio.sleep(0.005)
        self._cutter = background_loop(self._socket.cut_the_silent, f"http connections:{self.address}")

    async def close(self, grace_s: float = 5.0) -> None:
        """Take nothing new, give open requests `grace_s`, then cancel them. Idempotent."""
        if self._task is None:
            self._socket.close()
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        await self._task
        if self._cutter is not None:
            self._cutter.cancel()
            await asyncio.gather(self._cutter, return_exceptions=True)
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)  # those that were cancelled

    async def _raise_start_error(self, task: asyncio.Task[None]) -> NoReturn:
        try:
            await task
        except OSError as error:  # ssl.SSLError is one
            raise InvalidRequest(f"cannot use the certificate for {self.address}: {error}", field="address") from error
        raise InvalidRequest(f"the HTTP server on {self.address} ended at once", field="address")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield


def _bind(wanted: HostPort, header_timeout_s: float, max_connections: int) -> Listener:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)[0]
        listener = Listener(family, kind, protocol, header_timeout_s=header_timeout_s, max_connections=max_connections)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {wanted}: {error}", field="address") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = f"port {wanted.port} is in use by another process" if error.errno == errno.EADDRINUSE else str(error)
        raise InvalidRequest(f"cannot listen on {wanted}: {why}", field="address", port=str(wanted.port)) from error
    return listener
