"""End-to-end sealing between two nodes of a mesh. Pure: bytes in, bytes out; who carries them is not trusted.

A signed Diffie-Hellman exchange in the manner of SIGMA (Krawczyk 2003): each end sends an ephemeral X25519 key, then
a record, signed by its node certificate's key, over both keys, its part, the relay's session and who it takes the other
end to be. Keys come from HKDF-SHA256 (RFC 5869) over the shared secret, salted with a hash of all of that; messages
are sealed by ChaCha20-Poly1305 (RFC 8439), one key for each direction, nonces counted. So a relay cannot read, alter,
reorder, repeat or answer anything, nor put one end through to another node than the one it means; what it can do is
cut, which shows as a broken stream. Keys are forgotten with the connection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from mesh.errors import PayloadCorrupt, Unauthenticated
from mesh.identity.place import Place
from mesh.identity.signing import SignedRecord, verify_record

KEY_BYTES = 32
_PURPOSE = "kvmesh-relay-1"
_NONCE_BYTES = 12


class RecordSigner(Protocol):
    """A node's identity (mesh.identity.signing.NodeIdentity)."""

    @property
    def place(self) -> Place: ...

    def sign(self, body: dict[str, Any]) -> SignedRecord: ...


@dataclass(slots=True)
class SealedPair:
    """Both directions after the handshake. `peer`: who the other end has proved to be."""

    peer: Place
    _to_peer: ChaCha20Poly1305
    _from_peer: ChaCha20Poly1305
    _sent: int = 0
    _received: int = 0

    def seal(self, plain: bytes) -> bytes:
        """The next message to the peer; 16 bytes longer."""
        nonce = self._sent.to_bytes(_NONCE_BYTES, "big")
        self._sent += 1
        return self._to_peer.encrypt(nonce, plain, None)

    def open(self, sealed: bytes) -> bytes:
        """The next message from the peer. Raises PayloadCorrupt if it is not just that."""
        nonce = self._received.to_bytes(_NONCE_BYTES, "big")
        try:
            plain = self._from_peer.decrypt(nonce, sealed, None)
        except InvalidTag as error:
            raise PayloadCorrupt(f"a sealed message from {self.peer.node_id} was altered on the way") from error
        self._received += 1
        return plain


class Handshake:
    """One end's part. Both send `hello`; then the calling end its `proof`, then the called end its own.

    `expect` is who must answer; the called end gives None and learns it. Any deviation raises Unauthenticated or
    PayloadCorrupt, and the connection must be given up."""

    def __init__(
        self, signer: RecordSigner, ca_pem: bytes, *, session: bytes, calling: bool, expect: Place | None = None
    ) -> None:
        self._signer = signer
        self._ca_pem = ca_pem
        self._session = session
        self._calling = calling
        self._peer = expect
        self._secret = X25519PrivateKey.generate()
        self.hello = self._secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._peer_hello = b""

    def meet(self, peer_hello: bytes) -> None:
        """The other end's hello."""
        if len(peer_hello) != KEY_BYTES:
            raise PayloadCorrupt(f"a relayed hello has {KEY_BYTES} bytes, got {len(peer_hello)}")
        self._peer_hello = peer_hello

    def proof(self) -> SignedRecord:
        """That this end is who it is. The called end knows only after `check` to whom it speaks."""
        assert self._peer is not None
        return self._signer.sign(self._body(calling=self._calling, speaker=self._signer.place, to=self._peer))

    def check(self, proof: SignedRecord) -> Place:
        """Who the other end is. Raises Unauthenticated unless it proved to be of this mesh, the one that was meant,
        and to mean this node."""
        body, place = verify_record(proof, self._ca_pem)
        if self._peer is not None and place != self._peer:
            raise Unauthenticated(f"{place.uri} answered over the relay, not {self._peer.uri}", node=place.node_id)
        if place == self._signer.place:
            raise Unauthenticated("the relay sent this node's own proof back", node=place.node_id)
        if body != self._body(calling=not self._calling, speaker=place, to=self._signer.place):
            raise Unauthenticated(
                f"the proof of {place.node_id} is of another connection or for another node", node=place.node_id
            )
        self._peer = place
        return place

    def pair(self) -> SealedPair:
        """The keys; after `check`."""
        assert self._peer is not None
        try:
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(self._peer_hello))
        except ValueError as error:  # a key of small order
            raise Unauthenticated("the other end's key is not a sound one", node=self._peer.node_id) from error
        ends = (self._signer.place.uri, self._peer.uri)
        keys = (self.hello, self._peer_hello)
        if not self._calling:
            ends, keys = (ends[1], ends[0]), (keys[1], keys[0])
        salt = hashlib.sha256(b"\0".join((*keys, self._session, *(end.encode() for end in ends)))).digest()
        derive = HKDF(algorithm=hashes.SHA256(), length=2 * KEY_BYTES, salt=salt, info=_PURPOSE.encode())
        material = derive.derive(shared)
        there, back = ChaCha20Poly1305(material[:KEY_BYTES]), ChaCha20Poly1305(material[KEY_BYTES:])
        return SealedPair(self._peer, there, back) if self._calling else SealedPair(self._peer, back, there)

    def _body(self, *, calling: bool, speaker: Place, to: Place) -> dict[str, Any]:
        ours_first = self._calling
        keys = (self.hello, self._peer_hello) if ours_first else (self._peer_hello, self.hello)
        return {
            "purpose": _PURPOSE,
            "part": "calling" if calling else "called",
            "session": self._session.hex(),
            "calling_key": keys[0].hex(),
            "called_key": keys[1].hex(),
            "place": speaker.uri,
            "to": to.uri,
        }
