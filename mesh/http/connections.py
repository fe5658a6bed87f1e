"""The listening socket of an HTTP server, which keeps its open connections in bounds.

uvicorn sets no time for a TLS handshake and a request's header, and no number of connections. So whoever reaches the
port, without a key, could hold all of the process's descriptors. Here a connection that waits for a complete header
is cut after a time, and when all places are taken those that wait longest are cut for new ones: an honest client
sends its header within a round trip, and a request that is being served is never cut.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

HEADER_TIMEOUT_S: Final = 15.0
MAX_CONNECTIONS: Final = 1024
_LOOK_EVERY_S: Final = 1.0
_CUT_RATIO: Final = 1 / 16  # of the places, at once: a look at all connections must not be paid for each new one


class HttpProtocol(Protocol):
    """What is read of uvicorn's protocols (h11 and httptools have the same). `cycle` is the newest request, None
    before the first; `timeout_keep_alive_task` is set while uvicorn itself will close an idle connection."""

    transport: asyncio.Transport
    cycle: Any
    timeout_keep_alive_task: asyncio.TimerHandle | None


@dataclass(slots=True, eq=False)
class _Open:
    """One connection; `state` is what it waits in, and `since_s` when it was first seen there."""

    socket: socket.socket
    since_s: float
    state: tuple[object, object] = field(default=(None, None))


class Listener(socket.socket):
    """A listening socket for HttpServer; `protocols` are those that uvicorn has open. One event loop uses it."""

    def __init__(
        self,
        family: int,
        kind: int,
        protocol: int,
        *,
        header_timeout_s: float = HEADER_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        super().__init__(family, kind, protocol)
        self.protocols: Callable[[], Iterable[Any]] = tuple
        self._header_timeout_s = header_timeout_s
        self._max_connections = max_connections
        self._open: list[_Open] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """As socket.accept. Raises ConnectionAbortedError (after which asyncio goes on) if all places are taken by
        requests that are being served."""
        accepted, address = super().accept()
        now_s = time.monotonic()
        if len(self._open) >= self._max_connections:
            self._make_room(now_s)
        if len(self._open) >= self._max_connections:
            accepted.close()
            raise ConnectionAbortedError("all places are taken")
        self._open.append(_Open(accepted, now_s))
        return accepted, address

    async def cut_the_silent(self) -> None:
        """Look after the connections until cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._header_timeout_s / 4))
            now_s = time.monotonic()
            for waiting in self._waiting(now_s):
                uvicorn_closes_it = waiting.state[1] is not None
                if now_s - waiting.since_s > self._header_timeout_s and not uvicorn_closes_it:
                    _cut(waiting.socket)

    def _make_room(self, now_s: float) -> None:
        waiting = sorted(self._waiting(now_s), key=lambda one: one.since_s)
        for one in waiting[: max(1, int(self._max_connections * _CUT_RATIO))]:
            _cut(one.socket)
            self._open.remove(one)

    def _waiting(self, now_s: float) -> list[_Open]:
        """The connections on which no request is being served. Forgets those that are closed."""
        self._open = [one for one in self._open if one.socket.fileno() >= 0]
        by_number: dict[int, HttpProtocol] = {}
        for protocol in self.protocols():
            if (its := protocol.transport.get_extra_info("socket")) is not None:
                by_number[its.fileno()] = protocol
        found = []
        for one in self._open:
            serving = by_number.get(one.socket.fileno())  # None: in its TLS handshake
            cycle = None if serving is None else serving.cycle
            timer = None if serving is None else serving.timeout_keep_alive_task
            if cycle is not one.state[0] or timer is not one.state[1]:
                one.state, one.since_s = (cycle, timer), now_s
            if cycle is None or cycle.response_complete:
                found.append(one)
        return found


def _cut(connection: socket.socket) -> None:
    """End it both ways; its transport sees the end and closes it, during a TLS handshake too."""
    with suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
