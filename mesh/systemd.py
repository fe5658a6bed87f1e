"""What a process tells systemd: that it is ready, that it stops, and, for the watchdog, that its loop still turns.

The protocol is sd_notify(3): one datagram of KEY=VALUE lines to a Unix socket. Units hand the socket and the watchdog's
period over as settings (`${NOTIFY_SOCKET}` and `${WATCHDOG_USEC}` are filled in by systemd), for nothing here reads
the environment. Without a socket every call does nothing. A datagram that cannot be sent is logged, never raised: a
service that works must not end because its manager did not listen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mesh.process import background_loop
from mesh.settings import Systemd
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
_BEATS_PER_PERIOD: Final = 4  # a beat or two may be lost or late


class ServiceManager:
    """The socket of one process; `close` it. An abstract socket is written with a leading @."""

    def __init__(self, settings: Systemd) -> None:
        self._address = settings.notify_socket
        self._beat_s = settings.watchdog_us / 1e6 / _BEATS_PER_PERIOD
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def tell(self, *lines: str) -> bool:
        """Send KEY=VALUE lines as one datagram; True if it was sent."""
        if self._socket is None:
            return False
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            self._socket.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("service_manager_not_told", error_type=type(error).__name__, error=str(error.strerror))
            return False
        return True

    async def beat(self, alive: Callable[[], bool]) -> None:
        """Feed the watchdog for good, four times a period, as long as `alive` says so. Returns at once without one."""
        while self._socket is not None and self._beat_s > 0:
            if alive():
                self.tell("WATCHDOG=1")
            await asyncio.sleep(self._beat_s)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@contextmanager
def told_ready(settings: Systemd, alive: Callable[[], bool] = lambda: True) -> Iterator[ServiceManager]:
    """Ready on the way in, stopping on the way out, the watchdog fed in between. Needs a running loop."""
    manager = ServiceManager(settings)
    manager.tell("READY=1")
    beats = background_loop(lambda: manager.beat(alive), "watchdog")
    try:
        yield manager
    finally:
        beats.cancel()
        manager.tell("STOPPING=1")
        manager.close()
