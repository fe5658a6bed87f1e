"""A node's credentials while they change: the newest pair, and whoever wants to hear of a newer one.

Listeners take it at the next handshake (mesh.rpc.server), dialling happens with `now`; what keeps a connection open
for long listens and makes a new one first. The key stays, the certificate is renewed: so what the node signs stays
verifiable, and a crash between two files cannot leave a pair that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mesh.errors import InvalidRequest
from mesh.identity.ca import NODE_CERT_FILE, NodeCredentials
from mesh.identity.certificates import load_certificate, load_key
from mesh.identity.files import write_private

OnRenewed = Callable[[NodeCredentials], None]


class Keyring:
    """Owned by the node's process. `now` may be read from any thread."""

    def __init__(self, credentials: NodeCredentials, folder: Path | None = None) -> None:
        """`folder`: where the pair is kept; None: in memory only."""
        self._folder = folder
        self._listeners: list[OnRenewed] = []
        self.now = credentials

    @classmethod
    def load(cls, folder: Path) -> Keyring:
        """As NodeCredentials.load."""
        return cls(NodeCredentials.load(folder), folder)

    def listen(self, on_renewed: OnRenewed) -> None:
        """Call with each newer pair, in the thread of `use`; it must be quick and not raise."""
        self._listeners.append(on_renewed)

    def keep(self, cert_pem: bytes) -> NodeCredentials:
        """A newer certificate for the same key and place: check it and write it down; `use` comes next. Blocking (one
        synced write). Raises InvalidRequest if it is of another key or place, what `write_private` raises if it cannot
        be kept."""
        newer = NodeCredentials(key_pem=self.now.key_pem, cert_pem=cert_pem, ca_pem=self.now.ca_pem)
        key = load_key(newer.key_pem, "the node key").public_key()
        if load_certificate(cert_pem, "the new certificate").public_key() != key:
            raise InvalidRequest("the new certificate is not of this node's key", field="certificate")
        if newer.place != self.now.place:
            raise InvalidRequest(
                f"the new certificate is of {newer.place.uri}, not of {self.now.place.uri}", field="certificate"
            )
        if self._folder is not None:
            write_private(self._folder / NODE_CERT_FILE, cert_pem)
        return newer

    def use(self, newer: NodeCredentials) -> None:
        """Use it from now on and tell everybody."""
        self.now = newer
        for listener in self._listeners:
            listener(newer)
