"""Network addresses as values: `host:port`, checked once at the rim. Pure; no I/O, no name resolution."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from mesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """A listener's or peer's address. Port 0 asks the system for a free one; `str()` is what grpc takes."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or any(c.isspace() or c in "/[]" for c in self.host):
            raise InvalidRequest(f"not a host name or address: {self.host!r}", field="address")
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"a port is a number from 0 to 65535, got {self.port}", field="address")

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """From `host:port` or `[v6]:port`. Raises InvalidRequest."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise InvalidRequest(f"write an IPv6 address as [address]:port, got {text!r}", field="address")
        if not colon or not port.isascii() or not port.isdigit():
            raise InvalidRequest(f"an address is host:port, got {text!r}", field="address")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """True only if the name surely means this machine; nothing is resolved."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> HostPort:
        """The same host with another port."""
        return HostPort(self.host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
